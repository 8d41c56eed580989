"""Metrics of asynchronous training: hand-worked, and in a simulated run that leaves slow samples
out."""

import math
import random
from heapq import heappop, heappush
from statistics import fmean
from types import SimpleNamespace

import pytest
import torch

from verlite.config.schema import DetectConfig
from verlite.control import exit_codes
from verlite.control.flow import Flow
from verlite.protocol.data import DataProto, object_array
from verlite.spec.correction import RolloutCorrection
from verlite.trainer.detectors import Detectors
from verlite.trainer.errors import FewEffectiveSamples, exit_code
from verlite.trainer.finish import async_metrics
from verlite.trainer.flow_metrics import WINDOW, Window
from verlite.trainer.groups import Groups, uid_of
from verlite.trainer.log_prob_gap import check_sample_size

PROMPTS = 16


@pytest.mark.parametrize(("weights", "level"), [(None, "tokens"), ("sequence", "samples")])
def test_a_floor_of_the_effective_sample_size_ends_the_run(weights, level):
    settings = SimpleNamespace(min_eff_sample_size=0.5, max_age=4)
    run = SimpleNamespace(
        config=SimpleNamespace(async_training=settings, trainer=SimpleNamespace(mode="async")),
        plan=SimpleNamespace(correction=RolloutCorrection(rollout_is=weights)),
        step=7,
        stop=SimpleNamespace(machine=SimpleNamespace(saved_step=5)),
        metrics={},
    )
    own, other = ("seq", "token") if weights else ("token", "seq")
    name = "training/rollout_eff_sample_size"
    check_sample_size(run)  # nothing measured it yet
    run.metrics = {f"{name}_{own}": 0.5, f"{name}_{other}": 0.1}
    check_sample_size(run)
    run.metrics[f"{name}_{own}"] = 0.25
    message = f"of step 7 is 0.25 of its {level}, less than async_training.min_eff_sample_size=0.5"
    with pytest.raises(FewEffectiveSamples, match=message) as caught:
        check_sample_size(run)
    assert "Lower async_training.max_age" in str(caught.value)
    assert "The checkpoint of step 5 is from before it" in str(caught.value)
    assert exit_code(caught.value) == exit_codes.FAILED
    run.metrics[f"{name}_{own}"] = math.nan
    check_sample_size(run)
    run.metrics[f"{name}_{own}"], settings.min_eff_sample_size = 0.25, None
    check_sample_size(run)
    run.config.trainer.mode, settings.min_eff_sample_size = "sync", 0.5
    check_sample_size(run)


def test_lengths_of_trained_and_sampled_responses():
    """Of the lengths 1 to 4 only 1 and 2 are trained: all of them are below 3, and half of the
    sampled ones."""
    window = Window()
    assert window.metrics(1) == {}
    window.finish([1, 2, 3])
    window.train([1])
    window.finish([4])
    window.train([2])
    found = window.metrics(2)
    assert found == {
        "async/length_distance": 0.5,
        "async/length_distance_limit": pytest.approx(1.36 * (1 / 2 + 1 / 4) ** 0.5),
        "async/reuse": 2 * 2 / 4,
    }
    window.finish([3])  # after the step: counts at once
    assert window.metrics(1)["async/reuse"] == 2 / 5


def test_only_the_newest_steps_count():
    window = Window()
    window.finish([99])
    window.train([99])
    for _ in range(WINDOW):
        window.finish([1, 2])
        window.train([1, 2])
    assert window.metrics(1)["async/length_distance"] == 0.0
    assert window.metrics(1)["async/reuse"] == 1.0


@pytest.mark.parametrize(("greedy", "most", "places"), [(0, 99, 24), (1, 99, 30), (1, 20, 20)])
def test_an_engines_places_are_those_of_its_share_of_the_prompts(greedy, most, places):
    """6 prompts a step and twice as many at once, each with 4 samples, on 2 engines. ReMax adds a
    greedy one."""
    plan = {"prompts": 6, "samples_per_prompt": 4, "engines": 2, "needs_greedy_baseline": greedy}
    rollout = SimpleNamespace(max_num_seqs=most)
    run = SimpleNamespace(
        step=1,
        plan=SimpleNamespace(**plan, actor=SimpleNamespace(epochs=3)),
        config=SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout)),
        stopwatch=SimpleNamespace(seconds={"gen": 1.0, "step": 4.0}),
    )
    asked = []
    groups = SimpleNamespace(
        flow=SimpleNamespace(depth=1), metrics=lambda *given: asked.append(given) or {}
    )
    batch = DataProto.from_dict({}, {"version_spans": object_array([[(1, 2)]])})
    assert async_metrics(run, groups, batch)["fully_async/trainer/idle_ratio"] == 0.25
    assert asked == [(3, places)]


def simulated(late: int | None, steps: int = 40) -> list[dict[str, float]]:
    """Return the metrics of each step of a run whose samples take as long as they are.

    late: leave out what is more than that many versions old when it has finished.
    """
    draw = random.Random(0)
    flow = Flow(PROMPTS, bound=4, depth=4, engines=1, swaps=True)
    flow.published()
    groups, running, now, found = Groups(flow), [], 0.0, []
    lengths: dict[int, int] = {}

    def start() -> None:
        for number in flow.draw(flow.wanted()):
            uid = object_array([uid_of(number, PROMPTS)])
            groups.add(number, number, DataProto.from_dict({}, {"uid": uid}))
            lengths[number] = 1 + int(100 * draw.lognormvariate(0.0, 1.2))
        for number in (number for numbers in flow.assign().values() for number in numbers):
            heappush(running, (now + lengths[number], number, flow.version))

    def finish() -> None:
        nonlocal now
        at, number, oldest = heappop(running)
        now = max(now, at)
        row = {"sample_index": 0, "oldest_version": oldest, "response_length": lengths[number]}
        uid = object_array([uid_of(number, PROMPTS)])
        tensors = {name: torch.tensor([value]) for name, value in row.items()}
        groups.finish(DataProto.from_dict(tensors, {"uid": uid}))
        if late is not None and flow.step + 1 - oldest > late:
            groups.leave_out(number, "too old")

    while flow.step < steps:
        start()
        while (chosen := flow.choose()) is None:
            finish()
            start()
        until = now + 60.0  # the update
        while running and running[0][0] <= until:
            finish()
            start()
        now, groups.in_step = until, chosen
        groups.trained()
        flow.published()
        found.append(groups.metrics(1, 8.0))
    return found


def against_chance(metrics: dict[str, float]) -> float:
    return metrics["async/length_distance"] / metrics["async/length_distance_limit"]


def said(found: list[dict[str, float]]) -> set[str]:
    """Return the warnings of a run with these metrics."""
    detectors = Detectors(DetectConfig())
    warnings = (detectors.check(step, one) for step, one in enumerate(found, start=1))
    return {warning.name for step in warnings for warning in step}


def test_trained_responses_are_as_long_as_sampled_ones_unless_the_late_are_left_out():
    fair, biased = simulated(late=None)[WINDOW:], simulated(late=1)[WINDOW:]
    assert max(map(against_chance, fair)) < 0.8 and fmean(map(against_chance, biased)) > 1
    assert said(fair) == set() and said(biased) == {"length_bias"}
