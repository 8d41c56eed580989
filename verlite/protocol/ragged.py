"""Token columns: ragged in batches, padded for models and formulas.

A ragged column is an object column with one array per row. The driver's batch has references in
place of the arrays (controller.columns), and numbers per row such as `response_length`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verlite.protocol.data import DataProto, object_array
from verlite.protocol.fields import FIELDS, MASK_COUNTS

PROMPT = "prompt_ids"
RESPONSE = "response_ids"
BRANCHES = "branches"
TOKENS = (PROMPT, RESPONSE, "response_mask", BRANCHES)
"""Columns that every pass of a model needs, if the batch has them."""


def ragged(values: Tensor, lengths: Tensor) -> np.ndarray:
    """Convert [b, R] to an object array of b arrays: a copy of row i's first lengths[i] entries."""
    rows = zip(values.cpu(), lengths.tolist(), strict=True)
    return object_array([row[:length].numpy().copy() for row, length in rows])


def pad(
    rows: Sequence[Any] | np.ndarray, width: int, dtype: torch.dtype, side: str = "right"
) -> Tensor:
    """Convert b ragged rows of numbers to a tensor [b, width], padded with 0 on `side`."""
    array_dtype = np.float32 if dtype.is_floating_point else np.int64
    padded = np.zeros((len(rows), width), dtype=array_dtype)
    for i, row in enumerate(rows):
        if not len(row):
            continue
        if side == "left":
            padded[i, width - len(row) :] = row
        else:
            padded[i, : len(row)] = row
    return torch.from_numpy(padded).to(dtype)


def clear_rows(mask: np.ndarray, lengths: Tensor, cleared: Tensor) -> np.ndarray:
    """Return a ragged mask with zeros in the chosen rows; other rows keep their entries.

    Args:
        mask: [B] arrays or references to arrays.
        lengths: [B] tokens of each row.
        cleared: [B] bool.
    """
    result = mask.copy()
    for row in cleared.nonzero().flatten().tolist():
        result[row] = np.zeros(int(lengths[row]), dtype=np.int8)
    return result


def is_ragged(name: str) -> bool:
    """Return whether this field has one number per response token."""
    return name in FIELDS and FIELDS[name].shape == "B R"


def is_token_column(name: str) -> bool:
    """Return whether this object column has one number per prompt or response token."""
    return name in (PROMPT, RESPONSE) or is_ragged(name)


def pad_columns(batch: DataProto) -> dict[str, Tensor]:
    """Return the batch's token columns as tensors by column name.

    Prompts become [b, P], padded on the left. Everything else becomes [b, R], padded on the right.
    P and R are the longest of these rows, and at least 1.
    """
    tensors = {}
    for name, column in batch.non_tensor_batch.items():
        if name == PROMPT:
            width = _longest(batch, "prompt_length")
            tensors[name] = pad(column, width, torch.int64, "left")
        elif is_token_column(name):
            width = _longest(batch, "response_length")
            tensors[name] = pad(column, width, _dtype(name))
    return tensors


def padded(batch: DataProto, columns: Mapping[str, Tensor] | None = None) -> DataProto:
    """Return the batch with padded tensors in place of its ragged columns.

    With prompt_ids and response_ids it has prompts [b, P], responses [b, R], and input_ids,
    attention_mask and position_ids [b, P+R]. A field [b, 1], one number per row, becomes [b, R]:
    the number on the tokens of `loss_mask` (`response_mask` in batches without it), 0 elsewhere.

    Args:
        columns: the result of `pad_columns`, if the caller has it.

    Raises:
        ValueError: A mask has a different number of tokens than the row's count says. The row got
            another row's tokens.
    """
    if columns is None:
        columns = pad_columns(batch)
    tensors = dict(columns)
    numbers = batch.tensors()
    for mask_name, count_name in MASK_COUNTS.items():
        if mask_name in tensors:
            _check_count(tensors[mask_name], numbers[count_name], mask_name, count_name)
    if RESPONSE in tensors:
        prompts = tensors.pop(PROMPT)
        responses = tensors.pop(RESPONSE)
        tensors |= model_inputs(prompts, responses, numbers)
    mask = tensors.get("loss_mask", tensors.get("response_mask"))
    for name, values in numbers.items():
        if is_ragged(name) and values.shape[1] == 1 and mask is not None:
            numbers[name] = values.expand(mask.shape) * mask
    objects = {
        name: column for name, column in batch.non_tensor_batch.items() if not is_token_column(name)
    }
    return DataProto.from_dict(numbers | tensors, objects, batch.meta_info)


def model_inputs(
    prompts: Tensor, responses: Tensor, numbers: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Join prompts and responses into the inputs of a causal language model.

    Real tokens are recognized by the rows' lengths, because the model may generate the padding's
    token id.
    """
    p = prompts.shape[1]
    in_prompt = torch.arange(p) >= p - numbers["prompt_length"][:, None]
    in_response = torch.arange(responses.shape[1]) < numbers["response_length"][:, None]
    attention = torch.cat([in_prompt, in_response], dim=1).long()
    return {
        "prompts": prompts,
        "responses": responses,
        "input_ids": torch.cat([prompts, responses], dim=1),
        "attention_mask": attention,
        "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
    }


def _check_count(mask: Tensor, count: Tensor, mask_name: str, count_name: str) -> None:
    found = mask.sum(1)
    wrong = (found != count).nonzero()
    if len(wrong):
        row = int(wrong[0, 0])
        raise ValueError(
            f"row {row} has {count_name}={int(count[row])}, but its {mask_name} has "
            f"{int(found[row])} tokens: these are another row's tokens"
        )


def _longest(batch: DataProto, lengths: str) -> int:
    longest: int = max([1, *batch.batch[lengths].tolist()])
    return longest


def _dtype(name: str) -> torch.dtype:
    if name == RESPONSE:
        return torch.int64
    dtype = FIELDS[name].types
    assert isinstance(dtype, torch.dtype)
    return dtype
