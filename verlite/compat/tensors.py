"""Tensor helpers of verl.utils.model and verl.utils.torch_functional."""

from typing import Any, Literal

import torch


def compute_position_id_with_mask(mask: torch.Tensor) -> torch.Tensor:
    """Return positions that start at the first 1 of an attention mask [..., T]; 0 before it."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


def masked_sum(values: torch.Tensor, mask: torch.Tensor, axis: Any = None) -> torch.Tensor:
    """Return the sum over mask == 1. Values outside the mask do not count, even if they are NaN."""
    return torch.where(mask.bool(), values, 0.0).sum(dim=axis)


def masked_mean(values: torch.Tensor, mask: torch.Tensor, axis: Any = None) -> torch.Tensor:
    """Return the mean over mask == 1, with verl's 1e-8 in the denominator."""
    return masked_sum(values, mask, axis) / (mask.sum(dim=axis) + 1e-8)


def pad_sequence_to_length(
    tensors: torch.Tensor, max_seq_len: int, pad_token_id: float, left_pad: bool = False
) -> torch.Tensor:
    """Return [B, T] padded to [B, max(T, max_seq_len)]."""
    missing = max(0, max_seq_len - tensors.shape[-1])
    sides = (missing, 0) if left_pad else (0, missing)
    return torch.nn.functional.pad(tensors, sides, value=pad_token_id)


def postprocess_data(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    max_length: int,
    pad_token_id: int,
    left_pad: bool = True,
    truncation: Literal["left", "right", "middle", "error"] = "error",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and mask [B, max_length], padded or truncated.

    Raises:
        ValueError: the sequences are too long and truncation is "error".
    """
    length = input_ids.shape[-1]
    if length <= max_length:
        ids = pad_sequence_to_length(input_ids, max_length, pad_token_id, left_pad)
        return ids, pad_sequence_to_length(attention_mask, max_length, 0, left_pad)
    if truncation not in ("left", "right", "middle"):
        raise ValueError(f"{length} tokens are more than max_length={max_length}")
    head = {"left": 0, "right": max_length, "middle": max_length // 2}[truncation]
    kept = [*range(head), *range(length - (max_length - head), length)]
    return input_ids[:, kept], attention_mask[:, kept]


def tokenize_and_postprocess_data(
    prompt: str,
    tokenizer: Any,
    max_length: int,
    pad_token_id: int,
    left_pad: bool = True,
    truncation: Literal["left", "right", "middle", "error"] = "error",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokenize one text without special tokens, then `postprocess_data`."""
    data = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    ids, mask = data["input_ids"], data["attention_mask"]
    return postprocess_data(ids, mask, max_length, pad_token_id, left_pad, truncation)
