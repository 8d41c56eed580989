"""Dead, frozen, hanging and slow workers in some hundred schedules. `python -m tests.control watch`
runs more."""

from tests.control.simulate import simulate
from tests.control.watch_world import WatchFault, WatchSchedule, WatchWorld, watch_schedule

SCHEDULES = 400


def test_no_rule_is_broken():
    failure = simulate(SCHEDULES, what="watch")
    assert failure is None, str(failure)


def test_a_seed_is_a_schedule_that_replays():
    for seed in range(10):
        first, second = WatchWorld(watch_schedule(seed)), WatchWorld(watch_schedule(seed))
        assert (first.run(), first.said, first.now) == (second.run(), second.said, second.now)


def test_each_kind_of_fault_ends_as_it_should():
    def end(kind, role, at=5.0):
        one = WatchSchedule(0, steps=1, faults=(WatchFault(kind, at, 1e9, role, 1),))
        return WatchWorld(one).run().partition(":")[0]

    assert [end(kind, "rollout") for kind in ("die", "freeze", "hang")] == ["", "", ""]
    assert end("error", "rollout") == "rollout rank 1 failed in generate (exception)"
    assert end("freeze", "actor") == "actor rank 1 failed in no call (frozen)"
    updating = 90.0
    killed = "actor rank 1 failed in update (died)"
    assert end("die", "actor", updating) == killed
    assert end("freeze", "actor", updating) == "actor rank 1 failed in update (frozen)"
    assert end("error", "actor", updating) == "actor rank 1 failed in update (exception)"
    assert end("hang", "actor", updating).startswith("actor.update made no progress for 1000 s")
