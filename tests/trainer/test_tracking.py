"""metrics.jsonl contains every step. A failing tracker does not stop a run."""

import json
import threading
import time

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
    file.write(1, {"a": 0.5})
    assert json.loads(path.read_text()) == {"step": 1, "a": 0.5}
    file.write(2, {"a": float("nan")})
    assert read_lines(path)[1] == {"step": 2, "a": None}


def test_resuming_drops_later_steps_and_an_incomplete_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4, "a')
    warnings = []
    file = MetricsFile(path, RetryingWriter(warnings.append), resumed_step=2)
    file.write(3, {})
    assert [line["step"] for line in read_lines(path)] == [1, 2, 3]
    assert (tmp_path / "metrics-unreadable.jsonl").read_text() == '{"step": 4, "a\n'
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


def test_tensorboard_writes_events(tmp_path):
    pytest.importorskip("tensorboard")  # an optional dependency
    warnings = []
    tracking = Tracking(
        ["console", "tensorboard"], tmp_path, "p", "n", {}, RetryingWriter(warnings.append)
    )
    tracking.log(1, {"critic/score/mean": 0.5})
    tracking.finish()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert warnings == []
    assert events.Scalars("critic/score/mean")[0].value == 0.5


def test_mlflow_has_metrics_and_settings(tmp_path, monkeypatch):
    pytest.importorskip("alembic")  # optional dependencies
    pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    warnings = []
    config = {"data": {"seed": 1}, "lists": list(range(200)), "more": {"x": {}}}
    config |= {f"k{number}": number for number in range(150)}
    tracking = Tracking(["mlflow"], tmp_path, "p", "n", config, RetryingWriter(warnings.append))
    for step in (1, 2):
        tracking.log(step, {"val-core/gsm8k/acc/mean@8": step / 2, "nan": float("nan")})
    tracking.finish()
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("p").experiment_id])
    history = client.get_metric_history(run.info.run_id, "val-core/gsm8k/acc/mean_at_8")
    assert [(one.step, one.value) for one in history] == [(1, 0.5), (2, 1.0)]
    assert run.data.params["data.seed"] == "1" and run.data.params["k149"] == "149"
    assert (run.info.status, run.info.run_name, warnings) == ("FINISHED", "n", [])


def test_swanlab_offline_writes_files(tmp_path, monkeypatch):
    pytest.importorskip("swanlab")  # an optional dependency
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    warnings = []
    config = {"data": {"seed": 1}}
    tracking = Tracking(["swanlab"], tmp_path, "p", "n", config, RetryingWriter(warnings.append))
    tracking.log(1, {"critic/score/mean": 0.5})
    tracking.finish()
    assert warnings == []
    (file,) = tmp_path.glob("swanlab/run-*/*.swanlab")
    assert b"critic/score/mean" in file.read_bytes()


def test_wandb_offline_logs_and_finishes(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    warnings = []
    tracking = Tracking(["wandb"], tmp_path, "p", "n", {"seed": 1}, RetryingWriter(warnings.append))
    tracking.log(1, {"critic/score/mean": 0.5})
    tracking.finish()
    assert warnings == []
    assert list(tmp_path.glob("wandb/offline-run-*"))


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
