"""The order of calls in a weight sync, and the state after a failed one."""

import gc
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.trainer.test_stages import fake_run
from verlite.control.machine import Machine
from verlite.control.patience import Phase
from verlite.control.policy import Policy
from verlite.controller.failures import Cause, RankDied, StuckError, WorkerError, worker_error
from verlite.controller.node import Diagnosis
from verlite.spec.weight_routes import weight_routes
from verlite.trainer import run as trainer_run
from verlite.trainer.errors import exit_code
from verlite.trainer.run import StepState
from verlite.trainer.stages import weights
from verlite.trainer.stages.weights import call_engines, sync_weights
from verlite.weights.transport import Offer


class Calls(list):
    """A role that records its calls. The call named by `fails` raises."""

    def __init__(self, book, name, fails=None):
        self.book, self.name, self.fails = book, name, fails

    def __getattr__(self, method):
        def call(*arguments):
            self.book.append((self.name, method, *arguments))
            if method == self.fails:
                raise RuntimeError(method)
            return ANSWERS.get(method)

        return call


BY_MEMORY = weight_routes([0], [0], 1, 1, "cuda", "shared_memory")
OFFERS = [Offer(4, BY_MEMORY, fingerprint=7)]
EXPORTED = [SimpleNamespace(bytes=7), SimpleNamespace(bytes=0)]
PROBES = [
    {"perf/weight_probe_gap": 1e-6, "perf/weight_probe_seconds": 0.1},
    {"perf/weight_probe_gap": 2e-6, "perf/weight_probe_seconds": 0.05},
]
ANSWERS = {
    "offer_weights": OFFERS,
    "publish_weights": EXPORTED,
    "fetch_weights": [],
    "load_weights": PROBES,
}
IN_ORDER = [
    ("actor", "offer_weights", 4, pytest.approx(0.005), BY_MEMORY),
    ("actor", "publish_weights", OFFERS[0]),
    ("rollout", "load_weights", OFFERS[0], EXPORTED),
    ("actor", "release_weights"),
]


def synced(fails=None):
    book = []
    run = fake_run(actor=Calls(book, "actor"), rollout=Calls(book, "rollout", fails), version=3)
    run.plan.weights = BY_MEMORY
    run.plan.train_dtype = run.plan.rollout_dtype = "float32"
    run.previous = StepState()
    return book, run


def test_weight_sync_publishes_loads_and_then_releases_the_copy():
    book, run = synced()
    sync_weights(run)
    assert book == IN_ORDER
    assert run.version == 4 and run.metrics == {
        "perf/weight_sync_bytes": 7.0,
        "perf/weight_probe_gap": 2e-6,
        "perf/weight_probe_seconds": 0.1,
    }


@pytest.mark.parametrize("fails", [None, "load_weights"])
def test_inference_loads_with_the_engines_and_its_failure_keeps_the_version(fails, monkeypatch):
    book, run = synced()
    run.inference = Calls(book, "inference", fails)
    monkeypatch.setattr(weights, "submit", lambda method, *arguments: Answer(method(*arguments)))
    loads = ("inference", "load_weights", OFFERS[0], EXPORTED)
    if fails:
        with pytest.raises(RuntimeError, match="load_weights"):
            sync_weights(run)
        assert run.version == 3 and book == [*IN_ORDER[:2], loads]
        return
    sync_weights(run)
    assert run.version == 4 and book == [*IN_ORDER[:2], loads, *IN_ORDER[2:]]
    assert run.metrics["perf/weight_probe_gap"] == 2e-6, "of the engines alone"
    book.clear()
    run.routes = weight_routes([0], [0], 1, 1, "cuda", "auto", [1]).fallback
    engines = SimpleNamespace(supervisor=Calls(book, "supervisor"), workers=["of the engines"])
    looks = ("supervisor", "raise_if_worker_died", engines.workers)
    monkeypatch.setattr(weights, "group", lambda _: engines)
    sync_weights(run)
    offers = [replace(OFFERS[0], routes=run.routes)]
    sends, receives = ("actor", "publish_weights", offers[0]), ("rollout", "fetch_weights", offers)
    assert book[1:5] == [looks, sends, receives, ("inference", "fetch_weights", offers)]
    assert [call[:2] for call in book[-3:]] == [
        (role, "release_weights") for role in ("actor", "rollout", "inference")
    ]


class Answer(list):
    """A finished call."""

    def __init__(self, value):
        self.value = value

    def result(self):
        return self.value


def test_a_failed_weight_sync_does_not_change_the_version():
    book, run = synced("load_weights")
    with pytest.raises(RuntimeError, match="load_weights"):
        sync_weights(run)
    assert run.version == 3 and book == IN_ORDER[:3]


def died(rank=0):
    """Return the error of a call that an engine did not answer."""
    text = f"rollout rank {rank} failed in generate (killed by SIGKILL): gone\n  its log"
    cause = WorkerError(text, "rollout", rank, "generate", "killed by SIGKILL")
    return RankDied(cause, [SimpleNamespace(rank=rank, name=f"rollout rank {rank}")])


class Once(Calls):
    """A role whose call named by `fails` raises the first time, because an engine died."""

    def __getattr__(self, method):
        call = super().__getattr__(method)
        if method != self.fails:
            return call

        def first(*arguments):
            self.fails = None
            self.book.append((self.name, method, *arguments))
            raise died()

        return first


def restarts_into(book, monkeypatch):
    def restart_engines(run, error):
        run.tell(Machine.engines_died, 1, "rollout rank 0", "gone")
        run.tell(Machine.engines_restarted)
        book.append("restarted")

    monkeypatch.setattr(weights, "restart_engines", restart_engines)


def test_a_sync_that_an_engine_dies_in_is_repeated_under_the_same_version(monkeypatch):
    book, run = synced()
    restarts_into(book, monkeypatch)
    run.rollout = Once(book, "rollout", "load_weights")
    sync_weights(run)
    assert book == [*IN_ORDER[:3], "restarted", *IN_ORDER] and run.version == 4


@pytest.mark.parametrize("asleep", [False, True])
def test_a_new_engine_gets_the_weights_before_it_repeats_its_part(asleep, monkeypatch):
    book, run = synced()
    restarts_into(book, monkeypatch)
    run.version = 4  # the sync of this version is the one that is repeated
    run.tell(Machine.step_wanted)
    assert run.stop.machine.phase is Phase.SAMPLE
    phases, give = [], weights.give_weights

    def give_weights(run, version):
        phases.append(run.stop.machine.phase)
        return give(run, version)

    monkeypatch.setattr(weights, "give_weights", give_weights)

    def generate(rows):
        error = died()
        error.call = Calls(book, "call")
        raise error

    call_engines(run, generate, asleep, "rows")
    repeated = ["restarted", *IN_ORDER, ("call", "send_missing"), ("call", "result")]
    assert phases == [Phase.RESYNC] and run.stop.machine.phase is Phase.SAMPLE
    assert book == repeated + [("rollout", "sleep")] * asleep and run.version == 4


def engine_of(rank):
    return SimpleNamespace(
        rank=rank, name=f"rollout rank {rank}", role="rollout", pid="1", node="n", log="log"
    )


class Engines:
    """A worker group whose restarts fail with these errors, one after the other, then succeed."""

    role = "rollout"

    def __init__(self, *errors):
        self.errors, self.restarted, self.supervisor = list(errors), [], self
        self.workers, self.stopped = [], 0

    def stop(self, workers):
        self.stopped += 1

    def settle(self, workers):
        return list(workers)

    def restart(self, workers):
        self.restarted.append([worker.rank for worker in workers])
        if self.errors:
            raise self.errors.pop(0)


TRIED = weight_routes([0, 1], [0, 1], 1, 2, "cuda", "auto")


@pytest.mark.parametrize("fails", ["", "read_trial", "publish_trial", "death", "memory"])
def test_engines_try_ipc_before_the_first_sync_alone(fails, monkeypatch):
    """Wherever it fails, all weights go by shared memory, and the console says why, once. A later
    sync may still lack memory."""
    book, run = synced()
    run.plan.weights = TRIED
    answers = {
        "open_trial": ["a", "b"],
        "read_trial": ["", "why" if fails == "read_trial" else ""],
        "publish_trial": ["why" if fails == "publish_trial" else "", ""],
        "offer_weights": [OFFERS[0], replace(OFFERS[0], lack="why" if fails == "memory" else "")],
    }
    monkeypatch.setitem(globals(), "ANSWERS", ANSWERS | answers)

    class Answers(Answer):
        def result(self):
            if fails == "death" and self.value == answers["read_trial"]:
                raise died()
            return self.value

    monkeypatch.setattr(weights, "submit", lambda method, *given: Answers(method(*given)))
    engines = SimpleNamespace(supervisor=Calls(book, "supervisor"), workers=["of the engines"])
    monkeypatch.setattr(weights, "group", lambda _: engines)
    monkeypatch.setattr(weights, "restart_engines", lambda *_: book.append("restart"))
    run.config.actor_rollout_ref.rollout.weight_probe = "never"
    sync_weights(run)
    trial = [
        ("actor", "open_trial", TRIED),
        ("rollout", "read_trial", TRIED, ["a", "b"]),
        ("actor", "publish_trial"),
    ]
    if fails == "death":
        trial.append("restart")
    first = TRIED if fails in ("", "memory") else TRIED.fallback
    assert book[: len(trial) + 1] == [*trial, ("actor", "offer_weights", 4, None, first)]
    last = TRIED if not fails else TRIED.fallback
    fetches = [call for call in book if call[1] == "fetch_weights"]
    assert [call[2] for call in fetches] == (
        [[replace(OFFERS[0], routes=TRIED)] * 2] if not fails else []
    )
    result = {"death": "ended with the death of a worker", "": "succeeded", "memory": "succeeded"}
    said = f"{replace(first, fallback=None)}. The trial of ipc {result.get(fails, 'failed: why')}"
    expected = [f"weight sync: {said}"]
    if fails == "memory":
        expected.append(f"weight sync: {TRIED.fallback}. why")
    assert list(run.display) == expected
    book.clear()
    sync_weights(run)
    assert book[0] == ("actor", "offer_weights", 5, None, last)
    assert list(run.display) == expected


class Awake(Calls):
    """Engines, and the actor that shares their GPU's memory: no engine may be awake while it
    publishes."""

    def __init__(self, book, name, awake, fails=None):
        super().__init__(book, name, fails)
        self.awake = awake

    def __getattr__(self, method):
        call = super().__getattr__(method)

        def checked(*arguments):
            if method == "sleep":
                self.awake.clear()
            elif method == "offer_weights":
                assert not self.awake, "an engine holds its KV cache"
            answer = call(*arguments)
            if method == "load_weights":
                self.awake.append("KV cache")
            return answer

        return checked


def test_engines_that_live_hold_no_memory_while_the_actor_publishes(monkeypatch):
    """With dynamic sampling, validation and services that may fail, engines stay awake after a
    generation. One of them dies in it."""
    book, run = synced()
    awake = []
    run.actor, run.rollout = Awake(book, "actor", awake), Awake(book, "rollout", awake)
    run.current = StepState(number=1)
    monkeypatch.setattr(weights, "group", lambda workers: Engines())
    sync_weights(run)
    assert awake

    def generate():
        error = died()
        error.call = Calls(book, "call")
        raise error

    call_engines(run, generate, False)
    assert awake and book[-2:] == [("call", "send_missing"), ("call", "result")]


def restart(run, engines, monkeypatch):
    monkeypatch.setattr(weights, "group", lambda workers: engines)
    weights.restart_engines(run, died())


def test_the_first_death_keeps_no_batch(monkeypatch):
    _, run = synced()
    run.current = StepState(number=1)
    death = died()
    death.call = Calls([], "a call with its batch")
    batch = weakref.ref(death.call)
    monkeypatch.setattr(weights, "group", lambda workers: Engines())
    weights.restart_engines(run, death)
    assert isinstance(run.current.first_death, WorkerError)
    assert str(run.current.first_death) == str(death)
    del death
    gc.collect()
    assert batch() is None


def test_restarts_are_counted_per_step_and_limited(monkeypatch):
    book, run = synced()
    run.current = StepState(number=1)
    engines = Engines(died(1))  # the new engine of rank 0 stays; rank 1 dies while it starts
    restart(run, engines, monkeypatch)
    assert engines.restarted == [[0], [1]]
    assert book == [("rollout", "sleep"), ("actor", "engine_restarted")]
    assert run.metrics["perf/engine_restarts"] == 2
    *begins, end = run.display
    for rank, line in enumerate(begins):
        assert line.startswith(f"rollout rank {rank} failed in generate (killed by SIGKILL): gone.")
        assert f"Starting again: {engine_of(rank).name} ({rank + 1} of " in line
    assert len(begins) == 2 and end.startswith("Started again in ")
    restart(run, engines, monkeypatch)
    with pytest.raises(WorkerError, match="(?s)^rollout rank 0.*at most 3 are started again"):
        restart(run, engines, monkeypatch)
    assert len(engines.restarted) == 3
    run.current = StepState(number=2)
    run.tell(Machine.step_wanted)
    restart(run, engines, monkeypatch)


def test_asynchronous_samples_of_all_engines_that_were_replaced_are_drawn_again(monkeypatch):
    book, run = synced()
    run.current = StepState(number=1)
    replaced = []
    run.groups = SimpleNamespace(engines_replaced=replaced.extend)
    engines = Engines(died(1))  # rank 1 dies while the new engine of rank 0 starts
    restart(run, engines, monkeypatch)
    assert engines.restarted == [[0], [1]] and replaced == [0, 1]
    assert ("rollout", "sleep") not in book  # the other engines go on


@pytest.mark.parametrize("limit, code", [(0, 76), (3, 1)])
def test_an_engine_that_fails_in_every_process_fails_for_good(limit, code, monkeypatch):
    _, run = synced()
    run.current = StepState(number=1)
    run.tell(Machine.begins, Policy(total_steps=9, max_restarts=limit))
    failed = Cause(engine_of(0), "generate", "the engine died", "EngineDied", "CUDA", "", 0.0)
    error = worker_error([failed], Diagnosis("", "running", 0), 0)
    monkeypatch.setattr(weights, "group", lambda workers: Engines())
    death = RankDied(error, [engine_of(0)])
    for _ in range(limit):
        weights.restart_engines(run, death)
    with pytest.raises(WorkerError, match="at most") as caught:
        weights.restart_engines(run, death)
    assert exit_code(caught.value) == code


@pytest.mark.parametrize("when", ["in the update", "while the engine starts"])
def test_a_stop_waits_for_no_restart_after_an_update(when, monkeypatch):
    book, run = synced()
    run.current, run.workers = StepState(number=2), {"rollout": "the engines"}
    engines = Engines()
    monkeypatch.setattr(weights, "group", lambda workers: engines)
    monkeypatch.setattr(trainer_run, "group", lambda workers: engines)

    def finish(step):
        """Take a step up to the sync of its weights."""
        run.rollout = Once(book, "rollout", "load_weights")
        run.tell(Machine.step_wanted)
        run.tell(Machine.update_begins)
        if step == 2 and when == "in the update":
            run.stop.tell(Machine.asked, "SIGTERM")
        sync_weights(run)
        run.tell(Machine.step_finished)

    finish(1)
    restarted = [("rollout", "sleep"), ("actor", "engine_restarted")]
    again = [*IN_ORDER[:3], *restarted, *IN_ORDER]
    assert [call[:2] for call in book] == [call[:2] for call in again]
    assert len(engines.restarted) == 1 and engines.stopped == 0 and run.version == 4
    book.clear()

    def start(workers):
        run.stop.tell(Machine.asked, "SIGTERM")
        run.tell(Machine.polled)

    engines.restart = start
    finish(2)
    assert [call[:2] for call in book] == [call[:2] for call in IN_ORDER[:3]]
    assert engines.stopped == 1 and run.version == 5
    assert run.display[-1] == "SIGTERM: no engine is started again; the run saves step 2 and stops"


def test_an_engine_that_cannot_be_started_again_ends_the_run_with_its_first_death(monkeypatch):
    _, run = synced()
    run.current = StepState(number=1)
    stuck = StuckError("rollout.start did not finish within 120 s", "rollout", "start", [], [0])
    with pytest.raises(WorkerError, match="(?s)^rollout rank 0 failed in generate.*did not finish"):
        restart(run, Engines(stuck), monkeypatch)
    actor = WorkerError("actor rank 0 failed", "actor", 0, "no call", "killed by SIGKILL")
    with pytest.raises(WorkerError, match="^actor rank 0 failed"):
        restart(run, Engines(actor), monkeypatch)


@pytest.mark.parametrize(
    ("setting", "before", "expected"),
    [
        ("auto", {}, True),
        ("auto", {"perf/time_per_step": 10.0, "perf/weight_probe_seconds": 0.19}, True),
        ("auto", {"perf/time_per_step": 10.0, "perf/weight_probe_seconds": 0.21}, False),
        ("auto", {"perf/time_per_step": 10.0}, False),
        ("always", {"perf/time_per_step": 10.0, "perf/weight_probe_seconds": 5.0}, True),
        ("never", {}, False),
    ],
)
def test_auto_drops_a_probe_that_takes_more_than_2_percent_of_a_step(setting, before, expected):
    book, run = synced()
    run.config.actor_rollout_ref.rollout.weight_probe = setting
    run.previous = StepState(1, before)
    sync_weights(run)
    limit = pytest.approx(0.005) if expected else None
    assert book[0] == ("actor", "offer_weights", 4, limit, BY_MEMORY)
    is_dropped = setting == "auto" and not expected and len(before) == 2
    assert [line for line in run.display if "0.21 s of a step of 10.00 s" in line] == (
        run.display if is_dropped else []
    )
