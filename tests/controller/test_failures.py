"""How failures are classified and reported, without any worker process."""

import pickle
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.controller.workers import Light
from verlite.control import limits
from verlite.control.watch import Beat, Heard, Watch
from verlite.controller import node, node_watch, rank_watch, supervise
from verlite.controller.failures import (
    DIED,
    STUCK,
    Cause,
    RankDied,
    StuckError,
    WorkerError,
    cause_of_exception,
    indent,
    main_thread_frames,
    reason_for_death,
    stuck_error,
    worker_error,
)
from verlite.controller.node import Diagnosis
from verlite.controller.node_watch import Daemon
from verlite.controller.records import Failed
from verlite.controller.worker_actor import WorkerActor
from verlite.controller.worker_handle import WorkerHandle
from verlite.progress import Progress
from verlite.trainer.errors import exit_code


@pytest.fixture(autouse=True)
def no_process_lookup(monkeypatch):
    monkeypatch.setattr(WorkerHandle, "pid", "4711")


def handle(rank: int) -> WorkerHandle:
    return WorkerHandle(
        None, "actor", rank, "0123456789ab", "10.0.0.2", f"/logs/actor_{rank}.log", None
    )


def cause(rank: int, type_name: str | None, message: str = "", when: float = 0.0) -> Cause:
    kind = "exception" if type_name else DIED
    return Cause(handle(rank), "update", kind, type_name, message, "", when)


def call(how: str) -> Failed:
    """The value that a worker's actor returns when its method fails."""
    actor = WorkerActor.__new__(WorkerActor)
    actor.spec = SimpleNamespace(stops_at_failures=False)
    actor.worker = Light.__new__(Light)
    actor.worker.rank = 0
    result = actor.call("fail how", 0, how)
    assert isinstance(result, Failed)
    return result


@pytest.mark.parametrize(
    "how, kind, type_name, message, is_pickled",
    [
        ("exception", "exception", "ValueError", "bad batch", True),
        ("unpicklable", "exception", "Unpicklable", "cannot travel", False),
        ("memory", "out of host memory", "MemoryError", "cannot allocate", True),
        ("exit", "exception", "SystemExit", "3", True),
    ],
)
def test_exception_in_a_worker_becomes_a_value(how, kind, type_name, message, is_pickled):
    failed = call(how)
    found = cause_of_exception(handle(0), "fail", failed)
    assert (found.kind, found.type_name, found.message) == (kind, type_name, message)
    assert "workers.py" in found.traceback
    assert "worker_actor.py" not in found.traceback
    assert (found.pickled is not None) == is_pickled
    if is_pickled:
        assert type(pickle.loads(found.pickled)).__name__ == type_name
    text = str(worker_error([found], Diagnosis("log line", "running", 0), 0))
    assert f"actor rank 0 failed in fail ({kind}): {type_name}: {message}" in text
    assert "  its traceback:\n    " in text
    assert "log line" not in text


def test_call_before_construction_is_a_consequence():
    actor = WorkerActor.__new__(WorkerActor)
    actor.worker = None
    found = cause_of_exception(handle(0), "update", actor.call("update"))
    assert found.type_name == "WorkerNotBuilt"
    assert found.is_consequence


@pytest.mark.parametrize(
    "log, more_oom_kills, kind",
    [
        ("Fatal Python error: Segmentation fault", False, "killed by SIGSEGV"),
        ("Fatal Python error: Aborted", False, "killed by SIGABRT"),
        ("Fatal Python error: Bus error", False, "killed by SIGBUS"),
        ("Fatal Python error: Floating-point exception", False, "killed by SIGFPE"),
        ("Fatal Python error: Illegal instruction", False, "killed by SIGILL"),
        ("loss 0.5\n--- received SIGTERM", True, "killed by SIGTERM"),
        ("loss 0.5", True, "out of host memory"),
        ("OSError: [Errno 28] No space left on device: x", False, "a full disk"),
        ("loss 0.5", False, "killed by SIGKILL or os._exit"),
    ],
)
def test_reason_for_death_comes_from_log_and_kernel(log, more_oom_kills, kind):
    assert reason_for_death(log, more_oom_kills)[0] == kind
    diagnosis = Diagnosis(log, "gone", 3 + more_oom_kills)
    error = worker_error([cause(0, None)], diagnosis, 3)
    assert error.kind == kind
    assert error.exception_type is None
    assert f"end of its log:\n{indent(log)}" in str(error)


def test_a_full_disk_is_named_as_the_reason_of_a_death(monkeypatch):
    usage = SimpleNamespace(total=10 << 30, free=512)
    asked = []
    monkeypatch.setattr(node.shutil, "disk_usage", lambda folder: asked.append(folder) or usage)
    (found,) = node.diagnose([("/logs/actor_0.log", None)])
    assert asked == ["/tmp", "/dev/shm", "/logs"]
    error = worker_error([cause(0, None)], found, 0)
    assert error.kind == "a full disk" and error.may_pass
    assert "disks of its machine are full: /tmp (512 bytes free), /dev/shm (512" in str(error)
    process = node.Process(7, 1)
    assert "machine are full: /tmp" in str(node_watch.lost(Daemon("gcs", process), "has ended"))
    usage.free = 100 << 20  # 1% of a large disk
    assert node.full_disks() == ""
    usage.total = usage.free = 32 << 20  # the whole /dev/shm of a container
    assert node.full_disks() == ""
    usage.free = 1 << 19
    assert node.full_disks() == "/tmp (512.0 KiB free), /dev/shm (512.0 KiB free)"
    assert reason_for_death("loss 0.5", True, "/tmp")[0] == "out of host memory"


def test_death_on_a_node_that_does_not_answer():
    error = worker_error([cause(0, None)], None, 0)
    assert error.kind == "node lost"
    assert "its node does not answer" in str(error)


def test_stuck_samples_end_the_run_and_may_pass():
    """As a stuck call does. Their engine is not at fault, so it is not started again."""
    failed = Failed("SamplesStuck", "2 wait for env.step", "", 1.0, None)
    found = cause_of_exception(cause(0, None).worker, "finished", failed)
    error = worker_error([found], None, None)
    assert (error.kind, error.may_pass, found.ended) == ("no progress", True, False)
    assert exit_code(error) == 76


def test_causes_come_before_consequences_and_deaths_before_exceptions():
    broken_collective = cause(0, "RuntimeError", "Connection closed by peer", 1.0)
    lost_column = cause(1, "OwnerDiedError", "", 2.0)
    bug = cause(2, "ValueError", "bad batch", 3.0)
    later_bug = cause(3, "RuntimeError", "bad shape", 4.0)
    death = cause(4, None, "", 5.0)
    found = [lost_column, broken_collective, later_bug, death, bug]
    found.sort(key=lambda one: one.order)
    assert [one.worker.rank for one in found] == [4, 2, 3, 0, 1]
    assert [one.is_consequence for one in found] == [False, False, False, True, True]
    assert cause(1, "TransportError", "the trainer could not send all weights", 0).is_consequence
    stopped = "sync to weight version 3 failed: TransportError: it is gone"
    assert cause(1, "WeightSyncError", stopped, 0).is_consequence
    assert not cause(
        1, "WeightSyncError", "the engine's weights have fingerprint 0", 0
    ).is_consequence
    text = str(worker_error(found, Diagnosis("", "gone", 0), 0))
    assert "then actor rank 0 in update: RuntimeError: Connection closed by peer" in text


@pytest.mark.parametrize(
    "failures, node_answers, restarts",
    [
        ([("rollout", None)], True, True),
        ([("rollout", None), ("rollout", "EngineDied"), ("actor", "TransportError")], True, True),
        ([("rollout", "Sigterm")], True, True),
        ([("rollout", "OutOfMemoryError")], True, True),
        ([("rollout", "ValueError")], True, False),
        ([("rollout", "WeightSyncError")], True, False),
        ([("actor", None)], True, False),
        ([("rollout", None), ("actor", None)], True, False),
        ([("rollout", None), ("actor", "ValueError")], True, False),
        ([("rollout", None)], False, False),
    ],
)
def test_only_deaths_of_a_restartable_role_spare_the_other_workers(
    failures, node_answers, restarts, monkeypatch
):
    diagnosis = Diagnosis("", "gone", 0) if node_answers else None
    monkeypatch.setattr(supervise, "process_infos", lambda workers: [None])
    monkeypatch.setattr(supervise, "diagnose", lambda workers: [diagnosis])
    supervisor, stopped = supervise.Supervisor(1), []
    supervisor.stop_all = lambda: stopped.append(True)
    supervisor.restartable = {"rollout"}
    causes = []
    for when, (role, type_name) in enumerate(failures):
        found = cause(when, type_name, when=when)
        causes.append(replace(found, worker=replace(found.worker, role=role)))
    with pytest.raises(WorkerError) as caught:
        supervisor._raise_first(causes)
    assert isinstance(caught.value, RankDied) == restarts == (not stopped)
    if restarts:
        dead = [one.worker for one in causes if one.worker.role == "rollout"]
        assert caught.value.workers == dead and supervisor.failure is None


def restarting(monkeypatch, *found):
    """A supervisor of the restartable role "rollout" whose next polls find these causes."""
    supervisor, polls = supervise.Supervisor(60), list(found)
    supervisor.restartable = {"rollout"}
    killed = []
    monkeypatch.setattr(supervisor, "_kill", killed.extend)

    def collect(timeout_s):
        causes = polls.pop(0)
        for one in causes:
            for future in supervisor.outstanding:
                future.pending.pop(one.worker, None)
        supervisor.outstanding = [future for future in supervisor.outstanding if polls]
        return causes

    monkeypatch.setattr(supervisor, "_collect", collect)
    return supervisor, killed


def engine(rank):
    return replace(handle(rank), role="rollout")


def test_engines_that_fail_while_a_call_settles_are_killed_too(monkeypatch):
    engines = [engine(rank) for rank in range(3)]
    full = replace(cause(1, "OutOfMemoryError"), worker=engines[1])
    supervisor, killed = restarting(monkeypatch, [], [full])
    supervisor.workers = engines
    pending = {worker: worker for worker in engines[1:]}
    supervisor.watch(supervise.Future(supervisor, "rollout", "generate", pending, list))
    assert supervisor.settle(engines[:1]) == engines[:2] == killed
    assert supervisor.workers == engines[2:]


@pytest.mark.parametrize("end", ["answered", "a dead engine", "another dies", "stuck"])
def test_a_call_over_its_limit_is_looked_at_once_more(monkeypatch, end):
    first, idle, actor = engine(0), engine(1), handle(0)
    last = [cause(0, "OutOfMemoryError")] if end == "another dies" else []
    supervisor, killed = restarting(monkeypatch, [], last, *[[]] * 9)
    supervisor.workers = [first, idle, actor]
    call = supervisor.watch(supervise.Future(supervisor, "actor", "publish", {"ref": actor}, list))
    monkeypatch.setattr(limits, "GRACE_S", 0.01)
    monkeypatch.setattr(call, "exceeds", lambda limit_s: True)
    for name, value in (("diagnose", [None]), ("process_infos", [None])):
        monkeypatch.setattr(supervise, name, lambda workers, value=value: value)
    monkeypatch.setattr(supervise, "collect", lambda workers, outstanding: None)
    monkeypatch.setattr(supervisor, "stop_all", lambda: None)
    dead = [replace(cause(0, None), worker=first)]
    if end == "a dead engine":
        dead.append(replace(cause(1, None), worker=idle))
    monkeypatch.setattr(supervisor, "_dead_workers", lambda: dead)
    waits, collect = [], supervisor._collect

    def collected(timeout_s):
        waits.append(timeout_s)
        if idle in killed or (end == "answered" and not timeout_s):
            call.pending.clear()  # it waited for the idle engine
        time.sleep(0.02)
        return collect(timeout_s)

    monkeypatch.setattr(supervisor, "_collect", collected)
    if end in ("another dies", "stuck"):
        with pytest.raises(WorkerError if end == "another dies" else StuckError):
            supervisor.settle([first])
    else:
        supervisor.settle([first])
        assert killed == ([first, idle] if end == "a dead engine" else [first])
    assert waits[0] > 0 == waits[1]  # calls that waited for the first engine have time to fail


def test_a_call_exceeds_its_limit_only_later_than_that():
    call = supervise.Future(supervise.Supervisor(60), "actor", "update", {"ref": handle(0)}, list)
    assert not call.exceeds(5.0)
    call.started -= 10.0
    assert call.exceeds(5.0) and not call.exceeds(1000.0)


def test_a_rank_that_failed_because_of_a_death_repeats_its_part(monkeypatch):
    engines = [engine(rank) for rank in range(3)]
    supervisor = supervise.Supervisor(60)
    supervisor.workers = engines[1:]
    sent = []

    def send(rank):
        sent.append(rank)
        return f"call of {rank}", engines[rank]

    future = supervise.Future(supervisor, "rollout", "generate", {}, list, send)
    future.sent = dict(enumerate(engines))
    future.values = {2: "its samples"}  # 0 is dead; 1 has lost a connection
    future.send_missing()
    assert sent == [0, 1] and future.values == {2: "its samples"}


def test_an_idle_engine_that_is_frozen_does_not_disturb_another_call(monkeypatch):
    idle, busy, actor = engine(0), engine(1), handle(0)
    supervisor, looked = supervise.Supervisor(60), []
    supervisor.restartable = {"rollout"}
    supervisor.workers = [idle, busy, actor]
    supervisor.watch(supervise.Future(supervisor, "rollout", "sleep", {"call": busy}, list))
    monkeypatch.setattr(supervisor.ranks, "is_due", lambda now: True)

    def look(ranks, needed, *others):
        looked.extend(needed)
        return []

    monkeypatch.setattr(supervise, "look", look)
    assert supervisor._unresponsive() == [] and looked == [busy, actor]


def test_stacks_are_written_once_per_silence(monkeypatch):
    """Native code may hold Python's lock for longer than the time-out, many times over."""
    worker, looks, state = replace(handle(0), heartbeat="w"), [], ["running"]
    watch = Watch(45.0)
    watch.clock, watch.heard["w"] = 100.0, Heard(Beat(9, Progress()), 100.0, 100.0)

    def collect(workers, outstanding):
        looks.append(watch.clock)
        stacks = "" if state[0] == "stopped by a signal" else "a stack"
        return {"workers": [{"stacks": stacks, "state": state[0]}]}

    monkeypatch.setattr(rank_watch, "collect", collect)
    monkeypatch.setattr(rank_watch, "write_stacks", lambda workers, dump: "stacks.txt")
    monkeypatch.setattr(rank_watch, "diagnose", lambda found: [Diagnosis("", state[0], 0)])

    def frozen_at(clock):
        watch.clock = clock
        found = rank_watch.look(watch, [worker], [worker], [], 3600.0, pytest.fail)
        return [one.workers for one in found]

    assert frozen_at(140.0) == [] and looks == []
    assert [frozen_at(clock) for clock in (146.0, 192.0, 238.0)] == [[], [], []]
    assert looks == [146.0], "the worker answered, and its process runs"
    state[0] = "stopped by a signal"
    assert frozen_at(284.0) == [[worker]] and looks == [146.0, 284.0]


@pytest.mark.parametrize("method", ["update", "finished"])
def test_what_is_said_of_calls_without_progress(monkeypatch, method):
    """A call as a whole; of samples that are drawn in the background, each engine."""
    monkeypatch.setattr(rank_watch, "collect", lambda workers, outstanding: {})
    monkeypatch.setattr(rank_watch, "write_stacks", lambda workers, dump: "stacks.txt")
    worker, said = replace(handle(0), heartbeat="w", role="w"), []
    heard = Heard(Beat(9, Progress(method, pending=3)), 1000.0, 950.0, 950.0, 0.5)
    watch = Watch(45.0)
    watch.clock, watch.heard["w"] = 1000.0, heard
    call = supervise.Future(supervise.Supervisor(60, watch), "w", method, {"ref": worker}, list)
    call.started -= 500.0
    watch.finished(supervise.Future(None, "w", method, {}, list), {})

    def look():
        return list(rank_watch.look(watch, [], [worker], [call], 3600.0, said.append))

    assert look() == [] == look()
    heard.moved = heard.stepped = 999.0
    assert look() == []
    what = "call is ended" if method == "update" else "engine is replaced"
    assert said == [
        f"w.{method}: no progress of rank 0 for 50 s. Rank 0 (process 4711 on node 10.0.0.2): "
        f"{method}, 3 unfinished requests. Stacks of all processes: stacks.txt. The {what} after "
        "180 s without progress",
        ("w.update" if method == "update" else "w rank 0") + " makes progress again",
    ]
    heard.moved = heard.stepped = 700.0
    (found,) = look()
    assert (found.workers, found.kind, found.call) == ([worker], STUCK, None)
    assert found.why == said[0].replace("for 50 s", "for 300 s").partition(". The ")[0]


DUMP = """loss 0.5
Thread 0x1 (most recent call first):
  File "queue.py", line 1 in get
Current thread 0x2 (most recent call first):
  File "model.py", line 5 in forward
  File "/x/verlite/controller/worker_actor.py", line 9 in call
  File "ray.py", line 7 in main
"""


def test_frames_of_the_main_thread_end_where_the_worker_begins():
    assert main_thread_frames(DUMP) == 'File "model.py", line 5 in forward'
    idle = DUMP.replace('  File "model.py", line 5 in forward\n', "")
    assert main_thread_frames(idle).endswith('File "ray.py", line 7 in main')
    assert main_thread_frames("loss 0.5") == ""


def test_stuck_error_names_finished_and_unfinished_ranks():
    unfinished = [(handle(1), Diagnosis(DUMP, "sleeping", 0)), (handle(2), None)]
    error = stuck_error("actor", "update", 60, [0], unfinished)
    assert (error.finished, error.unfinished) == ([0], [1, 2])
    assert "actor.update made no progress for 60 s" in str(error)
    assert "finished: 0; not finished: 1, 2" in str(error)
    assert "rank 1: process 4711 is sleeping; stacks in /logs/actor_1.log" in str(error)
    assert 'File "model.py", line 5 in forward' in str(error)
    assert "rank 2: process 4711 is on a node that does not answer" in str(error)


@pytest.mark.parametrize(("ranks", "others"), [(1000, 0), (1000, 8), (8, 1000)])
def test_answers_that_come_one_by_one_are_taken_together(monkeypatch, ranks, others):
    """The driver looks at each rank a few times, not once for each rank. It does not wait for
    other calls."""
    looked, now = 0, 0.0
    arrives = [0.0001 * ref if ref < ranks else 1e9 for ref in range(ranks + others)]

    def wait(refs, num_returns, timeout):
        nonlocal looked, now
        looked += len(refs)
        now = max(now, min(sorted(arrives[ref] for ref in refs)[num_returns - 1], now + timeout))
        ready = [ref for ref in refs if arrives[ref] <= now][:num_returns]
        return ready, [ref for ref in refs if ref not in ready]

    errors = SimpleNamespace(RayError=OSError)
    ray = SimpleNamespace(wait=wait, get=lambda ref: ref, exceptions=errors)
    monkeypatch.setitem(sys.modules, "ray", ray)
    supervisor = supervise.Supervisor(60)
    call, engines = (
        supervisor.watch(
            supervise.Future(supervisor, role, "update", {r: handle(r) for r in refs}, list)
        )
        for role, refs in (("actor", range(ranks)), ("rollout", range(ranks, ranks + others)))
    )
    assert call.result() == list(range(ranks)) and len(engines.pending) == others
    assert looked < 10 * (ranks + others) and now <= 0.0001 * ranks
