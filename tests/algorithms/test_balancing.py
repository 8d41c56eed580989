"""Partitions contain every item once, with even totals, equal counts and token caps."""

import itertools
import random

import numpy as np
import pytest

from verlite.algorithms.balancing import karmarkar_karp, micro_batches_by_tokens, workload


def totals(weights, parts) -> list[int]:
    return [sum(weights[i] for i in part) for part in parts]


def naive_differencing(weights, k: int) -> list[float]:
    """Return the part sums of the published largest differencing method, in descending order."""
    states = [[w] + [0] * (k - 1) for w in weights]
    while len(states) > 1:
        states.sort(key=lambda s: s[-1] - s[0])
        left, right = states[0], states[1]
        states = [
            sorted((a + b for a, b in zip(left, reversed(right), strict=True)), reverse=True)
        ] + states[2:]
    return states[0]


def test_hand_example() -> None:
    """Textbook example: differencing splits 8, 7, 6, 5, 4 into parts of 16 and 14."""
    assert sorted(totals([8, 7, 6, 5, 4], karmarkar_karp([8, 7, 6, 5, 4], 2))) == [14, 16]


@pytest.mark.parametrize("seed", range(60))
def test_partition_is_complete_and_as_even_as_the_published_method(seed: int) -> None:
    rng = random.Random(seed)
    n, k = rng.randint(1, 60), rng.randint(1, 9)
    weights = [rng.choice([rng.randint(1, 50), rng.randint(1, 5000), 0, 7]) for _ in range(n)]
    parts = karmarkar_karp(weights, k)
    assert len(parts) == k and sorted(itertools.chain(*parts)) == list(range(n))
    assert all(part == sorted(part) for part in parts)
    got, published = totals(weights, parts), naive_differencing(weights, k)
    assert max(got) - min(got) <= max(published[0] - published[-1], max(weights) // 10)


@pytest.mark.parametrize("seed", range(20))
def test_equal_counts(seed: int) -> None:
    rng = random.Random(seed)
    k = rng.randint(1, 8)
    weights = [rng.randint(1, 4000) for _ in range(k * rng.randint(1, 20))]
    parts = karmarkar_karp(weights, k, equal_size=True)
    assert {len(part) for part in parts} == {len(weights) // k}
    assert sorted(itertools.chain(*parts)) == list(range(len(weights)))
    chunks = totals(weights, np.arange(len(weights)).reshape(k, -1).tolist())
    got = totals(weights, parts)
    assert max(got) - min(got) <= max(chunks) - min(chunks)


def test_large_problem_is_balanced() -> None:
    lengths = np.random.default_rng(0).integers(50, 4096, 2048)
    for equal in (False, True):
        got = totals(lengths, karmarkar_karp(lengths, 64, equal))
        assert max(got) - min(got) <= 5


def test_fewer_items_than_parts_and_invalid_part_counts() -> None:
    assert sorted(karmarkar_karp([5, 9], 4), reverse=True) == [[1], [0], [], []]
    assert karmarkar_karp([], 2) == [[], []]
    with pytest.raises(ValueError, match="7 items into 2 parts of equal size"):
        karmarkar_karp([1] * 7, 2, equal_size=True)
    with pytest.raises(ValueError, match="0 parts"):
        karmarkar_karp([1], 0)


@pytest.mark.parametrize("seed", range(30))
def test_micro_batches_respect_the_cap(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randint(1, 100) for _ in range(rng.randint(1, 60))]
    cap = rng.randint(100, 400)
    parts = micro_batches_by_tokens(lengths, cap)
    assert sorted(itertools.chain(*parts)) == list(range(len(lengths)))
    assert max(totals(lengths, parts)) <= cap
    fewest = -(-sum(lengths) // cap)
    assert len(parts) <= fewest + 1 or len(parts) <= 1.25 * fewest
    assert totals(lengths, parts) == sorted(totals(lengths, parts), reverse=True)


@pytest.mark.parametrize("seed", range(10))
def test_micro_batches_are_not_more_than_those_of_best_fit(seed: int) -> None:
    """Of samples that nearly fill a micro-batch, even totals would leave too little room."""
    rng = random.Random(seed)
    lengths = [rng.randint(20, 90) for _ in range(60)]
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = sorted(room for room in rooms if room >= length)
        if fitting:
            rooms.remove(fitting[0])
        rooms.append((fitting or [100])[0] - length)
    parts = micro_batches_by_tokens(lengths, 100)
    assert len(parts) <= len(rooms) and max(totals(lengths, parts)) <= 100


def test_micro_batches_of_empty_input_and_oversized_sample() -> None:
    assert micro_batches_by_tokens([], 10) == [[]]
    assert micro_batches_by_tokens([3], 10) == [[0]]
    with pytest.raises(ValueError, match="sample 1 has 11 tokens, more than the limit of 10"):
        micro_batches_by_tokens([3, 11], 10)


def test_workload() -> None:
    assert workload([1, 10], hidden_size=4).tolist() == [24 + 1, 240 + 100]
    assert workload([2])[0] == 24576 * 2 + 4
