"""Metrics of a step equal hand-computed values."""

import pytest
import torch

from verlite.protocol.data import DataProto, object_array
from verlite.protocol.metrics import quantiles
from verlite.trainer.metrics import Stopwatch, batch_metrics, speed_metrics
from verlite.workers.advantage import token_metrics

NAN = float("nan")


def scored_batch(**more) -> DataProto:
    """Return two prompts of two samples. The last sample failed."""
    return DataProto.from_dict(
        {
            "prompt_length": torch.tensor([1, 1, 2, 2]),
            "response_length": torch.tensor([3, 1, 2, 0]),
            "valid": torch.tensor([True, True, True, False]),
            "scores": torch.tensor([1.0, 1, 3, 9]),
            "rewards": torch.tensor([0.5, 1, 3, 9]),
            "raw_scores": torch.tensor([2.0, 2, 5, 99]),
            "overlong_penalty": torch.tensor([0.0, -0.5, -1, -99]),
            "turns": torch.tensor([2, 1, 1, 0]),
            "num_turns": torch.tensor([4, 2, 2, 1]),
            **more,
        },
        {
            "uid": object_array(["a", "a", "b", "b"]),
            "status": object_array(["done", "done", "length", "error"]),
        },
        {"reward_error_rate": 0.0},
    )


def test_a_row_is_cut_if_one_of_its_branches_is():
    batch = scored_batch()  # 3, 1, 2 and 0 tokens
    assert batch_metrics(batch, 2, 2)["response_length/clip_ratio"] == 0.5
    branches = object_array([[(1, 1), (1, 0)], [(1, 1)], [(1, 1), (0, 2), (1, 0)], [(2, 1)]])
    batch = batch.with_non_tensor(branches=branches)
    assert batch_metrics(batch, 2, 2)["response_length/clip_ratio"] == 0.25


def test_batch_metrics_equal_hand_computed_values():
    metrics = batch_metrics(scored_batch(), max_prompt_length=2, max_response_length=3)
    assert metrics == pytest.approx(
        {
            "critic/score/mean": 5 / 3,
            "critic/score/max": 3,
            "critic/score/min": 1,
            "critic/score/p10": 1,
            "critic/score/p50": 1,
            "critic/score/p90": 3,
            "reward/raw_score/mean": 3,
            "reward/raw_score/max": 5,
            "reward/raw_score/min": 2,
            "reward/overlong_penalty/mean": -0.5,
            "reward/overlong_penalty/max": 0,
            "reward/overlong_penalty/min": -1,
            "critic/rewards/mean": 4.5 / 3,
            "critic/rewards/max": 3,
            "critic/rewards/min": 0.5,
            "response_length/mean": 1.5,
            "response_length/max": 3,
            "response_length/min": 0,
            "response_length/p10": 0,
            "response_length/p50": 1,
            "response_length/p90": 3,
            "response_length/clip_ratio": 0.25,
            "response/aborted_ratio": 0.25,
            "response_length_non_aborted/mean": 2,
            "response_length_non_aborted/max": 3,
            "response_length_non_aborted/min": 1,
            "num_turns/mean": 2.25,
            "num_turns/max": 4,
            "num_turns/min": 1,
            "prompt_length/mean": 1.5,
            "prompt_length/max": 2,
            "prompt_length/min": 1,
            "prompt_length/clip_ratio": 0.5,
            "rollout/error_rate": 0.25,
            "reward/error_rate": 0,
            "perf/total_num_tokens": 12,
            "rollout/zero_variance_groups": 1,  # one sample of prompt b is valid
        }
    )


def test_gdpo_has_metrics_of_each_part_and_groups_differ_by_any_part():
    given = {
        "scores": torch.tensor([1.0, 1, 1, 1]),
        "gdpo_rewards": torch.tensor([[1.0, 0], [1, 4], [2, 2], [2, 2]]).double(),
        "valid": torch.tensor([True, True, True, True]),
    }
    metrics = batch_metrics(scored_batch(**given), 2, 3, ["correct", "format"])
    assert metrics["rollout/zero_variance_groups"] == 0.5  # of prompt a, `format` differs
    assert {key: value for key, value in metrics.items() if key.startswith("gdpo/")} == {
        "gdpo/correct/mean": 1.5,
        "gdpo/correct/max": 2,
        "gdpo/correct/min": 1,
        "gdpo/correct/std": 0.5,
        "gdpo/format/mean": 2,
        "gdpo/format/max": 4,
        "gdpo/format/min": 0,
        "gdpo/format/std": 2**0.5,
    }
    given["valid"] = torch.tensor([True, False, False, True])
    metrics = batch_metrics(scored_batch(**given), 2, 3, ["correct", "format"])
    assert metrics["gdpo/format/max"] == 2 and metrics["rollout/zero_variance_groups"] == 1
    given["valid"] = torch.zeros(4, dtype=torch.bool)
    metrics = batch_metrics(scored_batch(**given), 2, 3, ["correct", "format"])
    assert not any(key.startswith("gdpo/") for key in metrics)


@pytest.mark.parametrize(
    ("count", "expected"), [(1, [1, 1, 1]), (10, [1, 5, 9]), (11, [2, 6, 10]), (100, [10, 50, 90])]
)
def test_quantiles_are_values_that_occur(count, expected):
    values = torch.arange(count, 0, -1)
    found = quantiles("x", values)
    assert found == dict(zip(("x/p10", "x/p50", "x/p90"), expected, strict=True))
    assert quantiles("x", values[:0]) == {}


RETURNS = torch.tensor([[1.0, NAN, 2], [3, NAN, NAN], [4, 5, NAN], [NAN, NAN, NAN]])
TRAINED = torch.tensor(
    [[1, 0, 1], [1, 0, 0], [1, 1, 0], [0, 0, 0]]
)  # the middle token of the first row is tool text


def test_token_metrics_use_trained_tokens_only():
    metrics = token_metrics(2 * RETURNS, RETURNS, TRAINED, None)
    assert metrics == {
        "critic/advantages/mean": 6,
        "critic/advantages/max": 10,
        "critic/advantages/min": 2,
        "critic/returns/mean": 3,
        "critic/returns/max": 5,
        "critic/returns/min": 1,
    }


def test_values_per_row_are_weighted_by_trained_tokens():
    numbers, counts = torch.tensor([[1.0], [4], [NAN], [-2]]), torch.tensor([[3], [1], [0], [2]])
    spelled_out = torch.tensor([[1.0, 1, 1], [4, 0, 0], [0, 0, 0], [-2, -2, 0]])
    tokens = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 0]])
    assert token_metrics(numbers, numbers, counts, None) == token_metrics(
        spelled_out, spelled_out, tokens, None
    )


def test_explained_variance_compares_values_with_returns():
    values = torch.tensor([[2.0, NAN, 2], [3, NAN, NAN], [3, 5, NAN], [NAN, NAN, NAN]])
    metrics = token_metrics(RETURNS, RETURNS, TRAINED, values)
    assert metrics["critic/values/mean"] == 3
    # returns 1 2 3 4 5, errors -1 0 0 1 0
    assert metrics["critic/vf_explained_var"] == pytest.approx(1 - 0.5 / 2.5)


def test_a_batch_without_valid_rows_has_no_score_metrics():
    metrics = batch_metrics(scored_batch(valid=torch.zeros(4, dtype=torch.bool)), 2, 3)
    metrics |= token_metrics(
        RETURNS, RETURNS, torch.zeros(4, 3, dtype=torch.int64), torch.zeros(4, 3)
    )
    assert not any(
        key.startswith(("critic/", "rollout/zero", "reward/raw", "reward/over")) for key in metrics
    )


def test_speed_metrics_equal_hand_computed_values():
    watch = Stopwatch()
    watch.seconds.update(step=4.0, gen=2.0, update_actor=1.0)
    metrics = speed_metrics(watch, 100.0, 50.0, n_devices=2)
    assert metrics["perf/throughput"] == 12.5 and metrics["perf/time_per_step"] == 4
    assert (
        metrics["timing_per_token_ms/gen"] == 40
        and metrics["timing_per_token_ms/update_actor"] == 10
    )
