"""What heartbeats mean, decided without any process."""

from types import SimpleNamespace

import pytest

from verlite.control.stragglers import Slow, Stragglers, slow_rank
from verlite.control.watch import (
    Beat,
    Heard,
    Moves,
    Rank,
    Still,
    Watch,
    end_limit,
    is_judged,
    not_entered,
    own_work,
    position,
    still_ranks,
)
from verlite.progress import Progress


def at(call="update", ticks=0, in_group=False, **others) -> Progress:
    return Progress(call, 1, ticks, in_group=in_group, **others)


def rank(number: int, still_s: float, in_collective=False, silent_s=1.0, **others) -> Rank:
    return Rank(number, f"{number}", silent_s, still_s, at(**others), in_collective)


def watch(clock=100.0, **heard: Heard) -> Watch:
    """A watch of processes that are called "w0", "w1" and so on, with a time-out of 45 s."""
    one = Watch(45.0)
    one.clock, one.heard = clock, heard
    return one


def heard_at(when: float, moved: float | None = None, **others) -> Heard:
    return Heard(Beat(9, at(**others)), when, when if moved is None else moved, when)


def call(method="update", role="actor") -> SimpleNamespace:
    return SimpleNamespace(role=role, method=method, pause_s=0.0, named=set())


def test_facts_are_counted_from_the_call_or_from_what_came_later():
    heard = Heard(Beat(9, at(), in_collective=True), heard=98.0, moved=70.0)
    one = watch(w3=heard)
    assert one.facts(3, "w3", 50.0) == Rank(3, "w3", 2.0, 30.0, at(), True)
    assert one.facts(3, "w3", 5.0).still_s == 5.0
    assert one.facts(3, "w4", 50.0) == Rank(3, "w4", None, 50.0, None, False)
    assert Watch(45.0).facts(3, "w3", 50.0) == Rank(3, "w3", None, 50.0, None, False)


def test_old_and_equal_heartbeats_are_no_progress():
    heard = Heard(Beat(1, at(ticks=5)), 0.0, 0.0)
    heard.hear(Beat(2, at(ticks=5), samples=8), 10.0)
    assert (heard.heard, heard.moved) == (10.0, 0.0)
    heard.hear(Beat(3, at(ticks=6)), 20.0)
    for old in (Beat(2, at(ticks=9)), Beat(3, at(ticks=9))):
        heard.hear(old, 30.0)
    assert (heard.heard, heard.moved, heard.beat.number) == (20.0, 20.0, 3)


def test_the_steps_of_an_engine_are_seen_between_short_calls():
    """Each call changes the position, and is no progress of the engine."""
    heard = Heard(Beat(1, at("finished")), 0.0, 0.0, 0.0)

    def beat(number, clock, pending, steps):
        heard.hear(Beat(number, Progress("finished", number, pending=pending, steps=steps)), clock)
        return clock - heard.stepped, heard.pause_s

    assert beat(2, 50.0, pending=3, steps=0) == (0.0, None), "it had nothing to do"
    assert beat(3, 90.0, pending=3, steps=0) == (40.0, None)
    assert beat(4, 92.0, pending=3, steps=7) == (0.0, 42.0)
    assert beat(5, 101.0, pending=3, steps=8) == (0.0, 42.0), "the longest"
    assert beat(6, 103.0, pending=3, steps=8) == (2.0, 42.0)


def test_silence_is_that_of_a_process_that_was_heard_before_and_has_not_signed_since():
    one = watch(w0=heard_at(54.0), w1=heard_at(56.0), w2=heard_at(10.0))
    names = ("w0", "w1", "w2", "w3")
    assert one.silent(names) == {"w0": 46.0, "w2": 90.0}
    assert not one.have_signed(["w0"])
    one.sign("w0", 100.0)
    assert one.silent(names) == {"w2": 90.0}
    one.clock = 146.0
    assert one.silent(names) == {"w0": 92.0, "w1": 90.0, "w2": 136.0}
    assert one.have_signed(["w0"]) and not one.have_signed(["w0", "w1"])
    one.heard["w0"].hear(Beat(10, at()), 147.0)
    assert not one.have_signed(["w0"]), "the next silence is looked at again"


def test_looks_are_seconds_apart():
    one = watch()
    assert [one.is_due(now) for now in (100.0, 100.9, 101.0)] == [True, False, True]
    one.look_now()
    assert one.is_due(101.1)


def test_a_call_is_named_once_and_again_after_progress_and_then_ended():
    one, update = watch(), call()
    one.finished(call(), {})  # a first call, which has paused for 0 s
    ranks = [rank(0, 46.0, True, in_group=True), rank(1, 50.0, in_group=True)]
    assert one.look(update, ranks, 3600.0) == [Still(ranks, [], 180.0, True)]
    assert one.look(update, ranks, 3600.0) == []
    moved = [ranks[0], rank(1, 1.0, in_group=True)]
    assert one.look(update, moved, 3600.0) == [Moves(moved)]
    assert one.look(update, ranks, 3600.0) == [Still(ranks, [], 180.0, True)]
    ended = [rank(number, 181.0, in_group=True) for number in (0, 1)]
    assert one.look(update, ended, 3600.0) == [Still(ended, ended, 180.0, True)]
    assert update.pause_s == 181.0


def test_nothing_is_said_while_a_rank_may_be_frozen_or_waits_for_something():
    one = watch()
    for other in (rank(1, 50.0, silent_s=7.0), rank(1, 50.0, waits_for="the disk")):
        ranks = [rank(0, 46.0, in_group=True), other]
        assert one.look(call(), ranks, 3600.0) == []
    first = rank(0, 3601.0, silent_s=7.0)
    assert one.look(call(), [first], 3600.0) == [Still([first], [first], 3600.0, False)]


def test_a_restarted_process_is_not_judged_by_the_pauses_of_the_old_one():
    one = watch()
    ended = {}
    for role in ("rollout", "actor"):
        before = call(role=role)
        before.pause_s = 2.0
        one.finished(before, {})
        one.restarted("rollout")
        (verdict,) = one.look(call(role=role), [rank(0, 300.0)], 3600.0)
        ended[role] = bool(verdict.over)
    assert ended == {"rollout": False, "actor": True}


def test_an_engine_that_hangs_in_the_background_is_named_and_then_ended():
    """The calls that ask for finished samples are short, and say nothing about it."""

    def engine(pending, stepped, pause_s):
        place = Progress("finished", 9, pending=pending)
        return Heard(Beat(9, place), 1000.0, 1000.0, stepped, pause_s)

    one = watch(1000.0, w0=engine(3, 950.0, 0.5), w1=engine(0, 0.0, 0.5), w2=engine(3, 900.0, None))

    def look(run_s=3600.0):
        ranks = [one.facts(number, f"w{number}", 0.5) for number in range(3)]
        found = one.look(call("finished", "rollout"), ranks, run_s)
        return [
            (still.ranks[0].rank, still.ranks[0].still_s, still.limit_s, bool(still.over))
            if isinstance(still, Still)
            else still.ranks[0].rank
            for still in found
        ]

    assert look() == [(0, 50.0, 180.0, False), (2, 100.0, 3600.0, False)]
    assert look() == [], "each once"
    one.heard["w0"].stepped = 999.0
    assert look() == [0], "it makes progress again"
    one.clock += 182.0
    for heard in one.heard.values():
        heard.heard = one.clock
    assert look() == [(0, 183.0, 180.0, True)]
    one.heard["w0"].stepped = one.clock
    assert look() == [], "a first step may take as long as the run's limit"
    assert look(200.0) == [(2, 282.0, 200.0, True)]


@pytest.mark.parametrize(
    "judged, found, method",
    [
        (True, at(), "update"),
        (True, at("generate", requests=3), "generate"),
        (False, at("generate", requests=0), "generate"),  # tools and rewards have their own limits
        (False, at(waits_for="the reference service"), "update"),
        (False, at("save"), "save"),
        (False, at("construction"), "construction"),
        (False, None, "update"),
    ],
)
def test_only_ranks_that_should_make_progress_are_judged(judged, found, method):
    assert is_judged(Rank(0, "w", 1.0, 1e6, found), method) == judged


def test_a_rank_that_waits_for_a_working_peer_is_not_still():
    waiting, working = rank(0, 600.0, True, in_group=True), rank(1, 3.0, in_group=True)
    assert still_ranks([waiting, working], 60.0) == []
    stopped = rank(1, 61.0, in_group=True)
    assert still_ranks([waiting, stopped], 60.0) == [waiting, stopped]


def test_ranks_without_collectives_are_still_on_their_own():
    hung, working = rank(0, 600.0, call="generate"), rank(1, 3.0, call="generate")
    assert still_ranks([hung, working], 60.0) == [hung]


@pytest.mark.parametrize(
    "longest_pause_s, limit_s",
    [(None, 3600.0), (0.5, 180.0), (18.0, 180.0), (30.0, 300.0), (1000.0, 3600.0)],
)
def test_limits_follow_earlier_calls(longest_pause_s, limit_s):
    assert end_limit(3600.0, 45.0, longest_pause_s) == limit_s


def test_a_limit_of_the_run_below_all_others_holds():
    assert end_limit(30.0, 45.0, 0.5) == 30.0


def test_a_phase_twenty_times_longer_than_before_that_makes_progress_is_never_still():
    limit_s = end_limit(3600.0, 45.0, 6.0)  # micro-batches took 6 s, the whole call 60 s
    moved = 0.0
    for now in range(20 * 60):
        if now % 120 == 0:  # each turn takes twenty times as long, too
            moved = float(now)
        one = watch(now, w=Heard(Beat(now, at(in_group=True)), now, moved))
        facts = one.facts(0, "w", now)
        assert not still_ranks([facts], limit_s)


def test_the_rank_that_did_not_begin_the_call_is_named():
    ranks = [rank(0, 60, True, in_group=True), rank(1, 60, in_group=True, call="")]
    assert not_entered(ranks, "update") == [1]


def test_the_rank_outside_the_collective_is_named():
    ranks = [rank(i, 60, i != 2, in_group=True, ticks=3) for i in range(4)]
    assert not_entered(ranks, "update") == [2]


def test_the_rank_with_the_fewest_turns_is_named():
    ranks = [rank(i, 60, in_group=True, ticks=7 - (i == 1)) for i in range(3)]
    assert not_entered(ranks, "update") == [1]


def test_nobody_is_named_without_a_difference():
    assert not_entered([rank(i, 60, True, in_group=True) for i in range(3)], "update") == []
    assert not_entered([rank(0, 60), Rank(1, "w", None, 60, None)], "update") == []


def test_positions_as_text():
    text = "update, mini-batch 1 of 4, micro-batch 2 of 8"
    assert position(at(part="mini-batch 1 of 4", turn="micro-batch 2 of 8")) == text
    assert position(at("generate", requests=3)) == "generate, 3 unfinished requests"
    assert position(at("finished", pending=2)) == "finished, 2 unfinished requests"
    assert position(at("generate", requests=0, pending=2)) == "generate, 0 unfinished requests"
    assert position(at(waits_for="the disk")) == "update, waits for the disk"
    assert position(at("")) == "between two calls"
    assert position(None) == "no heartbeat has arrived from it"


@pytest.mark.parametrize(
    "work, found",
    [
        ({0: 4.0, 1: 1.0, 2: 2.0}, (0, 2.5)),
        ({0: 1.5, 1: 1.0}, None),  # half a second is noise
        ({0: 100.0, 1: 90.0, 2: 80.0}, None),  # and so is a sixth
        ({0: 9.0}, None),
    ],
)
def test_slow_rank(work, found):
    assert slow_rank(work) == found


def test_own_work_is_without_the_waits_for_others():
    heard = Heard(Beat(1, at(), samples=8, waits=6), 0.0, 0.0)
    assert own_work(10.0, heard) == 2.5
    assert own_work(10.0, None) == own_work(10.0, Heard(Beat(1, at()), 0.0, 0.0)) == 10.0


def test_a_straggler_is_named_once_per_onset():
    stragglers = Stragglers()
    slow, even = {0: 1.0, 1: 5.0}, {0: 1.0, 1: 1.0}
    calls = [slow, slow, slow, slow, even, slow, slow, slow]
    named = [stragglers.add("actor", "update", work) for work in calls]
    assert named == [Slow(1, slow) if n in (2, 7) else None for n in range(8)]
    assert [stragglers.take(role) for role in ("critic", "actor", "actor")] == [0.0, 4.0, 0.0]


def test_ranks_that_are_slow_in_turn_are_not_stragglers():
    stragglers = Stragglers()
    for i in range(8):
        assert stragglers.add("rollout", "generate", {i % 2: 5.0, 1 - i % 2: 1.0}) is None
