"""Sums, means and variances over the entries that a mask selects.

Masked-out entries are never multiplied by zero but replaced, so a NaN or an infinity in padding cannot leak into a result.
Every function takes an empty mask and returns 0 for it.
"""

import torch
from torch import Tensor


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of `x` where `mask` is true, over everything or along `dim`. `mask` has the shape of `x`."""
    kept = torch.where(mask.bool(), x, 0)
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of `x` where `mask` is true; 0 where the mask selects nothing."""
    # A bool tensor counts fast as a whole (count_nonzero) but slowly along a dimension, where float32 is exact up to 2^24.
    count = mask.count_nonzero() if dim is None else mask.bool().float().sum(dim)
    return masked_sum(x, mask, dim) / count.clamp(min=1)


def masked_var(x: Tensor, mask: Tensor) -> Tensor:
    """Unbiased variance of `x` where `mask` is true; 0 for fewer than two entries."""
    return _centred_and_variance(x, mask.bool())[1]


def masked_whiten(x: Tensor, mask: Tensor, eps: float = 1e-8) -> Tensor:
    """(x - mean) / sqrt(unbiased variance + eps) over the mask, and 0 outside it. A single entry becomes 0."""
    centred, variance = _centred_and_variance(x, mask.bool())
    return centred * torch.rsqrt(variance + eps)


def _centred_and_variance(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """`x` minus its masked mean, 0 outside the mask, and the unbiased variance: two passes, against cancellation."""
    centred = torch.where(mask, x - masked_mean(x, mask), 0)
    return centred, centred.square().sum() / (mask.count_nonzero() - 1).clamp(min=1)
