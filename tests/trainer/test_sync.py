"""The order of calls in a weight sync, and the state after a failed one."""

from types import SimpleNamespace

import pytest

from tests.trainer.test_stages import fake_run
from verlite.config.weight_routes import weight_routes
from verlite.trainer.run import StepState
from verlite.trainer.stages import weights
from verlite.trainer.stages.weights import sync_weights


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


OFFERS = [SimpleNamespace(version=4)]
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
    ("actor", "offer_weights", 4, pytest.approx(0.005)),
    ("actor", "publish_weights", OFFERS[0]),
    ("rollout", "load_weights", OFFERS[0], EXPORTED),
    ("actor", "release_weights"),
]


def synced(fails=None):
    book = []
    run = fake_run(actor=Calls(book, "actor"), rollout=Calls(book, "rollout", fails), version=3)
    run.plan.weights = weight_routes([0], [0], 1, 1, "auto")
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
    run.plan.weights = weight_routes([0], [0], 1, 1, "auto", [1])
    sync_weights(run)
    sends, receives = ("actor", "publish_weights", OFFERS[0]), ("rollout", "fetch_weights", OFFERS)
    assert book[1:4] == [sends, receives, ("inference", "fetch_weights", OFFERS)]
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
    assert book[0] == ("actor", "offer_weights", 4, pytest.approx(0.005) if expected else None)
    is_dropped = setting == "auto" and not expected and len(before) == 2
    assert [line for line in run.display if "0.21 s of a step of 10.00 s" in line] == (
        run.display if is_dropped else []
    )
