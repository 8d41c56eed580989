"""Packing: put the real tokens of a padded batch into one row, and find the response targets.

Notation: B rows, P prompt columns (left-padded), R response columns (right-padded), S = P + R.
T real tokens in the whole batch.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Packed:
    """The real tokens of B sequences, one sequence after another.

    input_ids, position_ids: [T].
    cu_seqlens: [B + 1] int32. Sequence i is at [cu_seqlens[i], cu_seqlens[i + 1]). A row without
        tokens is an empty sequence.
    indices: [T], position of each token in the flattened [B * S] batch.
    """

    input_ids: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    indices: Tensor


@dataclass(frozen=True)
class ResponseTargets:
    """The K packed positions that predict response tokens.

    source: [K], position in [T] whose hidden state predicts.
    labels: [K], the token to predict.
    destination: [K], position of that token in the flattened [B * R] responses.
    """

    source: Tensor
    labels: Tensor
    destination: Tensor

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "ResponseTargets":
        """Return the function's results for all tensors."""
        return ResponseTargets(*map(function, (self.source, self.labels, self.destination)))


def pack(input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Packed:
    """Remove padding from [B, S] tensors. The order of rows and of their tokens is kept."""
    real = attention_mask.bool()
    indices = real.flatten().nonzero().squeeze(1)
    lengths = real.sum(-1)
    cu_seqlens = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=input_ids.device)
    cu_seqlens[1:] = lengths.cumsum(0)
    return Packed(
        input_ids=input_ids.flatten()[indices],
        position_ids=position_ids.flatten()[indices],
        cu_seqlens=cu_seqlens,
        indices=indices,
    )


def shifted_labels(packed: Packed) -> tuple[Tensor, Tensor]:
    """Return the next token of each packed token in its sequence, [T], and whether it exists.

    The flags are [T] bool. The last token of a sequence has label 0 and flag False.
    """
    has_next = torch.ones_like(packed.input_ids, dtype=torch.bool)
    lengths = packed.cu_seqlens.diff()
    has_next[packed.cu_seqlens[1:][lengths > 0].long() - 1] = False
    return packed.input_ids.roll(-1).masked_fill(~has_next, 0), has_next


def response_targets(packed: Packed, columns: int, response_length: int) -> ResponseTargets:
    """Find all real response tokens that have a token before them in their row.

    Only their predictions need the output embedding.

    columns: S of the padded batch. response_length: R, its last columns.
    """
    labels, has_next = shifted_labels(packed)
    column = packed.indices % columns
    source = (has_next & (column >= columns - response_length - 1)).nonzero().squeeze(1)
    row = packed.indices[source] // columns
    # The predicted token is the next packed token. Reading its own position from `indices` also
    # works if masked columns are between the two.
    target_column = packed.indices[source + 1] % columns - (columns - response_length)
    destination = row * response_length + target_column
    return ResponseTargets(source, labels[source], destination)
