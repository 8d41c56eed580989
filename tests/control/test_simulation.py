"""The control in a few thousand schedules. `python -m tests.control` runs more."""

from dataclasses import replace

import pytest

from tests.control.rules import Broken
from tests.control.schedule import Fault, Schedule, schedule
from tests.control.simulate import broken, shrink, simulate
from tests.control.world import World
from verlite.control.machine import Machine

SCHEDULES = 2500


def test_no_rule_is_broken():
    failure = simulate(SCHEDULES)
    assert failure is None, str(failure)


def test_without_faults_all_steps_are_taken_and_nothing_waits():
    one = Schedule(0, total_steps=4, test_freq=2, save_freq=3, validates_first=True)
    world = World(one)
    assert world.run() == [0] and world.saved == 4 and world.exported
    seconds = one.open_s + one.sync_s + one.test_s  # before the first step
    seconds += 4 * (one.sample_s + 1.5 * one.update_s + one.sync_s + 0.1 + 0.05)
    seconds += (
        2 * one.test_s + 2 * one.save_s + one.save_s + one.cleanup_s
    )  # the last is the export
    assert world.now == pytest.approx(seconds)


def test_a_seed_is_a_schedule_that_replays():
    for seed in range(20):
        first, second = World(schedule(seed)), World(schedule(seed))
        assert first.run() == second.run() and first.now == second.now
        assert first.events == second.events > 5


def test_a_broken_rule_names_its_seed_and_shrinks_to_what_breaks_it(monkeypatch):
    monkeypatch.setattr(Machine, "must_save", property(lambda self: False))
    failure = simulate(100)
    assert failure is not None and f"seed {failure.schedule.seed}: save: " in str(failure)
    assert [fault.kind for fault in failure.schedule.faults] == ["signal"]
    assert broken(failure.schedule) == failure.text
    noise = tuple(Fault("engine", at) for at in (1.0, 2.0, 3.0))
    more = replace(failure.schedule, faults=noise + failure.schedule.faults, max_restarts=3)
    assert shrink(more, failure.text).faults == failure.schedule.faults


def test_a_rest_of_a_wait_that_is_a_rounding_error_ends_it():
    """A limit of 60 s, checked every 2 s, leaves 7e-15 s when its float is not exact."""
    waits = []
    for outage_wait_s in (60.0, 7.1, 6.3000000000000007, 0.1):
        one = Schedule(0, outage_wait_s=outage_wait_s, faults=(Fault("outage", 0.1, 900.0),))
        world = World(one)
        with pytest.MonkeyPatch.context() as patch:
            for name in ("answered", "health"):
                event = getattr(Machine, name)

                def seen(machine, now, *values, event=event):
                    commands = event(machine, now, *values)
                    waits.extend(c.after_s for c in commands if hasattr(c, "after_s"))
                    return commands

                patch.setattr(Machine, name, seen)
            world.run()
    assert len(waits) > 40 and all(wait == 0.0 or wait >= 0.001 for wait in waits)


def test_rules_see_a_machine_that_says_nothing(monkeypatch):
    monkeypatch.setattr(Machine, "asked", lambda *_: [])
    one = Schedule(0, faults=(Fault("signal", 2.0, name="SIGTERM"),))
    with pytest.raises(Broken, match="stop: nothing is unsaved"):
        World(one).run()
