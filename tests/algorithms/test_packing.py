"""Packing against plain loops: round trips, labels, and positions that predict response tokens."""

import itertools
import random

import pytest
import torch

from verlite.algorithms.packing import pack, response_targets, shifted_labels

P, R = 4, 5


def batch(seed: int = 0, rows: int = 6):
    """Return left-padded prompts of 1 to P tokens with right-padded responses of 0 to R tokens.

    All ids are distinct, also those of padding.
    """
    rng = random.Random(seed)
    ids = torch.arange(100, 100 + rows * (P + R)).reshape(rows, P + R)
    mask = torch.zeros_like(ids)
    for i in range(rows):
        mask[i, P - rng.randint(1, P) : P + rng.choice([0, 1, R, rng.randint(0, R)])] = 1
    position = (mask.cumsum(-1) - 1).clamp(min=0)
    return ids, mask, position


def test_hand_example() -> None:
    ids = torch.tensor([[0, 5, 6, 0], [0, 0, 0, 0], [7, 8, 9, 3]])
    mask = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    packed = pack(ids, mask, (mask.cumsum(-1) - 1).clamp(min=0))
    assert packed.input_ids.tolist() == [5, 6, 7, 8, 9, 3]
    assert packed.position_ids.tolist() == [0, 1, 0, 1, 2, 3]
    assert packed.cu_seqlens.tolist() == [0, 2, 2, 6] and packed.cu_seqlens.dtype == torch.int32
    assert packed.indices.tolist() == [1, 2, 8, 9, 10, 11]
    labels, has_next = shifted_labels(packed)
    assert labels.tolist() == [6, 0, 8, 9, 3, 0]
    assert has_next.tolist() == [True, False, True, True, True, False]


@pytest.mark.parametrize("seed", range(20))
def test_round_trip_and_targets_against_loops(seed: int) -> None:
    ids, mask, position = batch(seed)
    rows, columns = ids.shape
    packed = pack(ids, mask, position)
    back = torch.zeros(rows * columns, dtype=torch.int64).index_copy(
        0, packed.indices, packed.input_ids
    )
    assert torch.equal(back.view(rows, columns), ids * mask)
    assert torch.equal(packed.position_ids, position[mask.bool()])
    starts = packed.cu_seqlens.tolist()
    assert [packed.input_ids[a:b].tolist() for a, b in itertools.pairwise(starts)] == [
        i[m.bool()].tolist() for i, m in zip(ids, mask, strict=True)
    ]

    targets = response_targets(packed, columns, R)
    where = {flat: k for k, flat in enumerate(packed.indices.tolist())}
    want = [
        (where[i * columns + P + j - 1], int(ids[i, P + j]), i * R + j)
        for i in range(rows)
        for j in range(R)
        if mask[i, P + j]
    ]
    got = list(
        zip(
            targets.source.tolist(),
            targets.labels.tolist(),
            targets.destination.tolist(),
            strict=True,
        )
    )
    assert got == want


def test_a_response_without_a_prompt_has_no_first_target() -> None:
    ids, mask = (
        torch.tensor([[0, 0, 7, 8], [0, 5, 6, 0]]),
        torch.tensor([[0, 0, 1, 1], [0, 1, 1, 0]]),
    )
    targets = response_targets(pack(ids, mask, mask), 4, 2)
    assert targets.labels.tolist() == [8, 6] and targets.destination.tolist() == [1, 2]


def test_empty_batch() -> None:
    nothing = torch.zeros(0, P + R, dtype=torch.int64)
    packed = pack(nothing, nothing, nothing)
    assert packed.cu_seqlens.tolist() == [0]
    assert response_targets(packed, P + R, R).labels.shape == (0,)
    padding = torch.zeros(2, P + R, dtype=torch.int64)
    packed = pack(padding, padding, padding)
    assert packed.cu_seqlens.tolist() == [0, 0, 0] and shifted_labels(packed)[0].shape == (0,)
