"""Metrics of asynchronous training: hand-worked, and in a simulated run that leaves slow samples
out."""

import random
from heapq import heappop, heappush

import pytest
import torch

from verlite.config.schema import DetectConfig
from verlite.control.flow import Flow
from verlite.protocol.data import DataProto, object_array
from verlite.trainer.detectors import Detectors
from verlite.trainer.flow_metrics import WINDOW, Window
from verlite.trainer.groups import Groups, uid_of

PROMPTS = 4


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


def simulated(late: int | None, steps: int = 60) -> list[dict[str, float]]:
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


def said(found: list[dict[str, float]]) -> set[str]:
    """Return the warnings of a run with these metrics."""
    detectors = Detectors(DetectConfig())
    warnings = (detectors.check(step, one) for step, one in enumerate(found, start=1))
    return {warning.name for step in warnings for warning in step}


def test_trained_responses_are_as_long_as_sampled_ones_unless_the_late_are_left_out():
    fair, biased = simulated(late=None)[WINDOW:], simulated(late=1)[WINDOW:]
    assert all(one["async/length_distance"] < one["async/length_distance_limit"] for one in fair)
    assert all(one["async/length_distance"] > one["async/length_distance_limit"] for one in biased)
    assert said(fair) == set() and said(biased) == {"length_bias"}
