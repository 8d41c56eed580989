"""metrics.jsonl contains every step. A failing tracker does not stop a run."""

import json
import math
import sys
import threading
import time
import types

import pytest

from verlite.files import RetryingWriter
from verlite.trainer.display import short_name
from verlite.trainer.tracking import BackgroundTracker, MetricsFile, Tracking, read_lines


class StubTracker:
    """A tracker that runs `action` in every call of log."""

    def __init__(self, action):
        self.action = action

    def __call__(self, step, metrics):
        self.action()

    def finish(self):
        pass


def test_every_step_is_one_json_object_readable_at_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, RetryingWriter(pytest.fail))
    before = time.time()
    file.write(1, {"a": 0.5})
    first = json.loads(path.read_text())
    assert first == {"step": 1, "time": first["time"], "a": 0.5}
    assert before - 0.001 <= first["time"] <= time.time() + 0.001
    file.write(2, {"a": float("nan")})
    second = read_lines(path)[1]
    assert second["step"] == 2 and second["a"] is None and second["time"] >= first["time"]


def test_resuming_drops_later_steps_and_an_incomplete_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4}\n{"step": 5, "a')
    warnings = []
    file = MetricsFile(path, RetryingWriter(warnings.append), resumed_step=2)
    file.write(3, {})
    assert [line["step"] for line in read_lines(path)] == [1, 2, 3]
    assert (tmp_path / "metrics-unreadable.jsonl").read_text() == '{"step": 5, "a\n'
    assert len(warnings) == 1


def test_a_tracker_that_raises_warns_once(tmp_path):
    def fail():
        raise ConnectionError("no network")

    warnings = []
    tracker = BackgroundTracker("wandb", lambda: StubTracker(fail), warnings.append)
    for step in range(5):
        tracker.log(step, {})
        time.sleep(0.01)
    tracker.finish()
    tracker.join()
    assert len(warnings) == 1
    assert "no network" in warnings[0]


def test_a_tracker_that_hangs_is_abandoned(tmp_path):
    release = threading.Event()
    warnings = []
    tracker = BackgroundTracker("wandb", lambda: StubTracker(release.wait), warnings.append)
    tracker.log(1, {})
    start = time.perf_counter()
    tracker.finish()
    tracker.join(seconds=0.2)
    assert time.perf_counter() - start < 5
    assert "did not finish" in warnings[0]
    release.set()


def test_samples_go_to_trackers_that_take_them_in_some_steps(tmp_path, monkeypatch):
    sent = []

    class Own:
        def __init__(self, run):
            sent.append((run.project, run.name, run.directory, run.config, run.resumed_step))
            run.say("opened")

        def __call__(self, step, metrics):
            sent.append((step, metrics))

        def samples(self, step, kind, records):
            sent.append((step, kind, len(records)))

        def finish(self):
            sent.append("finished")

    module = types.ModuleType("my_module")
    module.Own = Own
    module.Plain = lambda run: StubTracker(lambda: None)
    monkeypatch.setitem(sys.modules, "my_module", module)
    said, warned = [], []
    loggers = ["console", "my_module:Own", "my_module:Plain"]
    writer = RetryingWriter(warned.append)
    tracking = Tracking(loggers, tmp_path, "p", "n", {"seed": 1}, writer, 4, said.append)
    tracking.log(5, {"a": 1.0})
    for step in range(5, 21):
        tracking.samples(step, "train", [{}] * 40)
    tracking.samples(20, "val", [{}])
    tracking.finish()
    assert sent == [
        ("p", "n", tmp_path, {"seed": 1}, 4),
        (5, {"a": 1.0}),
        (10, "train", 32),
        (20, "train", 32),
        (20, "val", 1),
        "finished",
    ]
    assert (said, warned) == (["opened"], [])


@pytest.mark.parametrize(
    ("key", "short"),
    [
        ("val-core/openai/gsm8k/reward/mean@1", "val openai/gsm8k mean@1"),
        ("val-core/s/acc/best@4/mean", "val s best@4"),
        ("val-core/s/acc/maj@4/mean", "val s maj@4"),
    ],
)
def test_short_names_keep_the_metric(key, short):
    assert short_name(key) == short


def test_a_validation_after_the_run_keeps_the_numbers_of_the_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, RetryingWriter(pytest.fail))
    file.write(1, {"score": 0.5, "val": 0.1})
    file.write(2, {"score": 0.6})
    MetricsFile(path, RetryingWriter(pytest.fail), 2).write(2, {"val": 0.9, "extra": math.nan})
    first, second = read_lines(path)
    assert (first["score"], first["val"]) == (0.5, 0.1)
    assert (second["score"], second["val"], second["extra"]) == (0.6, 0.9, None)
    MetricsFile(path, RetryingWriter(pytest.fail), 2)
    assert len(path.read_text().splitlines()) == 2 and read_lines(path) == [first, second]
