"""Token columns: ragged where they are made, kept and sent, padded only where a model or a formula takes them.

A ragged column is an object column with one array per row. In a step's batch the driver has, in place of the arrays, references
to where they lie (controller.columns), and numbers of each row: prompt_length, response_length, trained_tokens.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from verlite.protocol.data import DataProto, object_array
from verlite.protocol.fields import FIELDS

PROMPT, RESPONSE = "prompt_ids", "response_ids"
TOKENS = (PROMPT, RESPONSE, "response_mask")
"""What every pass of a model needs of a row."""


def ragged(values: torch.Tensor, lengths: torch.Tensor) -> np.ndarray:
    """[b, R] to an object array of b arrays, row i's first lengths[i] entries. The arrays are copies."""
    return object_array(
        [
            row[:length].numpy().copy()
            for row, length in zip(values.cpu(), lengths.tolist(), strict=True)
        ]
    )


def pad(
    rows: Sequence[Any] | np.ndarray, width: int, dtype: torch.dtype, side: str = "right"
) -> torch.Tensor:
    """[b, width] tensor from b ragged rows of numbers, 0 where they end or have not begun."""
    padded = np.zeros((len(rows), width), dtype=np.float32 if dtype.is_floating_point else np.int64)
    for i, row in enumerate(rows):
        if len(row):
            padded[i, slice(width - len(row), None) if side == "left" else slice(0, len(row))] = row
    return torch.from_numpy(padded).to(dtype)


def is_ragged(name: str) -> bool:
    """Whether the ledger has a column of this name with one number per response token."""
    return name in FIELDS and FIELDS[name].shape == "B R"


def padded(batch: DataProto) -> DataProto:
    """The batch as models and formulas take it: each ragged column as a tensor, prompts on the left and responses on the right of it.

    Adds prompts [b, P], responses [b, R], input_ids, attention_mask and position_ids [b, P+R]; P and R are the longest of these rows
    and at least 1. response_mask is 0 in rows without trained_tokens (they have no vote) and on rejected_tokens. Fields of a
    [b, 1] tensor, one number for a whole row, are spread over its response_mask.
    Raises ValueError when response_mask does not have trained_tokens tokens: a row has got another row's tokens.
    """
    columns = batch.non_tensor_batch
    t = (
        {}
        if batch.batch is None
        else {
            str(name): tensor
            for name, tensor in batch.batch.items()
            if isinstance(tensor, torch.Tensor)
        }
    )
    p, r = (max(1, *map(len, columns[name])) if len(batch) else 1 for name in (PROMPT, RESPONSE))
    prompts, responses = (
        pad(columns[PROMPT], p, torch.int64, "left"),
        pad(columns[RESPONSE], r, torch.int64),
    )
    # Real tokens are told by lengths, never by ids: the padding's id may well be a token that the model can write.
    before = torch.arange(p) >= p - t["prompt_length"][:, None]
    after = torch.arange(r) < t["response_length"][:, None]
    attention = torch.cat([before, after], dim=1).long()
    tokens = {
        name: pad(column, r, _dtype(name)) for name, column in columns.items() if is_ragged(name)
    }
    mask = tokens["response_mask"] * (t["trained_tokens"] > 0)[:, None]
    if "rejected_tokens" in tokens:
        mask = mask * ~tokens["rejected_tokens"]
    if len(wrong := (mask.sum(1) != t["trained_tokens"]).nonzero()):
        row = int(wrong[0, 0])
        found, told = int(mask[row].sum()), int(t["trained_tokens"][row])
        raise ValueError(
            f"row {row} has trained_tokens={told}, but its response_mask has {found}: these are another row's tokens"
        )
    spread = {
        name: value.expand(-1, r) * mask
        for name, value in t.items()
        if is_ragged(name) and value.shape[1] == 1
    }
    objects = {
        name: column
        for name, column in columns.items()
        if name not in (PROMPT, RESPONSE) and not is_ragged(name)
    }
    return DataProto(None, objects, batch.meta_info).with_batch(
        **t | tokens | spread | {"prompts": prompts, "responses": responses, "response_mask": mask},
        input_ids=torch.cat([prompts, responses], dim=1),
        attention_mask=attention,
        position_ids=(attention.cumsum(1) - 1).clamp(min=0),
    )


def _dtype(name: str) -> torch.dtype:
    dtype = FIELDS[name].dtype
    assert isinstance(dtype, torch.dtype)
    return dtype
