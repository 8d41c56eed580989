"""Packing: the real tokens of a padded batch in one row, without padding, and which of them predict response tokens.

Notation: B rows, S = P + R columns (left-padded prompts, right-padded responses), T real tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Packed:
    """The real tokens of B sequences, one sequence after another.

    input_ids, position_ids: [T]. cu_seqlens: [B + 1] int32, sequence i is at [cu_seqlens[i], cu_seqlens[i + 1]); an empty row
    is an empty sequence. max_seqlen: the longest. indices: [T], where each token was in the flattened [B * S] batch.
    """

    input_ids: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    indices: Tensor


@dataclass(frozen=True)
class ResponseTargets:
    """Which packed positions predict which response tokens, K of them.

    source: [K], position in [T] whose hidden state predicts. labels: [K], the token to predict. destination: [K], place of
    that token in the flattened [B * R] responses.
    """

    source: Tensor
    labels: Tensor
    destination: Tensor


def pack(input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Packed:
    """Drop padding from [B, S] tensors. Order of rows and of tokens within a row is kept."""
    real = attention_mask.bool()
    indices = real.flatten().nonzero().squeeze(1)
    lengths = real.sum(-1)
    cu_seqlens = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=input_ids.device)
    cu_seqlens[1:] = lengths.cumsum(0)
    longest = int(lengths.max()) if len(lengths) else 0
    return Packed(
        input_ids.flatten()[indices], position_ids.flatten()[indices], cu_seqlens, longest, indices
    )


def shifted_labels(packed: Packed) -> tuple[Tensor, Tensor]:
    """The next token of each packed token within its own sequence, [T], and whether there is one, [T] bool.

    The last token of a sequence has no next one: its label is 0 and its flag False.
    """
    has_next = torch.ones_like(packed.input_ids, dtype=torch.bool)
    lengths = packed.cu_seqlens.diff()
    has_next[packed.cu_seqlens[1:][lengths > 0].long() - 1] = False
    return packed.input_ids.roll(-1).masked_fill(~has_next, 0), has_next


def response_targets(packed: Packed, columns: int, response_length: int) -> ResponseTargets:
    """All real response tokens that have a token before them in their row: only these need the output embedding.

    columns: S of the padded batch. response_length: R, its last columns.
    """
    labels, has_next = shifted_labels(packed)
    column = packed.indices % columns
    source = (has_next & (column >= columns - response_length - 1)).nonzero().squeeze(1)
    row = packed.indices[source] // columns
    # The predicted token is the next packed one; its own place is read from there, so a hole before it does no harm.
    destination = (
        row * response_length + packed.indices[source + 1] % columns - (columns - response_length)
    )
    return ResponseTargets(source, labels[source], destination)
