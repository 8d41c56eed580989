"""Samples with several sequences: one row in the batch, one row each in a model.

The conversation of an agent program may branch. Its sample stays one row, so everything that counts
rows counts samples: groups, mini-batches, losses, the ledger. The row has its sequences one after
the other, and the column `branches` has their lengths. Only the passes of a model split it, so no
micro-batch needs more tokens than the longest sequence has.
"""

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from verlite.protocol.data import DataProto
from verlite.protocol.ragged import BRANCHES, is_ragged, model_inputs


@dataclass(frozen=True)
class Places:
    """Where the responses of b' sequences are in b rows.

    row: [b'] the row of each sequence.
    column: [b', R'] the column of each token, of the R of the rows' responses.
    is_real: [b', R'] False on padding.
    shape: (b, R).
    """

    row: Tensor
    column: Tensor
    is_real: Tensor
    shape: tuple[int, int]

    def take(self, values: Tensor) -> Tensor:
        """Return the rows' numbers [b, R] at the sequences' tokens: [b', R'], 0 on padding."""
        return values[self.row[:, None], self.column].masked_fill(~self.is_real, 0)

    def put(self, values: Tensor) -> Tensor:
        """Return the sequences' numbers [b', R'] at the rows' tokens: [b, R], 0 elsewhere."""
        whole = values.new_zeros(self.shape)
        rows = self.row[:, None].expand_as(self.column)
        whole[rows[self.is_real], self.column[self.is_real]] = values[self.is_real]
        return whole


def split(batch: DataProto) -> tuple[DataProto, Places | None]:
    """Return padded rows (`ragged.padded`) with one sequence each, and where their tokens were.

    A sample's rows are adjacent. `first_branch` is 1 on the first of them with a token in
    response_mask, which the losses count as the sample. prompt_length and response_length are the
    sequence's, all other numbers per row the sample's. A batch without the column `branches` is
    returned as it is, with None.

    Raises:
        ValueError: the lengths of a row's sequences are not those of its tokens.
    """
    if BRANCHES not in batch.non_tensor_batch:
        return batch, None
    t = batch.tensors()
    branches = batch.non_tensor_batch[BRANCHES]
    lengths = [(prompt, response) for parts in branches for prompt, response in parts]
    prompt, response = torch.tensor(lengths, dtype=torch.int64).view(-1, 2).unbind(1)
    row = torch.tensor([i for i, parts in enumerate(branches) for _ in parts], dtype=torch.int64)
    ends = [list(accumulate(map(sum, parts), initial=0)) for parts in branches]
    _check(branches, ends, t)
    p = t["prompts"].shape[1]
    begin = torch.tensor([start for own in ends for start in own[:-1]], dtype=torch.int64)
    begin = begin + p - t["prompt_length"][row]  # behind the padding of the row's prompt

    context = torch.arange(max([1, *prompt.tolist()]))
    context = context - len(context) + prompt[:, None]
    ids = t["input_ids"][row[:, None], (begin[:, None] + context).clamp(min=0)]
    column = torch.arange(max([1, *response.tolist()]))
    is_real = column < response[:, None]
    column = ((begin + prompt - p)[:, None] + column).masked_fill(~is_real, 0)
    places = Places(row, column, is_real, (len(batch), t["responses"].shape[1]))

    numbers = {"prompt_length": prompt, "response_length": response}
    inputs = model_inputs(ids.masked_fill(context < 0, 0), places.take(t["responses"]), numbers)
    split = {
        name: places.take(values) if is_ragged(name) else values[row]
        for name, values in t.items()
        if name not in inputs
    }
    has_token = split["response_mask"].any(1).nonzero().flatten()
    first = torch.zeros_like(row)
    first[has_token] = (row[has_token].diff(prepend=torch.tensor([-1])) != 0).long()
    return DataProto.from_dict(
        split | numbers | inputs | {"first_branch": first}, meta_info=batch.meta_info
    ), places


def _check(branches: np.ndarray, ends: list[list[int]], t: dict[str, Tensor]) -> None:
    """Raise what `split` does."""
    totals = (t["prompt_length"] + t["response_length"]).tolist()
    for row, (own, total) in enumerate(zip(ends, totals, strict=True)):
        if own[-1] != total:
            raise ValueError(
                f"row {row} has {total} tokens, but its sequences {branches[row]} have {own[-1]}"
            )
