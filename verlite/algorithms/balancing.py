"""Spreading samples over ranks and micro-batches so that all take the same time."""

import heapq
from collections.abc import Sequence

import numpy as np


def workload(lengths: Sequence[int] | np.ndarray, hidden_size: int = 4096) -> np.ndarray:
    """Relative compute of a sequence of each length: 6 hidden_size s for the matrices plus s^2 for attention."""
    s = np.asarray(lengths, dtype=np.int64)
    return 6 * hidden_size * s + s * s


def karmarkar_karp(
    weights: Sequence[int] | np.ndarray, k: int, equal_size: bool = False
) -> list[list[int]]:
    """Split indices 0..n-1 into `k` parts of nearly equal total weight, by the largest differencing method.

    (Karmarkar and Karp 1982.) With equal_size all parts have n / k items. Deterministic; indices ascend within a part; parts
    can be empty when n < k. ValueError: k < 1, or equal_size and n not divisible by k.

    A state is a partial solution: k sums, each with its items. The two states of largest spread are merged, largest sums with
    smallest, until one is left. Two things make it fast. A state of fewer than k items is just a list, since each of its items
    is alone; two such lists are merged by joining them, and that is what most merges do. And a merge of full states records
    only which slot met which; the items are followed through these records once, at the end.
    """
    w = np.asarray(weights, dtype=np.float64)
    n = len(w)
    if k < 1:
        raise ValueError(f"cannot split into {k} parts: at least 1")
    if equal_size and n % k:
        raise ValueError(
            f"cannot split {n} items into {k} parts of equal size: {n} is not divisible by {k}"
        )
    if k == 1 or n == 0:
        return [list(range(n))] + [[] for _ in range(k - 1)]

    items = np.argsort(-w, kind="stable").tolist()
    seed_size = k if equal_size else 1
    lists: dict[int, list[int]] = {}  # states that are still lists
    sums: dict[int, np.ndarray] = {}  # full states: k sums, descending
    slots: dict[
        int, np.ndarray
    ] = {}  # the items of a list in slots (-1: none), in the order of its sums
    merges: dict[
        int, tuple[int, np.ndarray, int, np.ndarray]
    ] = {}  # state -> left, its slot for each slot, right, its slots
    heap: list[tuple[float, int]] = []

    def fill(state: int) -> None:
        """Turn a list into a full state."""
        if state in lists:
            members = np.array(lists.pop(state) + [-1] * k)[:k]
            held = np.where(members >= 0, w[members], 0.0)
            order = np.argsort(-held, kind="stable")
            sums[state], slots[state] = held[order], members[order]

    def push(state: int) -> None:
        if state in lists and len(lists[state]) == k:
            fill(state)
        spread = (
            sums[state][0] - sums[state][-1] if state in sums else w[lists[state][0]]
        )  # a list's first item is its largest, and some slot is empty
        heapq.heappush(heap, (-float(spread), state))

    for state, start in enumerate(range(0, n, seed_size)):
        lists[state] = items[start : start + seed_size]
        push(state)
    newest = len(heap)
    while len(heap) > 1:
        left, right = heapq.heappop(heap)[1], heapq.heappop(heap)[1]
        if left in lists and right in lists and len(lists[left]) + len(lists[right]) <= k:
            lists[left].extend(lists.pop(right))
            push(left)
            continue
        fill(left)
        fill(right)
        together = sums.pop(left) + sums.pop(right)[::-1]
        order = np.argsort(-together, kind="stable")
        sums[newest] = together[order]
        merges[newest] = (left, order, right, k - 1 - order)
        push(newest)
        newest += 1

    last = heap[0][1]
    fill(last)
    parts: list[list[int]] = [[] for _ in range(k)]
    pending = [(last, np.arange(k))]  # a state, and for each of its slots the part that it ended in
    while pending:
        state, part = pending.pop()
        if state in slots:
            for item, p in zip(slots[state].tolist(), part.tolist(), strict=True):
                if item >= 0:
                    parts[p].append(item)
            continue
        left, left_slots, right, right_slots = merges[state]
        for child, child_slots in ((left, left_slots), (right, right_slots)):
            child_part = np.empty(k, dtype=np.int64)
            child_part[child_slots] = part
            pending.append((child, child_part))
    return [sorted(part) for part in parts]


def micro_batches_by_tokens(
    lengths: Sequence[int] | np.ndarray, cap: int, minimum: int = 1
) -> list[list[int]]:
    """Split samples into as few micro-batches as fit under `cap` tokens each, but at least `minimum`, with even totals.

    Largest micro-batch first, so that running out of memory shows at once. With fewer samples than `minimum` the last ones
    are empty. ValueError: a sample longer than the cap.
    """
    tokens = np.asarray(lengths, dtype=np.int64)
    if len(tokens) and tokens.max() > cap:
        raise ValueError(
            f"sample {int(tokens.argmax())} has {int(tokens.max())} tokens, more than the {cap} that one micro-batch may hold: "
            "raise *_max_token_len_per_gpu to at least the longest prompt plus response"
        )
    count = max(minimum, -(-int(tokens.sum()) // cap), 1)
    while True:
        parts = karmarkar_karp(tokens, count)
        totals = [int(tokens[part].sum()) for part in parts]
        if max(totals) <= cap:
            return [parts[i] for i in sorted(range(count), key=lambda i: -totals[i])]
        count += 1
