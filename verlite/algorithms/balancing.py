"""Balance samples over ranks and micro-batches so that all take about the same time."""

import bisect
import heapq
import itertools
from collections.abc import Sequence

import numpy as np


def workload(lengths: Sequence[int] | np.ndarray, hidden_size: int = 4096) -> np.ndarray:
    """Return the relative compute of a sequence of each length s: 6 hidden_size s + s^2.

    The first term stands for the matrix products, the second for attention.
    """
    s = np.asarray(lengths, dtype=np.int64)
    return 6 * hidden_size * s + s * s


def karmarkar_karp(
    weights: Sequence[int] | np.ndarray, k: int, equal_size: bool = False
) -> list[list[int]]:
    """Split indices 0..n-1 into `k` parts of nearly equal total weight.

    Karmarkar and Karp 1982, the largest differencing method. A state is a partial solution: k sums
    with their items. The two states with the largest differences between their sums are merged,
    largest sums with smallest, until one state is left. A state with fewer than k items is stored
    as a list, because each item is alone in its part; most merges only join two lists. A merge of
    full states records which slots were joined. The items are followed through these records once,
    at the end.

    Args:
        weights: [n], not negative.
        k: number of parts.
        equal_size: every part has n / k items.

    Returns:
        k lists of ascending indices. Parts can be empty if n < k. The result is deterministic.

    Raises:
        ValueError: k < 1, or equal_size and n is not divisible by k.
    """
    w = np.asarray(weights, dtype=np.float64)
    n = len(w)
    if k < 1:
        raise ValueError(f"cannot split into {k} parts: the number of parts must be at least 1")
    if equal_size and n % k:
        raise ValueError(
            f"cannot split {n} items into {k} parts of equal size: {n} is not divisible by {k}"
        )
    if k == 1 or n == 0:
        return [list(range(n))] + [[] for _ in range(k - 1)]

    descending = np.argsort(-w, kind="stable").tolist()
    seed_size = k if equal_size else 1
    # States that are lists: the items, largest first.
    lists: dict[int, list[int]] = {}
    # Full states: k sums in descending order.
    sums: dict[int, np.ndarray] = {}
    # Full states that were lists: their items in the order of the sums. Other slots are empty.
    slots: dict[int, np.ndarray] = {}
    # Merged states: left state, right state, and the left one's slot for each slot.
    merges: dict[int, tuple[int, int, np.ndarray]] = {}
    # (minus the difference between largest and smallest sum, state)
    heap: list[tuple[float, int]] = []

    def fill(state: int) -> None:
        """Convert a list into a full state."""
        if state in lists:
            members = np.array(lists.pop(state))
            member_weights = w[members]
            order = np.argsort(-member_weights, kind="stable")
            sums[state] = np.zeros(k)
            sums[state][: len(members)] = member_weights[order]
            slots[state] = members[order]

    def push(state: int) -> None:
        if state in lists and len(lists[state]) == k:
            fill(state)
        if state in sums:
            difference = sums[state][0] - sums[state][-1]
        else:
            # The first item of a list is its largest, and at least one slot is empty.
            difference = w[lists[state][0]]
        heapq.heappush(heap, (-float(difference), state))

    for state, start in enumerate(range(0, n, seed_size)):
        lists[state] = descending[start : start + seed_size]
        push(state)
    newest = len(heap)
    while len(heap) > 1:
        left = heapq.heappop(heap)[1]
        right = heapq.heappop(heap)[1]
        are_lists = left in lists and right in lists
        if are_lists and len(lists[left]) + len(lists[right]) <= k:
            lists[left].extend(lists.pop(right))
            push(left)
            continue
        fill(left)
        fill(right)
        joined = sums.pop(left) + sums.pop(right)[::-1]
        order = np.argsort(-joined, kind="stable")
        sums[newest] = joined[order]
        merges[newest] = left, right, order.astype(np.int32)
        push(newest)
        newest += 1

    last = heap[0][1]
    fill(last)
    part_of = np.empty(n, dtype=np.int64)
    # A state, and the final part of each of its slots.
    pending = [(last, np.arange(k))]
    while pending:
        state, part = pending.pop()
        if state in slots:
            part_of[slots[state]] = part[: len(slots[state])]
            continue
        left, right, order = merges[state]
        for child, child_slots in ((left, order), (right, k - 1 - order)):
            child_part = np.empty(k, dtype=np.int64)
            child_part[child_slots] = part
            pending.append((child, child_part))
    by_part = np.argsort(part_of, kind="stable")
    bounds = np.bincount(part_of, minlength=k).cumsum()[:-1]
    return [items.tolist() for items in np.split(by_part, bounds)]


def micro_batches_by_tokens(
    lengths: Sequence[int] | np.ndarray, max_tokens: int
) -> list[list[int]]:
    """Split samples into as few micro-batches as possible, with even token totals.

    Args:
        lengths: tokens of each sample.
        max_tokens: most tokens of one micro-batch.

    Returns:
        Sample indices of each micro-batch, the largest micro-batch first, so that running out of
        memory shows at once.

    Raises:
        ValueError: a sample is longer than max_tokens.
    """
    tokens = np.asarray(lengths, dtype=np.int64)
    _refuse_longer(tokens, max_tokens)
    return _even(tokens, max_tokens, _best_fit(tokens.tolist(), max_tokens))


def _even(tokens: np.ndarray, max_tokens: int, best: list[list[int]]) -> list[list[int]]:
    """Return the fewest even micro-batches, the largest first; `best` if none are as few."""
    fewest, most = max(-(-int(tokens.sum()) // max_tokens), 1), len(best)
    while fewest <= most:
        count = (fewest + most) // 2
        parts = karmarkar_karp(tokens, count)
        if max(int(tokens[part].sum()) for part in parts) <= max_tokens:
            best, most = parts, count - 1
        else:
            fewest = count + 1
    return sorted(best, key=lambda part: -int(tokens[part].sum()))


def _best_fit(tokens: list[int], max_tokens: int) -> list[list[int]]:
    """Put each sample, the longest first, into the fullest micro-batch that has room for it."""
    parts: list[list[int]] = [[]]
    rooms = [(max_tokens, 0)]  # (tokens that fit, micro-batch), sorted
    for i in sorted(range(len(tokens)), key=lambda i: -tokens[i]):
        place = bisect.bisect_left(rooms, (tokens[i], 0))
        if place == len(rooms):
            rooms.append((max_tokens, len(parts)))
            parts.append([])
        room, part = rooms.pop(place)
        parts[part].append(i)
        bisect.insort(rooms, (room - tokens[i], part))
    return [sorted(part) for part in parts]


def _refuse_longer(tokens: np.ndarray, max_tokens: int) -> None:
    if len(tokens) and tokens.max() > max_tokens:
        raise ValueError(
            f"sample {int(tokens.argmax())} has {int(tokens.max())} tokens, more than the limit of "
            f"{max_tokens} per micro-batch. Raise *_max_token_len_per_gpu to at least the longest "
            "prompt plus response."
        )


MOST_PATHS = 4
"""Attention copies keys and values along the path of each sample: in a micro-batch at most so many
tokens for each token of its limit."""


def micro_batches_of_tree(
    lengths: Sequence[int], shared: Sequence[int], max_tokens: int
) -> list[list[int]]:
    """Split sorted samples that share prefixes into micro-batches that compute each distinct token
    once.

    Trees (samples that share a prefix) are packed whole as by `micro_batches_by_tokens`; of those
    that are too large, each sample by itself. Or all samples are divided into runs of neighbors,
    which are packed. The way that best fit packs into the fewest micro-batches wins, then the one
    with the fewest tokens.

    Args:
        lengths: tokens of each sample, sorted by `prefix_tree.sort_by_prefix`.
        shared: first tokens that each sample shares with the one before it.
        max_tokens: most distinct tokens of one micro-batch. Its samples have at most MOST_PATHS
            times as many together.

    Returns, raises:
        As `micro_batches_by_tokens`.
    """
    if not any(shared):
        return micro_batches_by_tokens(lengths, max_tokens)
    _refuse_longer(np.asarray(lengths), max_tokens)
    before = np.asarray(shared, dtype=np.int64)
    total = np.concatenate([[0], (np.asarray(lengths, dtype=np.int64) - before).cumsum()])

    def tokens(run: range) -> int:
        return int(total[run.stop] - total[run.start] + before[run.start])

    roots = [*(before == 0).nonzero()[0].tolist(), len(lengths)]
    trees: list[range] = []
    for begin, end in itertools.pairwise(roots):
        whole = range(begin, end)
        is_small = tokens(whole) <= max_tokens
        trees += [whole] if is_small else [range(i, i + 1) for i in whole]
    ways = [trees, _runs(total, before, max_tokens)]
    sizes = [list(map(tokens, way)) for way in ways]
    fits = [_best_fit(size, max_tokens) for size in sizes]
    best = min((0, 1), key=lambda way: (len(fits[way]), sum(sizes[way])))
    parts = _even(np.asarray(sizes[best], dtype=np.int64), max_tokens, fits[best])
    rows = [[i for number in part for i in ways[best][number]] for part in parts]
    return [half for part in rows for half in _halves(part, lengths, MOST_PATHS * max_tokens)]


def _runs(total: np.ndarray, before: np.ndarray, max_tokens: int) -> list[range]:
    """Divide samples into the fewest runs of neighbors; of these ways, take the one with the least
    sum of squares of their tokens: the runs are even, and few prefixes are divided.

    Args:
        total: new tokens of all samples before each one, and of all.
        before: tokens that each sample shares with the one before it.
    """
    size = len(total)
    # Of the first samples: number of runs, sum of squares, first sample of the last one.
    count, squares, begin = np.zeros(size, np.int64), np.zeros(size), np.zeros(size, np.int64)
    low = 0
    for end in range(1, size):
        while total[end] - total[low] + before[low] > max_tokens:
            low += 1
        high = int(np.searchsorted(count[:end], count[low], side="right"))
        sums = squares[low:high] + (total[end] - total[low:high] + before[low:high]) ** 2.0
        best = int(sums.argmin())
        count[end], squares[end], begin[end] = count[low] + 1, sums[best], low + best
    runs, end = [], size - 1
    while end:
        runs.append(range(begin[end], end))
        end = int(begin[end])
    return runs


def _halves(part: list[int], lengths: Sequence[int], most: int) -> list[list[int]]:
    """Divide samples until each part's lengths add up to at most `most`."""
    if len(part) <= 1 or sum(lengths[i] for i in part) <= most:
        return [part]
    middle = len(part) // 2
    return [
        half for side in (part[:middle], part[middle:]) for half in _halves(side, lengths, most)
    ]
