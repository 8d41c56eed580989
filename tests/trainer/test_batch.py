"""Build requests, and assign rows to updates and ranks."""

import numpy as np
import pytest
import torch

from verlite.algorithms.balancing import karmarkar_karp, workload
from verlite.config.plan import Micro, Updates
from verlite.data.dataset import PromptRow
from verlite.protocol.data import object_array
from verlite.rewards.result import RewardResult
from verlite.rollout.types import Sampling, Status, Trajectory
from verlite.trainer.batch import (
    Shared,
    balance_metrics,
    balance_rows,
    costs_of,
    mini_batch_indices,
    requests,
    seeds,
)
from verlite.workers.rollout import DecodedResponse, as_columns


def rollout_output(rows, prompts=None, results=None, version=3):
    """Return the output of a rollout worker.

    rows: (response ids, mask, log-probs, status).
    results: Rewards of the rows that did not fail. Default: 1.
    """
    prompts = prompts or [[5, 6]] * len(rows)
    remaining = iter(results or ())
    trajectories = [
        Trajectory(
            list(prompt),
            ids,
            mask,
            log_probs,
            Status(status),
            "Timeout" if status == "error" else None,
            [(version, len(ids))],
            1,
            segments=[("model", len(ids))],
        )
        for prompt, (ids, mask, log_probs, status) in zip(prompts, rows, strict=True)
    ]
    scored = {
        i: next(remaining, RewardResult(1.0)) for i, row in enumerate(rows) if row[3] != "error"
    }
    return as_columns(
        trajectories, [DecodedResponse("text")] * len(rows), scored, 0.0, multi_turn=False
    )


def make_requests(prompts, uids):
    """Return requests for prompts of these token ids."""
    rows = [
        PromptRow(i, ids, [{"role": "user", "content": "?"}], "s", "1")
        for i, ids in enumerate(prompts)
    ]
    return requests(rows, uids, [Sampling(1.0, 1.0, -1, 4)] * len(rows))


def generated_batch(prompts, uids, rows, results=None):
    """Return the driver's batch after generation. Arguments as in rollout_output."""
    return (
        make_requests(prompts, uids)
        .pop(non_tensor_batch_keys=["prompt_ids"])[1]
        .union(rollout_output(rows, prompts, results))
    )


def test_seeds_depend_on_run_and_step_alone():
    assert seeds(1, 2, 0, 5) == seeds(1, 2, 0, 5) != seeds(1, 3, 0, 5)
    assert seeds(1, 2, 0, 5)[:3] == seeds(1, 2, 0, 3)
    assert len(set(seeds(1, 2, 0, 1000))) == 1000


def updates(mini_prompts, epochs=1, shuffle=False):
    return Updates(mini_prompts, 0, epochs, 0, Micro(1, None), shuffle, "token-mean")


@pytest.mark.parametrize("shuffle", [True, False])
def test_each_row_is_in_one_mini_batch_per_epoch(shuffle):
    numbers = mini_batch_indices([f"p{i // 4}" for i in range(24)], updates(2, 3, shuffle), [1])
    assert all(column.bincount().tolist() == [8, 8, 8] for column in numbers.T)
    if shuffle:
        assert not torch.equal(numbers[:, 0], numbers[:, 1])
    else:  # two prompts per update, and all rows of a prompt in the same update
        assert numbers[:, 0].tolist() == [i // 8 for i in range(24)]


def test_rows_are_grouped_by_uid_in_any_order():
    assert mini_batch_indices(list("abcabc"), updates(2), [1])[:, 0].tolist() == [0, 0, 1, 0, 0, 1]


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("balance", [True, False])
def test_every_row_goes_to_one_rank(n_ranks, balance):
    lengths = torch.from_numpy(np.random.default_rng(0).integers(1, 50, 24))
    ranks = balance_rows(torch.arange(24) // 8, workload(lengths), n_ranks, balance)
    assert len(ranks) == n_ranks and sorted(sum(ranks, [])) == list(range(24))


def test_balancing_distributes_the_cost_of_each_update():
    lengths = torch.tensor([100, 1, 1, 100, 100, 1, 1, 100])
    numbers = torch.arange(8) // 4
    ranks = balance_rows(numbers, workload(lengths), 2, True)
    for update in (0, 1):
        assert [sum(int(lengths[i]) for i in rows if numbers[i] == update) for rows in ranks] == [
            101,
            101,
        ]


@pytest.mark.parametrize(("n_ranks", "prompts_per_rank"), [(1, 4), (2, 2), (4, 1), (8, 1)])
def test_rows_of_a_prompt_stay_on_a_rank_as_long_as_no_rank_waits(n_ranks, prompts_per_rank):
    """Four prompts of 1,000 with eight answers of 100: a rank has a prompt's cost once."""
    group = np.tile(np.arange(4), 8)
    shared = Shared(group, np.full(32, 1000))
    ranks = balance_rows(torch.zeros(32, dtype=int), np.full(32, 1100), n_ranks, True, shared)
    assert sorted(sum(ranks, [])) == list(range(32))
    assert {len(set(group[rows])) for rows in ranks} == {prompts_per_rank}
    assert {len(rows) for rows in ranks} == {32 // n_ranks}


def naive_balance(numbers, costs, n_ranks, group, prompt):
    """`balance_rows` row by row: halve the groups again and again, keep the best division."""

    def cost(rows):
        prompts = {group[row]: prompt[row] for row in rows}
        own = (max(0, costs[row] - prompt[row]) for row in rows)
        return sum(own) + sum(prompts.values())

    ranks, load = [[] for _ in range(n_ranks)], [0] * n_ranks
    for number in range(max(numbers) + 1):
        rows = [row for row in range(len(numbers)) if numbers[row] == number]
        units = [[row for row in rows if group[row] == one] for one in sorted(set(group))]
        best = None
        while units:
            units = [unit for unit in units if unit]
            divided = karmarkar_karp([cost(unit) for unit in units], n_ranks)
            parts = [sorted(row for unit in part for row in units[unit]) for part in divided]
            if best is None or max(map(cost, parts)) < max(map(cost, best)):
                best = parts
            if max(map(len, units), default=0) <= 1:
                break
            middles = [(len(unit) + 1) // 2 for unit in units]
            pairs = zip(units, middles, strict=True)
            units = [half for unit, m in pairs for half in (unit[:m], unit[m:])]
        free = sorted(range(n_ranks), key=lambda rank: load[rank])
        for rank, part in zip(free, sorted(best or [], key=lambda part: -cost(part)), strict=False):
            ranks[rank] += part
            load[rank] += cost(part)
    return ranks


@pytest.mark.parametrize("seed", range(40))
def test_balancing_equals_the_division_row_by_row(seed):
    rng = np.random.default_rng(seed)
    count, n_ranks = int(rng.integers(1, 50)), int(rng.integers(1, 9))
    numbers = rng.integers(0, rng.integers(1, 4), count)
    group = rng.integers(0, max(1, count // 4), count)
    prompt = rng.integers(0, 500, count)[group]
    answers = rng.integers(1, 900, count) if seed % 2 else np.full(count, 100)
    costs = (prompt + answers) // (1 + seed % 3)  # branches that repeat a prompt cost less
    found = balance_rows(torch.from_numpy(numbers), costs, n_ranks, True, Shared(group, prompt))
    assert found == naive_balance(numbers.tolist(), costs, n_ranks, group.tolist(), prompt)
    alone = balance_rows(torch.from_numpy(numbers), costs, n_ranks, True)
    each, none = list(range(count)), [0] * count
    assert alone == naive_balance(numbers.tolist(), costs, n_ranks, each, none)


def test_the_cost_of_a_row_is_that_of_its_sequences():
    batch = generated_batch([[1]], ["a"], [([1], [1], [0.0], "done")])
    lengths = torch.tensor([9000])
    assert costs_of(batch, lengths, once=True) == workload([9000])
    batch = batch.with_non_tensor(branches=object_array([[(1000, 2000), (2500, 3500)]]))
    flat = workload([3000]) + workload([6000])
    assert costs_of(batch, lengths, once=False) == flat
    # The second sequence continues the first after 2,500 tokens; 2,250 would be a quarter.
    session = {"tokens": 9000, "repeated_tokens": 2250}
    batch = batch.with_non_tensor(session=object_array([session]))
    assert costs_of(batch, lengths, once=True) == 0.75 * flat
    # 9 is 3/7 of 21 tokens: 4/7 of the cost, to the nearest whole number, as ranks balance those.
    session = {"tokens": 21, "repeated_tokens": 9}
    batch = batch.with_non_tensor(session=object_array([session]))
    (cost,) = costs_of(batch, lengths, once=True)
    assert cost == (8 * int(flat[0]) + 7) // 14 and cost > 4 * int(flat[0]) // 7
    assert costs_of(batch[:0], lengths[:0], once=False).dtype == np.int64  # what ranks balance


def test_fractions_of_a_cost_are_not_cut():
    with pytest.raises(TypeError, match="safe"):
        balance_rows(torch.zeros(3, dtype=int), np.array([1.9, 1.0, 1.0]), 2, True)


def test_balance_metrics_equal_hand_computed_values():
    metrics = balance_metrics(torch.tensor([9, 7, 1, 3]), [[0, 2], [1, 3]])
    assert {key.removeprefix("global_seqlen/"): value for key, value in metrics.items()} == {
        "min": 4,
        "max": 16,
        "minmax_diff": 12,
        "mean": 10,
        "balanced_min": 10,
        "balanced_max": 10,
    }
