"""Causal attention by torch's fused kernels.

Notation: n sequences of L tokens, of which the last Q attend, H query heads, KV key-value heads, D
head size.
"""

from typing import Any

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.functional import scaled_dot_product_attention

_MASK_ROWS = 1024  # queries of one mask: it needs memory for them times the keys


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
) -> Tensor:
    """Compute causal attention of the last tokens of each sequence.

    Args:
        query: [n, H, Q, D], of the last Q tokens.
        key: [n, KV, L, D].
        value: [n, KV, L, D].
        scale: factor of the scores; None means 1 / sqrt(D).
        window: number of tokens each token attends to, itself included; None means all before it.

    Returns:
        [n, H, Q, D].
    """
    before = key.shape[2] - query.shape[2]
    if not before and (window is None or window >= key.shape[2]):
        return _attend(query, key, value, scale, None)
    parts = []
    for part in query.split(_MASK_ROWS, 2):
        end = before + part.shape[2]
        mask = _mask(part.shape[2], end, window, query.device)
        if end == key.shape[2]:
            seen, seen_value = key, value
        else:
            seen, seen_value = key[:, :, :end], value[:, :, :end]
        parts.append(_attend(part, seen, seen_value, scale, mask))
        before = end
    return torch.cat(parts, 2) if len(parts) > 1 else parts[0]


def _attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, mask: Tensor | None
) -> Tensor:
    """Compute attention under a mask; None: causal."""
    copies = query.shape[1] // key.shape[1]
    if copies > 1 and query.is_cuda and not _flash_fits(query, key, value, mask):
        # On a GPU the other kernel that shares keys between heads stores all scores: [n, H, Q, L].
        key = key.repeat_interleave(copies, 1)
        value = value.repeat_interleave(copies, 1)
    return scaled_dot_product_attention(
        query,
        key,
        value,
        mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=key.shape[1] != query.shape[1],
    )


def mask_window(local_size: int | None = None, config: Any = None, **kwargs: Any) -> int | None:
    """Return what a transformers model passes to attention as its mask: the window, or None for a
    causal mask. Some models give attention their window in the mask only.

    transformers calls it as its mask interface. Sequences and padding are left to the attention.

    Raises:
        NotImplementedError: the mask is of chunks.
    """
    if local_size is not None and local_size != getattr(config, "sliding_window", None):
        raise NotImplementedError("attention within chunks is not supported")
    return local_size


def _flash_fits(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Return True if FlashAttention takes the tensors: 16 bits, no mask, and a GPU that has it."""
    return can_use_flash_attention(SDPAParams(query, key, value, mask, 0.0, mask is None, True))


def _mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return [queries, keys] bool: each of the last tokens attends to itself and the window - 1
    tokens before it, or to all of them."""
    mask = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return mask if window is None else mask.triu(keys - queries + 1 - window)
