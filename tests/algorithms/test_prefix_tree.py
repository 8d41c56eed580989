"""The tree of packed sequences against a trie of dictionaries, and its micro-batches."""

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch

from verlite.algorithms.balancing import _runs, micro_batches_by_tokens, micro_batches_of_tree
from verlite.algorithms.packing import Packed, pack
from verlite.algorithms.prefix_tree import (
    prefix_tree,
    sort_by_prefix,
    token_keys,
)


def packed(sequences: list[list[int]], first_positions: list[int] | None = None) -> Packed:
    width = max(map(len, sequences))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in sequences])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in sequences])
    first = torch.tensor(first_positions or [0] * len(sequences))
    return pack(ids, mask, torch.arange(width) + first[:, None])


def random_sequences(seed: int) -> list[list[int]]:
    """Return sequences over two tokens, so that they share prefixes of all lengths."""
    rng = random.Random(seed)
    return [[rng.randint(1, 2) for _ in range(rng.randint(1, 9))] for _ in range(12)]


def trie_size(sequences: list[list[int]]) -> int:
    trie: dict[int, Any] = {}
    for row in sequences:
        node = trie
        for token in row:
            node = node.setdefault(token, {})

    def size(node: dict[int, Any]) -> int:
        return sum(1 + size(child) for child in node.values())

    return size(trie)


def test_hand_example() -> None:
    """A prompt 5 6 with answers 7 8, 7 9 and 7, another prompt, and the first answer again."""
    tree = prefix_tree(packed([[5, 6, 7, 8], [4], [5, 6, 7, 9], [5, 6, 7], [5, 6, 7, 8]]))
    assert tree is not None
    ids = packed([[5, 6, 7, 8], [4], [5, 6, 7, 9], [5, 6, 7], [5, 6, 7, 8]]).input_ids
    assert ids[tree.kept].tolist() == [4, 5, 6, 7, 8, 9]
    assert tree.places.tolist() == [1, 2, 3, 4, 0, 1, 2, 3, 5, 1, 2, 3, 1, 2, 3, 4]
    assert tree.lengths == (1, 3, 1, 1)
    assert [path.tolist() for path in tree.paths] == [[0], [1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 5]]


@pytest.mark.parametrize("seed", range(20))
def test_every_distinct_token_stands_once_behind_its_path(seed: int) -> None:
    sequences = random_sequences(seed)
    batch = packed(sequences)
    tree = prefix_tree(batch)
    assert tree is not None
    assert sorted(set(tree.places.tolist())) == list(range(len(tree.kept)))
    assert len(tree.kept) == trie_size(sequences)
    assert len(tree.kept) == len(batch.input_ids) - sum(sort_by_prefix(token_keys(batch))[1])
    assert torch.equal(batch.input_ids[tree.kept][tree.places], batch.input_ids)
    assert torch.equal(batch.position_ids[tree.kept][tree.places], batch.position_ids)
    assert sum(tree.lengths) == len(tree.kept)
    # Each block of new tokens ends a path that is one of the sequences' places.
    blocks = np.split(np.arange(len(tree.kept)), np.cumsum(tree.lengths)[:-1])
    starts = batch.cu_seqlens.tolist()
    places = {tuple(tree.places[a:b].tolist()) for a, b in itertools.pairwise(starts)}
    for block, path in zip(blocks, tree.paths, strict=True):
        whole = path.tolist()
        assert whole[-len(block) :] == block.tolist() and tuple(whole) in places


def test_other_positions_are_other_tokens() -> None:
    """A token's hidden state depends on its position, so only equal positions are shared."""
    same = prefix_tree(packed([[5, 6, 7], [5, 6, 8]]))
    assert same is not None and len(same.kept) == 4
    assert prefix_tree(packed([[5, 6, 7], [5, 6, 8]], [0, 1])) is None


def part_sizes(parts: list[list[int]], rows: list[list[int]]) -> list[int]:
    return [trie_size([rows[i] for i in part]) for part in parts]


@pytest.mark.parametrize("seed", range(30))
def test_micro_batches_have_every_row_and_keep_the_limit(seed: int) -> None:
    rows = random_sequences(seed)
    order, shared = sort_by_prefix(token_keys(packed(rows)))
    in_order = [rows[i] for i in order]
    limit = random.Random(seed).randint(max(map(len, rows)), 40)
    parts = micro_batches_of_tree(list(map(len, in_order)), shared, limit)
    assert sorted(itertools.chain(*parts)) == list(range(len(rows)))
    sizes = part_sizes(parts, in_order)
    assert max(sizes) <= limit
    flat = micro_batches_by_tokens(list(map(len, in_order)), limit)
    assert len(parts) <= len(flat)


@pytest.mark.parametrize("seed", range(30))
def test_no_other_runs_of_rows_are_fewer_or_more_even(seed: int) -> None:
    rows = random_sequences(seed)[:9]
    order, shared = sort_by_prefix(token_keys(packed(rows)))
    in_order = [rows[i] for i in order]
    longest = max(map(len, rows))
    limit = random.Random(seed).randint(longest, 3 * longest)
    before = np.array(shared)
    total = np.array([0, *itertools.accumulate(map(len, in_order))])
    total[1:] -= before.cumsum()
    runs = _runs(total, before, limit)
    assert sorted(itertools.chain(*runs)) == list(range(len(rows)))
    found = part_sizes(list(map(list, runs)), in_order)
    best = (len(rows) + 1, 0)
    for cuts in itertools.product((False, True), repeat=len(rows) - 1):
        bounds = [0, *(i for i, cut in enumerate(cuts, 1) if cut), len(rows)]
        sizes = part_sizes([list(range(a, b)) for a, b in itertools.pairwise(bounds)], in_order)
        if max(sizes) <= limit:
            best = min(best, (len(sizes), sum(size * size for size in sizes)))
    assert (len(found), sum(size * size for size in found)) == best


@pytest.mark.parametrize(
    ("trees", "sizes"),
    [
        ([(2, [6, 2]), (2, [6, 2]), (1, [1]), (1, [1])], [12, 12]),  # whole, each with a small one
        ([(1, [5, 7, 4, 2])], [10, 10]),  # samples: 5 and 4, 7 and 2
        ([(2, [6]), (2, [1, 6, 4])], [11, 12]),  # runs of all samples: the second is divided
        ([(3, [4, 6, 1])], [7, 10]),  # runs 4 and 6 1: fewer tokens than samples 4 1 and 6
    ],
)
def test_the_way_with_the_fewest_micro_batches_wins(
    trees: list[tuple[int, list[int]]], sizes: list[int]
) -> None:
    """Trees: (tokens of the prompt, of its answers), limit 12. Other ways have more micro-batches,
    or as many with more tokens."""
    rows = [[t] * p + [10 + i] * a for t, (p, own) in enumerate(trees) for i, a in enumerate(own)]
    shared = [p if i else 0 for p, own in trees for i in range(len(own))]
    parts = micro_batches_of_tree(list(map(len, rows)), shared, 12)
    assert sorted(itertools.chain(*parts)) == list(range(len(rows)))
    assert sorted(part_sizes(parts, rows)) == sizes


def test_rows_of_a_prompt_stay_together() -> None:
    """Four prompts of 8 tokens with 4 answers of 2: 16 distinct tokens each, two in 32."""
    rows = [[p] * 8 + [10 + p, a] for p in range(1, 5) for a in range(4)]
    lengths = [10] * 16
    _, shared = sort_by_prefix(token_keys(packed(rows)))
    parts = micro_batches_of_tree(lengths, shared, 32)
    assert len(parts) == 2
    assert all({i // 4 for i in part} in ({0, 1}, {0, 2}, {0, 3}, {1, 2}, {1, 3}, {2, 3})
               for part in parts)  # fmt: skip
    assert part_sizes(parts, rows) == [26, 26]


def test_a_group_that_is_too_large_is_cut_into_even_runs() -> None:
    """One prompt of 10 tokens with 6 answers of 5: 40 distinct tokens, limit 32. Two runs of 3."""
    rows = [[1] * 10 + [10 + a] * 5 for a in range(6)]
    _, shared = sort_by_prefix(token_keys(packed(rows)))
    parts = micro_batches_of_tree([15] * 6, shared, 32)
    assert sorted(map(sorted, parts)) == [[0, 1, 2], [3, 4, 5]]


def test_without_shared_tokens_rows_are_distributed_as_before() -> None:
    lengths = np.random.default_rng(0).integers(1, 50, 40).tolist()
    found = micro_batches_of_tree(lengths, [0] * 40, 100)
    assert found == micro_batches_by_tokens(lengths, 100)
    with pytest.raises(ValueError, match="60 tokens"):
        micro_batches_of_tree([60, 2], [0, 0], 59)
