"""metrics.jsonl is the truth; other trackers cannot stop a run."""

import json
import time

import pytest

from verlite.trainer.display import short_name
from verlite.trainer.tracking import BackgroundTracker, MetricsFile, Tracking, read_lines


def test_one_object_a_step_readable_at_once(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write(1, {"a": 0.5})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "a": 0.5}
    file.write(2, {"a": float("nan")})
    assert read_lines(tmp_path / "metrics.jsonl")[1] == {"step": 2, "a": None}


def test_resuming_drops_later_steps_and_a_line_cut_by_a_kill(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4, "a')
    file = MetricsFile(path, resumed_step=2)
    file.write(3, {})
    assert [line["step"] for line in read_lines(path)] == [1, 2, 3]


def test_a_tracker_that_raises_is_told_once(tmp_path):
    def broken():
        def log(step, metrics):
            raise ConnectionError("no network")

        return log

    told = []
    tracker = BackgroundTracker("wandb", broken, told.append)
    for step in range(5):
        tracker.log(step, {})
        time.sleep(0.01)
    tracker.finish()
    assert len(told) == 1 and "no network" in told[0]


def test_a_tracker_that_hangs_is_left_behind(tmp_path):
    told = []
    tracker = BackgroundTracker("wandb", lambda: lambda step, metrics: time.sleep(60), told.append)
    tracker.log(1, {})
    begin = time.perf_counter()
    tracker.finish(seconds=0.2)
    assert time.perf_counter() - begin < 5 and "did not finish" in told[0]


def test_tensorboard_writes_events(tmp_path):
    pytest.importorskip("tensorboard")  # an extra
    told = []
    tracking = Tracking(["console", "tensorboard"], tmp_path, "p", "n", {}, told.append)
    tracking.log(1, {"critic/score/mean": 0.5})
    tracking.finish()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert told == [] and events.Scalars("critic/score/mean")[0].value == 0.5


def test_wandb_offline_logs_and_finishes(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    told = []
    tracking = Tracking(["wandb"], tmp_path, "p", "n", {"seed": 1}, told.append)
    tracking.log(1, {"critic/score/mean": 0.5})
    tracking.finish()
    assert told == [] and list(tmp_path.glob("wandb/offline-run-*"))


def test_short_names_keep_the_metric():
    names = [
        "val-core/openai/gsm8k/reward/mean@1",
        "val-core/s/acc/best@4/mean",
        "val-core/s/acc/maj@4/mean",
    ]
    assert [short_name(name) for name in names] == [
        "val openai/gsm8k mean@1",
        "val s best@4",
        "val s maj@4",
    ]
