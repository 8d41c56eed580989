"""From ragged answers to padded tensors, and who updates on what."""

import numpy as np
import pytest
import torch

from verlite.config.plan import Micro, Updates
from verlite.data.dataset import PromptRow
from verlite.protocol import fields
from verlite.protocol.data import DataProto
from verlite.rollout.types import Sampling
from verlite.trainer import batch as batches
from verlite.trainer.batch import assemble, balance_metrics, pad, requests, seeds, spread, update_numbers


def answers(rows):
    """rows: (response ids, mask, log-probs, status)."""
    return DataProto.from_dict(
        {"turns": torch.ones(len(rows), dtype=torch.int64), "weight_version": torch.full((len(rows),), 3)},
        {
            "response_ids": [r[0] for r in rows],
            "response_mask": [r[1] for r in rows],
            "rollout_log_probs": [r[2] for r in rows],
            "status": [r[3] for r in rows],
            "error": [None if r[3] != "error" else "Timeout" for r in rows],
        },
    )


def asked(prompts, uids):
    rows = [PromptRow(i, ids, [{"role": "user", "content": "?"}], "s", "1") for i, ids in enumerate(prompts)]
    return requests(rows, uids, [Sampling(1.0, 1.0, -1, 4)] * len(rows))


def test_assembled_rows_by_hand():
    batch = assemble(
        asked([[5, 6], [7, 8, 9]], ["a", "b"]),
        answers([([10, 0, 11], [1, 0, 1], [-0.5, 0.0, -1.5], "done"), ([12], [1], [-2.0], "length")]),
        pad_id=0,
    )
    t = batch.batch
    assert t["prompts"].tolist() == [[0, 5, 6], [7, 8, 9]]
    assert t["responses"].tolist() == [[10, 0, 11], [12, 0, 0]]
    assert t["input_ids"].tolist() == [[0, 5, 6, 10, 0, 11], [7, 8, 9, 12, 0, 0]]
    # The sampled 0 in the first row is a real token although 0 is the pad id: lengths decide, not values.
    assert t["attention_mask"].tolist() == [[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]
    assert t["position_ids"].tolist() == [[0, 0, 1, 2, 3, 4], [0, 1, 2, 3, 3, 3]]
    assert t["response_mask"].tolist() == [[1, 0, 1], [1, 0, 0]]
    assert t["rollout_log_probs"].tolist() == [[-0.5, 0.0, -1.5], [-2.0, 0.0, 0.0]]
    assert t["valid"].tolist() == [True, True]
    fields.check(batch)


def test_failed_and_empty_rows_keep_their_place():
    batch = assemble(asked([[5], [6]], ["a", "b"]), answers([([], [], [], "error"), ([], [], [], "length")]), pad_id=0)
    assert batch.batch["valid"].tolist() == [False, True]
    assert batch.batch["responses"].shape == (2, 1) and not batch.batch["response_mask"].any()


def test_pad_sides():
    assert pad([[1, 2], [3]], 3, torch.int64, "left", 9).tolist() == [[9, 1, 2], [9, 9, 3]]
    assert pad([[1.5], []], 2, torch.float32).tolist() == [[1.5, 0.0], [0.0, 0.0]]


def test_seeds_depend_on_run_and_step_alone():
    assert seeds(1, 2, 0, 5) == seeds(1, 2, 0, 5) != seeds(1, 3, 0, 5)
    assert seeds(1, 2, 0, 5)[:3] == seeds(1, 2, 0, 3)
    assert len(set(seeds(1, 2, 0, 1000))) == 1000


def updates(mini_prompts, epochs=1, shuffle=False):
    return Updates(mini_prompts, 0, epochs, 0, Micro(1, None), shuffle, "token-mean")


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_row_updates_once_an_epoch(shuffle):
    numbers = update_numbers([f"p{i // 4}" for i in range(24)], updates(2, 3, shuffle), [1])
    assert all(column.bincount().tolist() == [8, 8, 8] for column in numbers.T)
    if shuffle:
        assert not torch.equal(numbers[:, 0], numbers[:, 1])
    else:  # the rows of a prompt stay together, two prompts an update
        assert numbers[:, 0].tolist() == [i // 8 for i in range(24)]


def test_prompts_are_grouped_by_uid_wherever_they_stand():
    assert update_numbers(list("abcabc"), updates(2), [1])[:, 0].tolist() == [0, 0, 1, 0, 0, 1]


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("balance", [True, False])
def test_every_row_goes_to_one_rank(n_ranks, balance):
    lengths = torch.from_numpy(np.random.default_rng(0).integers(1, 50, 24))
    ranks = spread(torch.arange(24) // 8, lengths, n_ranks, balance)
    assert len(ranks) == n_ranks and sorted(sum(ranks, [])) == list(range(24))


def test_balancing_spreads_each_updates_cost():
    lengths = torch.tensor([100, 1, 1, 100, 100, 1, 1, 100])
    numbers = torch.arange(8) // 4
    ranks = spread(numbers, lengths, 2, True)
    for update in (0, 1):
        assert [sum(int(lengths[i]) for i in rows if numbers[i] == update) for rows in ranks] == [101, 101]


def test_balance_metrics_by_hand():
    metrics = balance_metrics(torch.tensor([9, 7, 1, 3]), [[0, 2], [1, 3]])
    assert {key.removeprefix("global_seqlen/"): value for key, value in metrics.items()} == {
        "min": 4, "max": 16, "minmax_diff": 12, "mean": 10, "balanced_min": 10, "balanced_max": 10,
    }  # fmt: skip


def test_joined_batches_are_those_of_one_assembly():
    """Whatever the widths of the parts: every tensor is that of all rows assembled at once."""
    rows = [([10, 11], [1, 1], [-0.5, -1.5], "done"), ([12], [1], [-2.0], "done"), ([13, 14, 15], [1, 0, 1], [-1.0, 0.0, -3.0], "length")]
    prompts, uids = [[5, 6], [5], [7, 8, 9]], ["a", "b", "c"]
    whole = assemble(asked(prompts, uids), answers(rows), pad_id=3)
    parts = [assemble(asked([prompts[i]], [uids[i]]), answers([rows[i]]), pad_id=3) for i in range(3)]
    joined = batches.join(parts, pad_id=3)
    real = whole.batch["attention_mask"].bool()
    for name, tensor in whole.batch.items():
        if name == "position_ids":  # of padding they may be anything
            assert torch.equal(joined.batch[name][real], tensor[real])
        else:
            assert torch.equal(joined.batch[name], tensor), name
    assert list(joined.non_tensor_batch["uid"]) == uids
