"""Sums, means and whitening over the entries that a mask selects.

Entries outside the mask are replaced, not multiplied by zero, so NaN or infinity in padding cannot
reach a result. Every function accepts an empty mask and returns 0 for it.
"""

import torch
from torch import Tensor


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Return the sum of `x` where `mask` is True, over all entries or along `dim`.

    `mask` has the shape of `x`.
    """
    kept = torch.where(mask.bool(), x, 0)
    if dim is None:
        return kept.sum()
    return kept.sum(dim)


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Return the mean of `x` where `mask` is True, over all entries or along `dim`; 0 if empty."""
    if dim is None:
        count = mask.count_nonzero()
    else:
        # count_nonzero along a dimension is slow. float32 counts exactly up to 2^24.
        count = mask.bool().float().sum(dim)
    return masked_sum(x, mask, dim) / count.clamp(min=1)


def masked_whiten(x: Tensor, mask: Tensor, eps: float = 1e-8) -> Tensor:
    """Return (x - mean) / sqrt(unbiased variance + eps) over the mask, and 0 outside it.

    A single entry becomes 0.
    """
    mask = mask.bool()
    # Two passes, because a variance from sums of squares cancels.
    centered = torch.where(mask, x - masked_mean(x, mask), 0)
    variance = centered.square().sum() / (mask.count_nonzero() - 1).clamp(min=1)
    return centered * torch.rsqrt(variance + eps)
