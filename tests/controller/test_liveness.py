"""What heartbeats mean, decided without any process."""

import time
from types import SimpleNamespace
from typing import ClassVar

import pytest

from verlite.controller import rank_watch
from verlite.controller.heartbeat import Beat, Heard
from verlite.controller.liveness import (
    Rank,
    Stragglers,
    end_limit,
    is_judged,
    is_silent,
    not_entered,
    own_work,
    position,
    rank_facts,
    slow_rank,
    still_ranks,
)
from verlite.controller.node import Diagnosis
from verlite.controller.worker_handle import WorkerHandle
from verlite.progress import Progress


def at(call="update", ticks=0, in_group=False, **others) -> Progress:
    return Progress(call, 1, ticks, in_group=in_group, **others)


def rank(number: int, still_s: float, in_collective=False, silent_s=1.0, **others) -> Rank:
    return Rank(number, silent_s, still_s, at(**others), in_collective)


def test_facts_are_counted_from_the_call_or_from_what_came_later():
    heard = Heard(Beat(9, at(), in_collective=True), heard=98.0, moved=70.0)
    assert rank_facts(3, heard, 100.0, 50.0) == Rank(3, 2.0, 30.0, at(), True)
    assert rank_facts(3, heard, 100.0, 5.0).still_s == 5.0
    assert rank_facts(3, None, 100.0, 50.0) == Rank(3, None, 50.0, None, False)


class Silent:
    """The heartbeats of one worker, which were last heard at 100 s."""

    clock = 100.0
    heard: ClassVar = {"w": Heard(Beat(9, at(), in_collective=False), heard=100.0, moved=100.0)}


def test_stacks_are_written_once_per_silence(monkeypatch):
    """Native code may hold Python's lock for longer than the time-out, many times over."""
    worker = WorkerHandle(None, "w", 0, "id", "n", "log", None, heartbeat="w")
    heartbeats, looks, state = Silent(), [], ["running"]

    def collect(workers, outstanding):
        looks.append(heartbeats.clock)
        stacks = "" if state[0] == "stopped by a signal" else "a stack"
        return {"workers": [{"stacks": stacks, "state": state[0]}]}

    monkeypatch.setattr(rank_watch, "collect", collect)
    monkeypatch.setattr(rank_watch, "write_stacks", lambda workers, dump: "stacks.txt")
    monkeypatch.setattr(rank_watch, "diagnose", lambda found: [Diagnosis("", state[0], 0)])
    watch = rank_watch.RankWatch(heartbeats, 45.0)

    def frozen_at(clock):
        heartbeats.clock = clock
        return [one.worker for one in watch.frozen([worker], [worker], [])]

    assert frozen_at(140.0) == [] and looks == []
    assert [frozen_at(clock) for clock in (146.0, 192.0, 238.0)] == [[], [], []]
    assert looks == [146.0], "the worker answered, and its process runs"
    state[0] = "stopped by a signal"
    assert frozen_at(284.0) == [worker] and looks == [146.0, 284.0]


def test_a_restarted_process_is_not_judged_by_the_pauses_of_the_old_one(monkeypatch):
    monkeypatch.setattr(rank_watch, "collect", lambda workers, outstanding: {})
    monkeypatch.setattr(rank_watch, "write_stacks", lambda workers, dump: "stacks.txt")
    heartbeats = Silent()
    watch = rank_watch.RankWatch(heartbeats, 45.0)
    ended = {}
    worker = SimpleNamespace(heartbeat="w", rank=0, pid="1", node="n")
    for role in ("rollout", "actor"):
        call = SimpleNamespace(role=role, method="update", pause_s=2.0, answered={})
        watch.finished(call)
        watch.restarted("rollout")
        heartbeats.clock = 300.0
        call.pending, call.is_named, call.started = {"": worker}, False, time.monotonic() - 500.0
        ended[role] = watch.still(call, [worker], [call], 3600.0) is not None
    assert ended == {"rollout": False, "actor": True}


def test_an_engine_that_hangs_in_the_background_is_named_and_then_ended(monkeypatch):
    """The calls that ask for finished samples are short, and say nothing about it."""
    monkeypatch.setattr(rank_watch, "collect", lambda workers, outstanding: {})
    monkeypatch.setattr(rank_watch, "write_stacks", lambda workers, dump: "stacks.txt")
    clock, said = 1000.0, []
    workers = [
        SimpleNamespace(heartbeat=f"{i}", rank=i, pid=f"{i}", node="n", name=f"rollout rank {i}")
        for i in range(3)
    ]

    def heard(pending, stepped, pause_s):
        place = Progress("finished", 9, pending=pending)
        return Heard(Beat(9, place), clock, clock, stepped, pause_s)

    hung, idle, first = heard(3, 950.0, 0.5), heard(0, 0.0, 0.5), heard(3, 900.0, None)
    heartbeats = SimpleNamespace(clock=clock, heard={"0": hung, "1": idle, "2": first})
    watch = rank_watch.RankWatch(heartbeats, 45.0)
    watch.warn = said.append

    def still(run_s=3600.0):
        call = SimpleNamespace(role="rollout", method="finished", started=time.monotonic())
        call.pending = dict(enumerate(workers))
        return watch.still(call, workers, [call], run_s)

    assert still() is None and still() is None
    assert [text.partition(". The engine")[2] for text in said] == [
        " is replaced after 180 s without progress",
        " is replaced after 3600 s without progress",
    ], "each once"
    assert "rollout.finished: no progress of rank 0 for 50 s" in said[0]
    assert "(process 0 on node n): finished, 3 unfinished requests. Stacks" in said[0]
    hung.stepped = 999.0
    assert still() is None and said[2:] == ["rollout rank 0 makes progress again"]
    heartbeats.clock += 182.0
    for one in (hung, idle, first):
        one.heard = heartbeats.clock
    found = still()
    assert found is not None and found.workers == [workers[0]] and not found.in_group
    hung.stepped = heartbeats.clock
    assert still() is None, "the first step may take as long as the run's limit"
    found = still(run_s=200.0)
    assert found is not None and found.workers == [workers[2]]


def test_silence_is_that_of_a_process_that_was_heard_before():
    assert is_silent(rank(0, 0, silent_s=46.0), 45.0)
    assert not is_silent(rank(0, 0, silent_s=44.0), 45.0)
    assert not is_silent(Rank(0, None, 1e6, None), 45.0)


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
    assert is_judged(Rank(0, 1.0, 1e6, found), method) == judged


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
        facts = rank_facts(0, Heard(Beat(now, at(in_group=True)), now, moved), now, now)
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
    assert not_entered([rank(0, 60), Rank(1, None, 60, None)], "update") == []


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
    assert named == [None, None, 1, None, None, None, None, 1]
    assert [stragglers.take(role) for role in ("critic", "actor", "actor")] == [0.0, 4.0, 0.0]


def test_ranks_that_are_slow_in_turn_are_not_stragglers():
    stragglers = Stragglers()
    for i in range(8):
        assert stragglers.add("rollout", "generate", {i % 2: 5.0, 1 - i % 2: 1.0}) is None
