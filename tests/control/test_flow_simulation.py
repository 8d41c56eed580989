"""Asynchronous training in a few thousand schedules. `python -m tests.control flow` runs more."""

from collections import Counter
from dataclasses import replace

import pytest

from tests.control.flow_rules import FlowRules
from tests.control.flow_schedule import FlowSchedule, flow_schedule
from tests.control.flow_world import FlowWorld, Process
from tests.control.rules import Broken
from tests.control.simulate import broken, simulate
from verlite.control.flow import Flow, State

SCHEDULES = 2500
PLAIN = FlowSchedule(
    0, total_steps=4, groups_per_step=3, engines=3, slots=8, sigma=1e-9, delay_s=0.0, save_freq=9
)
"""Each group takes 10 s to sample, each update 10 s, each weight sync 2 s, the checkpoint 1 s."""


def test_no_rule_is_broken():
    failure = simulate(SCHEDULES, what="flow")
    assert failure is None, str(failure)


@pytest.mark.parametrize(
    ("bound", "depth", "swaps", "seconds"),
    [
        (0, 0, True, 4 * (2 + 10 + 10) + 1),
        (0, 0, False, 4 * (2 + 10 + 10) + 1),
        # The second batch is sampled with the first, the others during an update and sync.
        (1, 1, True, (2 + 10) + 4 * (10 + 2) - 2 + 1),
        # As above, but each batch but the first two is started after a sync.
        (1, 1, False, (2 + 10) + 4 * (10 + 2) - 2 + 1),
    ],
)
def test_what_a_run_takes(bound, depth, swaps, seconds):
    world = FlowWorld(replace(PLAIN, bound=bound, depth=depth, swaps=swaps))
    world.run()
    assert world.now == pytest.approx(seconds, abs=1e-6)


def test_a_seed_is_a_schedule_that_replays():
    for seed in range(20):
        first, second = FlowWorld(flow_schedule(seed)), FlowWorld(flow_schedule(seed))
        first.run()
        second.run()
        assert first.now == second.now and first.events == second.events > 3
        assert first.rules.trained_numbers == second.rules.trained_numbers != []


def test_a_broken_rule_shrinks_to_what_breaks_it(monkeypatch):
    monkeypatch.setattr(Flow, "_put_back", lambda self, group: None)
    failure = simulate(100, what="flow")
    assert failure is not None and f"seed {failure.schedule.seed}: " in str(failure)
    assert len(failure.schedule.faults) == 1
    assert not any(broken(smaller) for smaller in failure.schedule.smaller())
    assert broken(failure.schedule) == failure.text


def _trains_nothing(self, numbers):
    pass


def _trains_without_samples(self, numbers):
    self.data.clear()
    self.begin(self.schedule.update_s, self.trained, numbers)


def _only_the_first_weights(self, engine, version):
    engine.version = engine.version or version


@pytest.mark.parametrize(
    ("name", "bug", "reports_oldest", "rule"),
    [
        ("train", _trains_nothing, True, "progress: nothing happens any more in step 1"),
        ("train", _trains_without_samples, True, "data: group 0 is trained without its samples"),
        ("swap", _only_the_first_weights, False, "age: group 6 has age 2 in step 3"),
        ("swap", _only_the_first_weights, True, "ValueError: group 8 has tokens of version 1, but"),
    ],
)
def test_a_loop_with_a_bug_is_found(monkeypatch, name, bug, reports_oldest, rule):
    monkeypatch.setattr(Process, name, bug)
    assert broken(replace(PLAIN, reports_oldest=reports_oldest)).startswith(rule)


def test_schedules_reach_what_the_rules_are_about(monkeypatch):
    seen = Counter()

    def watch(owner, name, what):
        original = getattr(owner, name)

        def watched(self, *arguments, **named):
            before = set(self.groups) if owner is Flow else set()
            result = original(self, *arguments, **named)
            seen[what(self, before, result, *arguments, **named)] += 1
            return result

        monkeypatch.setattr(owner, name, watched)

    def answer(flow, before, kept, number, oldest):
        if kept:
            return "kept"
        return "repeated answer" if number in before else "answer for a group that is gone"

    def choice(flow, before, found):
        waits = found is None and flow.counts()[State.READY] >= flow.groups_per_step
        return "step waits for an old group" if waits else "other choice"

    def lost(rules, before, found, engine, numbers):
        down = rules.schedule.engines - len(rules.up)
        return "two engines are down" if down > 1 else "running lost"

    watch(Flow, "finished", answer)
    watch(Flow, "choose", choice)
    watch(Flow, "may_publish", lambda flow, _, may: "other" if may else "publication waits")
    watch(FlowRules, "lost", lost)
    watch(FlowRules, "resumed", lambda _, __, ___, kept, begun: f"kept {len(kept) > 0}")
    watch(FlowRules, "resumed", lambda _, __, ___, kept, begun: f"begun {len(begun) > 0}")
    for seed in range(400):
        assert broken(flow_schedule(seed)) == ""
    cases = (
        "kept", "answer for a group that is gone", "repeated answer",
        "step waits for an old group", "publication waits", "two engines are down",
        "running lost", "kept True", "kept False", "begun True", "begun False",
    )  # fmt: skip
    assert all(seen[case] >= 10 for case in cases), seen


def distance(some, others):
    """The Kolmogorov-Smirnov distance between two samples."""
    return max(
        abs(sum(x <= at for x in some) / len(some) - sum(x <= at for x in others) / len(others))
        for at in {*some, *others}
    )


def test_trained_groups_are_as_long_as_sampled_ones(monkeypatch):
    """A loop that drops what has come too late trains on short answers, and the rules see it."""
    long = FlowSchedule(
        0, 100, 4, bound=4, depth=4, slots=8, sigma=1.5, filtered=0.3, save_freq=999
    )

    def compare():
        """Return the broken rule, the distance, and what chance exceeds in 1% of all cases."""
        world = FlowWorld(long)
        rule = ""
        try:
            world.run()
        except Broken as error:
            rule = str(error)
        trained = [number for step in world.rules.trained_numbers for number in step]
        some, others = (
            [world.facts(n).seconds for n in ns] for ns in (trained, world.rules.entries)
        )
        chance = 1.63 * (1 / len(some) + 1 / len(others)) ** 0.5
        return rule, distance(some, others), chance

    rule, fair, chance = compare()
    assert rule == "" and fair < chance / 2

    answer = Process.answer

    def drops(self, engine, number, oldest):
        answer(self, engine, number, oldest)
        if number in self.data and self.flow.step + 1 - oldest > 1:
            self.rules.filtered(number, self.flow.filtered(number, "too old"))
            del self.data[number]

    monkeypatch.setattr(Process, "answer", drops)
    rule, biased, chance = compare()
    assert rule.startswith("lost: group ") and biased > chance
