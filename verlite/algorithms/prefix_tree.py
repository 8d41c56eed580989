"""Sequences that begin with the same tokens, as a tree in which each distinct token stands once.

Causal attention makes the hidden state of a token a function of the tokens before it, so sequences
with an equal prefix have equal hidden states there. Sorted, each sequence shares its longest prefix
with one of its neighbors. So a sequence adds to the packed row only what the one before it lacks,
and the tokens that it attends to are a path through the row.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from verlite.algorithms.packing import Packed


@dataclass(frozen=True)
class PrefixTree:
    """The D distinct tokens of T packed tokens.

    kept: [D], the packed token that stands at each place.
    places: [T], the place of each packed token.
    lengths: the new tokens of each sequence that has any, in the order of their places; their sum
        is D.
    paths: for each of `lengths`, the places from the sequence's first token to its last.
    """

    kept: Tensor
    places: Tensor
    lengths: tuple[int, ...]
    paths: tuple[Tensor, ...]


def token_keys(packed: Packed) -> list[np.ndarray]:
    """Return for each sequence one int64 per token, equal where token and position are equal."""
    keys = (packed.input_ids << 32 | packed.position_ids).cpu().numpy()
    return [keys[begin:end] for begin, end in pairwise(packed.cu_seqlens.tolist())]


def sort_by_prefix(sequences: list[np.ndarray]) -> tuple[list[int], list[int]]:
    """Return an order in which neighbors share the most, and how many first tokens each sequence
    shares with the one before it in this order.

    No sequence shares more with any earlier one.
    """
    data = [sequence.tobytes() for sequence in sequences]
    order = sorted(range(len(data)), key=data.__getitem__)
    shared = [0] * min(len(order), 1)
    for a, b in pairwise(order):
        length = min(len(sequences[a]), len(sequences[b]))
        differs = sequences[a][:length] != sequences[b][:length]
        shared.append(int(differs.argmax()) if differs.any() else length)
    return order, shared


def prefix_tree(packed: Packed) -> PrefixTree | None:
    """Return the tree of the packed sequences; None if they share no token."""
    sequences = token_keys(packed)
    order, shared = sort_by_prefix(sequences)
    if not any(shared):
        return None
    starts = packed.cu_seqlens.tolist()
    places = np.empty(len(packed.input_ids), dtype=np.int64)
    kept = []
    path = places[:0]  # of the sequence before
    paths = []
    size = 0
    for i, known in zip(order, shared, strict=True):
        if not len(sequences[i]):
            continue
        new = len(sequences[i]) - known
        path = np.concatenate([path[:known], np.arange(size, size + new)])
        places[starts[i] : starts[i + 1]] = path
        if new:
            kept.append(np.arange(starts[i] + known, starts[i + 1]))
            paths.append(torch.from_numpy(path))
            size += new
    return PrefixTree(
        kept=torch.from_numpy(np.concatenate(kept)),
        places=torch.from_numpy(places),
        lengths=tuple(map(len, kept)),
        paths=tuple(paths),
    )
