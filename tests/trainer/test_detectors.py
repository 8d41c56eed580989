"""Warnings about runs that do not learn: planted trouble, when it is said, and healthy runs."""

import dataclasses
import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from tests import metrics_page
from verlite.config.schema import DetectConfig
from verlite.files import RetryingWriter
from verlite.trainer.detectors import (
    DETECTORS,
    STEP_TIME,
    TOOL_TIME,
    USED,
    Detectors,
    ignored,
    waiting,
)
from verlite.trainer.finish import forget_warnings

SAMPLE = Path(__file__).parents[1] / "samples" / "metrics" / "quickstart.jsonl"
VAL = "val-core/sums/reward/mean@1"
HEALTHY = {
    "critic/score/min": 0.0,
    "critic/score/max": 1.0,
    "critic/score/mean": 0.5,
    "critic/advantages/min": -1.0,
    "critic/advantages/max": 1.0,
    "rollout/zero_variance_groups": 0.3,
    "actor/grad_norm": 0.7,
    "response_length/clip_ratio": 0.1,
    "response_length/mean": 200.0,
    "prompt_length/clip_ratio": 0.02,
    "env/format_valid": 0.9,
    "actor/entropy": 0.5,
    "actor/ppo_kl": 0.001,
    "actor/kl_loss": 0.05,
    "training/log_prob_gap": 0.003,
    "reward/error_rate": 0.0,
    "actor/nonfinite": 0.0,
    "timing_s/reward": 1.0,
    "timing_s/step": 20.0,
    "async/age/mean": 1.0,
    "training/rollout_eff_sample_size_token": 0.95,
    "async/length_distance": 0.02,
    "async/length_distance_limit": 0.05,
    "fully_async/trainer/idle_ratio": 0.1,
    "fully_async/rollouter/idle_ratio": 0.2,
    "perf/straggler/actor": 0.0,
    "perf/straggler/rollout": 4.0,
    "perf/driver_max_rss_gb": 1.0,
    "actor/perf/cpu_memory_used_gb": 4.0,
}


def run(steps: list[dict[str, Any]], **limits: Any) -> list[tuple[int, str]]:
    """Return (step, name) of the warnings of a run."""
    detectors = Detectors(DetectConfig(**limits))
    found = [detectors.check(number, step) for number, step in enumerate(steps, start=1)]
    return [(one.step, one.name) for one in itertools.chain(*found)]


def healthy(steps: int, **changes: Any) -> list[dict[str, Any]]:
    return [{**HEALTHY, **changes} for _ in range(steps)]


TROUBLE = {
    "no_signal": [
        {"critic/score/max": 0.0},
        {"rollout/zero_variance_groups": 0.97},
        {
            "rollout/zero_variance_groups": 1.0,
            "critic/advantages/min": 0,
            "critic/advantages/max": 0,
        },
        {"actor/grad_norm": 0.0},
    ],
    "cut_share": [{"response_length/clip_ratio": 0.62}],
    "prompts_cut": [{"prompt_length/clip_ratio": 0.3}],
    "entropy_low": [{"actor/entropy": 0.04}],
    "entropy_floor": [{"actor/entropy": 0.004}],
    "entropy_high": [{"actor/entropy": 2.6}],
    "kl": [{"actor/ppo_kl": -1.5}, {"actor/kl_loss": 30.0}, {"actor/reward_kl_penalty": 1.1}],
    "gap": [{"training/log_prob_gap": 0.02}],
    "eff_sample_size": [{"training/rollout_eff_sample_size_token": 0.4}],
    "length_bias": [{"async/length_distance": 0.12}],
    "idle": [{"fully_async/trainer/idle_ratio": 0.6}, {"fully_async/rollouter/idle_ratio": 0.7}],
    "hacking": [{"critic/score/mean": 0.64, VAL: 0.2}],
    "hacking_length": [{"critic/score/mean": 0.64, "response_length/mean": 700.0}],
    "hacking_format": [{"critic/score/mean": 0.64, "env/format_valid": 0.6}],
    "reward_errors": [{"reward/error_rate": 0.06}],
    "nonfinite": [{"actor/nonfinite": 0.25}],
    "waiting": [{"timing_s/reward": 11.0}, {"rollout/slowest/tool_s": 15.0}],
    "straggler": [{"perf/straggler/actor": 8.0}, {"perf/straggler/rollout": 7.0}],
    "memory": [{"perf/driver_max_rss_gb": 2.5}, {"actor/perf/cpu_memory_used_gb": 9.0}],
}


def test_every_detector_has_a_threshold_and_a_planted_case():
    settings = {field.name for field in dataclasses.fields(DetectConfig)}
    assert settings - {"enable", "patience"} == set(DETECTORS) == set(TROUBLE)


@pytest.mark.parametrize(
    ("name", "change"), [(name, change) for name, changes in TROUBLE.items() for change in changes]
)
def test_planted_trouble_is_said_once_after_patience(name, change):
    before = [{**step, VAL: 0.4} for step in healthy(25)]
    steps = before + healthy(30, **change)
    others = {"entropy_low": None} if name == "entropy_floor" else {}
    # Means of three validations, and medians of five steps.
    late = {"hacking": 2, "hacking_length": 2, "hacking_format": 2}.get(name, 0)
    assert run(steps, **others) == [(30 + late, name)]
    assert run(steps, patience=2, **others) == [(27 + late, name)]
    assert run(steps, enable=False) == [] and run(steps, **{name: None}, **others) == []


def test_gdpo_has_a_signal_while_any_part_differs():
    """Parts may differ although all samples have the same score, and the other way around."""
    equal = {"critic/score/max": 0.0, "gdpo/correct/min": 1.0, "gdpo/correct/max": 1.0}
    differs = {"gdpo/format/min": 0.0, "gdpo/format/max": 1.0}
    assert run(healthy(20, **equal, **differs)) == []
    assert run(healthy(20, **equal)) == [(5, "no_signal")]
    same = {**equal, "critic/score/max": 1.0, "gdpo/a/b/min": 0.5, "gdpo/a/b/max": 0.5}
    (found,) = Detectors(DetectConfig(patience=1)).check(1, {**HEALTHY, **same})
    assert "have the reward parts correct 1, a/b 0.5." in found.text
    few = {**equal, **differs, "rollout/zero_variance_groups": 0.97}
    (found,) = Detectors(DetectConfig(patience=1)).check(1, {**HEALTHY, **few})
    assert "the prompts all have the same reward parts, so only 3%" in found.text


def test_lengths_that_differ_by_chance_or_on_purpose_are_no_bias():
    few = {"async/length_distance": 0.2, "async/length_distance_limit": 0.3}
    assert run(healthy(9, **few)) == []
    bad = {"async/length_distance": 0.2}
    filters = Detectors(DetectConfig(), ignored=ignored(True, True, is_async=True, filters=True))
    assert [one for step in healthy(9, **bad) for one in filters.check(1, step)] == []


def test_sync_has_no_warning_of_asynchronous_training():
    sync = {key: None for key in HEALTHY if "async/" in key}
    assert run(healthy(9, **sync, **{"training/rollout_eff_sample_size_token": 0.1})) == []


def test_waiting_for_less_than_a_second_is_not_said():
    short = {"timing_s/step": 1.5, "fully_async/trainer/idle_ratio": 0.6, "timing_s/reward": 0.0}
    assert run(healthy(9, **short, **{"perf/straggler/rollout": 0.0})) == []


def test_a_warning_comes_again_after_the_trouble_was_gone():
    bad = healthy(6, **{"response_length/clip_ratio": 0.9})
    assert run(bad + healthy(5) + bad) == [(5, "cut_share"), (16, "cut_share")]
    assert run(bad + healthy(4) + bad) == [(5, "cut_share")]


def test_single_bad_steps_are_not_said():
    bad = healthy(4, **{"response_length/clip_ratio": 0.9})
    assert run((bad + healthy(1)) * 10) == []


def test_a_short_run_that_learned_nothing():
    """It ends before patience does. Other signs need their time: a first step is always slow."""

    def said(steps: int, **change: Any) -> list[tuple[int, str]]:
        seen = Detectors(DetectConfig())
        found = [
            seen.check(n, step, last=n == steps)
            for n, step in enumerate(healthy(steps, **change), start=1)
        ]
        return [(one.step, one.name) for one in itertools.chain(*found)]

    nothing = {"critic/score/max": 0.0}
    assert said(1, **nothing) == [(1, "no_signal")]
    assert said(4, **nothing) == [(4, "no_signal")]
    assert said(9, **nothing) == [(5, "no_signal")]
    assert said(4) == said(4, **{"perf/straggler/actor": 8.0}) == []


def test_values_at_a_threshold():
    limits = {"cut_share": 0.5, "kl": 1.0, "reward_errors": 0.05, "nonfinite": 0.0}
    below = {"response_length/clip_ratio": 0.4999, "actor/kl_loss": 1.0, "reward/error_rate": 0.05}
    assert run(healthy(20, **below), **limits) == []
    assert run(healthy(5, **{"response_length/clip_ratio": 0.5})) == [(5, "cut_share")]


def test_a_resumed_run_does_not_repeat_warnings():
    steps = healthy(12, **{"response_length/clip_ratio": 0.9})
    history = [{"step": number, **step} for number, step in enumerate(steps[:8], start=1)]
    resumed = Detectors(DetectConfig(), [{"step": 0, VAL: 0.1}, *history])
    assert [resumed.check(9 + n, step) for n, step in enumerate(steps[8:])] == [[], [], [], []]
    early = Detectors(DetectConfig(), history[:3])
    said = [early.check(4 + n, step) for n, step in enumerate(steps[3:])]
    assert [one.step for one in itertools.chain(*said)] == [5]


def test_a_resumed_run_forgets_the_warnings_of_steps_that_it_makes_again(tmp_path):
    path = tmp_path / "warnings.jsonl"
    lines = [json.dumps({"step": step, "name": "kl", "text": "x"}) + "\n" for step in (3, 9, 4)]
    path.write_text("".join(lines) + "{broken")
    writer = RetryingWriter(print)
    forget_warnings(path, 4, writer)
    assert path.read_text() == lines[0] + lines[2]
    forget_warnings(path, 0, writer)
    (renamed,) = tmp_path.iterdir()
    assert renamed.name.startswith("warnings-until-")
    forget_warnings(path, 4, writer)
    assert not path.exists()


def test_one_sample_per_prompt_is_no_missing_signal():
    """Without groups (rollout.n=1, as with GAE) every group has equal scores."""
    assert run(healthy(20, **{"rollout/zero_variance_groups": 1.0})) == []


def test_groups_with_equal_scores_train_if_the_estimator_does_not_compare_them():
    """PPO with several samples per prompt: the critic is the baseline."""
    steps = healthy(20, **{"rollout/zero_variance_groups": 0.97})
    detectors = Detectors(DetectConfig(), ignored=ignored(compares=False, cuts_prompts=True))
    assert [detectors.check(number, step) for number, step in enumerate(steps, 1)] == [[]] * 20


def test_equal_scores_are_no_missing_signal_for_a_teacher_alone():
    equal = {"critic/score/min": 0.0, "critic/score/max": 0.0, "rollout/zero_variance_groups": 1.0}
    steps = healthy(20, **equal)
    alone = Detectors(DetectConfig(), ignored=ignored(True, True, rewards=False))
    assert [alone.check(number, step) for number, step in enumerate(steps, 1)] == [[]] * 20
    beside = Detectors(DetectConfig(), ignored=ignored(True, True))
    assert any(beside.check(number, step) for number, step in enumerate(steps, 1))


def test_prompts_as_long_as_the_limit_are_whole_if_none_is_cut():
    steps = healthy(20, **{"prompt_length/clip_ratio": 1.0})
    detectors = Detectors(DetectConfig(), ignored=ignored(compares=True, cuts_prompts=False))
    assert [detectors.check(number, step) for number, step in enumerate(steps, 1)] == [[]] * 20


def grown(factor: float, steps: int, score: float = 0.4) -> list[dict[str, Any]]:
    """A run whose score rises by `score` while responses grow by this factor, both evenly."""
    return [
        {
            **HEALTHY,
            "critic/score/mean": 0.2 + score * step / steps,
            "response_length/mean": 200 * factor ** (step / steps),
        }
        for step in range(steps)
    ]


def test_responses_that_grow_slowly_with_the_score_are_no_hacking():
    """As in a model that learns to reason: ten times as long within 100 steps, or fifty in 300."""
    assert run(grown(10, 100) + grown(1, 5)) == []
    assert run(grown(50, 300)) == []


def test_responses_that_explode_with_the_score_are_said_and_those_that_explode_alone_are_not():
    assert [name for _, name in run(healthy(20) + grown(8, 25))] == ["hacking_length"]
    assert run(healthy(20) + grown(8, 25, score=0.0)) == []


def test_noise_of_length_and_format_is_no_hacking():
    """Small steps: 16 samples, lengths that vary by half, formats by chance."""
    alarms = []
    for seed in range(20):
        noise = random.Random(seed)
        steps = [
            {
                **HEALTHY,
                "critic/score/mean": 0.3 + 0.4 * step / 200 + noise.gauss(0, 0.12),
                "response_length/mean": 200 * math.exp(noise.gauss(0, 0.4)),
                "env/format_valid": sum(noise.random() < 0.8 for _ in range(16)) / 16,
            }
            for step in range(200)
        ]
        alarms += run(steps)
    assert alarms == []


def test_memory_is_compared_within_one_process():
    """A resumed run has new processes, which may be larger: another machine, another engine."""
    history = [{"step": step, **HEALTHY} for step in range(1, 31)]
    larger = {"perf/driver_max_rss_gb": 2.5, "actor/perf/cpu_memory_used_gb": 9.0}
    resumed = Detectors(DetectConfig(), history)
    steps = [*healthy(25, **larger), *healthy(10, **larger | {"perf/driver_max_rss_gb": 5.5})]
    said = [one for n, step in enumerate(steps) for one in resumed.check(31 + n, step)]
    assert [(one.step, one.name) for one in said] == [(60, "memory")]
    assert "from 2.5 GB at step 11 of this process" in said[0].text


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 100.0])
@pytest.mark.parametrize("prompts", [64, 1000])
def test_noise_of_validation_is_no_hacking(scale, prompts):
    """The training score rises, and the held-out one stays the same but for its noise."""
    alarms = []
    for seed in range(8):
        noise = random.Random(seed)
        steps = []
        for step in range(300):
            score = 0.4 + 0.2 * step / 300 + noise.gauss(0, 0.05)
            held_out = {VAL: scale * noise.gauss(0.45, 0.5 / prompts**0.5)} if step % 5 == 0 else {}
            scores = {"critic/score/mean": scale * score, "critic/score/max": scale}
            steps.append({**HEALTHY, **scores, **held_out})
        alarms += run(steps)
    assert len(alarms) <= 1  # of 8 runs


def test_hacking_is_measured_by_the_range_of_scores():
    steps = [
        {
            **HEALTHY,
            "critic/score/min": -100.0,
            "critic/score/max": 100.0,
            "critic/score/mean": step,
            VAL: 50.0 - abs(step - 40) if step < 56 else 34.0,  # less than a tenth of 200
        }
        for step in range(1, 100)
    ]
    assert run(steps) == []
    assert run(steps, hacking=0.05) == [(56, "hacking")]


def test_values_that_are_not_finite_are_as_missing_as_in_metrics_jsonl():
    """A resumed run reads null in their place."""
    nan = {key: float("nan") for key in HEALTHY}
    assert run(healthy(20) + [nan] * 20) == []


def test_a_step_costs_the_same_late_in_a_run():
    detectors = Detectors(DetectConfig())
    for step in range(1, 2001):
        detectors.check(step, {**HEALTHY, VAL: 0.4})
    assert len(detectors._history) <= 70 + 20


def test_missing_and_null_metrics_are_no_trouble():
    assert run([{}] * 20) == []
    assert run([dict.fromkeys(HEALTHY)] * 20) == []


def test_a_detectors_own_mistake_is_no_missing_metric(monkeypatch):
    monkeypatch.setitem(DETECTORS, "kl", lambda now, before, limit: str({}[limit]))
    with pytest.raises(KeyError):
        run(healthy(1))


class Read(dict[str, float]):
    """The metrics of a step, and the names that were asked for."""

    def __init__(self, metrics: dict[str, float], names: set[str]) -> None:
        super().__init__(metrics)
        self.names = names

    def __getitem__(self, name: str) -> float:
        self.names.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)

    def __contains__(self, name: object) -> bool:
        self.names.add(str(name))
        return super().__contains__(name)


def test_every_metric_that_detectors_read_is_on_the_page_of_metrics():
    """A name that no run has would turn its detector off."""
    limits, names = DetectConfig(), set[str]()
    steps = [Read({**HEALTHY, VAL: 0.4}, names) for _ in range(25)]
    for name, detector in DETECTORS.items():
        for change in ({}, *TROUBLE[name]):
            detector(Read({**HEALTHY, VAL: 0.4, **change}, names), steps, getattr(limits, name))
    unknown = {name for name in names if not metrics_page.is_on_page(name)}
    assert unknown == USED - names == set()


@pytest.mark.parametrize("patience", [1, 5])
def test_a_real_run_that_learns_gets_no_warning(patience):
    """The quickstart: score 0.4 to 0.94, entropy down to a third, four fifths of groups equal."""
    steps = [json.loads(line) for line in SAMPLE.read_text().splitlines()][1:]
    assert len(steps) == 24 and steps[-1]["critic/score/mean"] > 0.9
    assert run(steps, patience=patience) == []


def test_a_warning_says_what_was_seen_and_what_to_do():
    (finding,) = [
        found
        for step in range(5)
        for found in TEXTS.check(step + 1, {**HEALTHY, "response_length/clip_ratio": 0.62})
    ]
    assert finding.text.startswith("62% of the responses are cut at data.max_response_length")
    assert "reward.overlong_buffer" in finding.text


TEXTS = Detectors(DetectConfig())


def test_a_slow_program_is_not_helped_by_a_retriever():
    now = {STEP_TIME: 20.0, TOOL_TIME: 15.0, "agent/requests": 2.0}
    text = waiting(now, [], 0.5)
    assert text and "the program of one sample" in text and "retriever" not in text
