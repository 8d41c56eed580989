"""Each tracker sends metrics, settings and samples, and continues its run after a resume.

Packages that are not installed here are replaced by fakes with the signatures of the versions that
are named in each fake.
"""

import json
import sys
import types

import pytest

from tests.later import Later
from verlite.trainer import trackers
from verlite.trainer.tracking import TrackedRun

wandb = Later("wandb")
SAMPLES = [
    {
        "prompt": "1+1\n=",
        "response": "2 \ud800",
        "ground_truth": {"target": ["2"]},
        "score": 0.5,
        "data_source": "sums",
        "status": "done",
    },
    {"prompt": "p", "response": "", "ground_truth": "7", "score": None, "status": "error"},
]
METRICS = {"val-core/sums/acc/mean@8": 0.5}


@pytest.fixture
def said():
    return []


@pytest.fixture
def tracked(tmp_path, said):
    """Return a function from the resumed step to what a tracker is called with."""
    config = {"data": {"seed": 1}, "lists": list(range(200)), "more": {"x": {}}}
    config |= {f"k{number}": number for number in range(150)}
    return lambda step=0: TrackedRun("p", "n", tmp_path, config, step, said.append)


def log_steps(tracker, *steps):
    for step in steps:
        tracker(step, METRICS)
    tracker.samples(steps[-1], "train", SAMPLES)
    tracker.finish()


class FakeRun:
    """What the fakes' init returns."""

    def __init__(self, **known):
        self.logged = []
        self.finished = 0
        self.__dict__.update(known)

    def log(self, data, step=None):
        self.logged.append((step, data))

    def finish(self):
        self.finished += 1


@pytest.mark.slow
def test_wandb_without_a_login_is_offline_and_names_the_command(tracked, tmp_path, said):
    log_steps(trackers.WandbTracker(tracked()), 1, 2)
    (folder,) = tmp_path.glob("wandb/offline-run-*")
    number = (tmp_path / "trackers/wandb.id").read_text().strip()
    assert folder.name.endswith(number)
    (text,) = said
    assert "no login" in text
    assert text.endswith(f"wandb sync {tmp_path}/wandb/offline-run-*-{number}")
    (table,) = folder.glob("files/media/table/train/generations_*.table.json")
    rows = json.loads(table.read_text())["data"]
    assert rows[0][:3] == [2, "1+1\n=", "2 \\ud800"]
    assert [row[4] for row in rows] == [0.5, None]


def wandb_fake(monkeypatch, error=None):
    calls = []

    def init(*, mode=None, **options):
        calls.append((mode, options))
        if error and mode is None:
            raise error
        offline = mode == "offline"
        return FakeRun(offline=offline, url=None if offline else "https://w/run", metrics=[])

    monkeypatch.setattr("wandb.init", init)
    monkeypatch.setattr("wandb.teardown", lambda: calls.append("teardown"))
    monkeypatch.setattr(FakeRun, "define_metric", lambda *_, **__: None, raising=False)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    return calls


def test_wandb_continues_its_run_and_shows_its_address(tracked, monkeypatch, said):
    calls = wandb_fake(monkeypatch)
    tracker = trackers.WandbTracker(tracked())
    tracker(3, METRICS)
    # W&B drops a step that it has already, so the step is a metric.
    assert tracker._run.logged == [(None, {**METRICS, "training/global_step": 3})]
    trackers.WandbTracker(tracked(2))
    trackers.WandbTracker(tracked())
    first, resumed, restarted = [options for _, options in calls]
    assert first["id"] == resumed["id"] != restarted["id"]
    assert first["resume"] == "allow" and first["config"]["data"] == {"seed": 1}
    assert said == ["wandb: https://w/run"] * 3


def test_wandb_without_a_network_goes_on_offline(tracked, monkeypatch, said):
    calls = wandb_fake(monkeypatch, wandb.errors.CommError("no such host"))
    trackers.WandbTracker(tracked())
    (online, first), teardown, (offline, second) = calls
    assert (online, teardown, offline) == (None, "teardown", "offline")
    assert first == second
    assert len(said) == 1 and "no such host" in said[0] and "wandb sync" in said[0]


def test_a_wrong_setting_or_a_full_disk_is_no_reason_for_an_offline_run(tracked, monkeypatch, said):
    for error in (ValueError("project is too long"), OSError("no space left on device")):
        wandb_fake(monkeypatch, error)
        with pytest.raises(type(error), match=str(error)):
            trackers.WandbTracker(tracked())
    assert said == []


def test_tensorboard_has_scalars_and_texts_and_forgets_repeated_steps(tracked, tmp_path):
    pytest.importorskip("tensorboard")  # an optional dependency
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log_steps(trackers.TensorBoardTracker(tracked()), 1, 2, 3)
    log_steps(trackers.TensorBoardTracker(tracked(2)), 3, 4)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (key,) = METRICS
    assert [event.step for event in events.Scalars(key)] == [1, 2, 3, 4]
    (text,) = events.Tensors("train/generations/1/text_summary")[-1:]
    assert b"    1+1\n    =" in text.tensor_proto.string_val[0]


def test_mlflow_has_metrics_settings_and_samples(tracked, tmp_path, monkeypatch):
    pytest.importorskip("alembic")  # optional dependencies
    pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    log_steps(trackers.MLflowTracker(tracked()), 1, 2)
    log_steps(trackers.MLflowTracker(tracked(2)), 3)
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("p").experiment_id])
    history = client.get_metric_history(run.info.run_id, "val-core/sums/acc/mean_at_8")
    assert [(one.step, one.value) for one in history] == [(1, 0.5), (2, 0.5), (3, 0.5)]
    assert run.data.params["data.seed"] == "1" and run.data.params["k149"] == "149"
    assert (run.info.status, run.info.run_name) == ("FINISHED", "n")
    assert len(list(tmp_path.glob("mlflow/*/artifacts/train_generations/step_*.jsonl"))) == 2


def test_swanlab_offline_writes_files(tracked, tmp_path, monkeypatch, said):
    pytest.importorskip("swanlab")  # an optional dependency
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    log_steps(trackers.SwanLabTracker(tracked()), 1)
    (file,) = tmp_path.glob("swanlab/run-*/*.swanlab")
    assert b"val-core/sums" in file.read_bytes()
    assert "swanlab sync" in said[0]


def test_trackio_continues_its_run(tracked, tmp_path, monkeypatch):
    pytest.importorskip("trackio")  # an optional dependency
    from trackio import utils
    from trackio.sqlite_storage import SQLiteStorage

    folder = tmp_path / "trackio"
    for place in (utils, sys.modules["trackio.sqlite_storage"]):
        monkeypatch.setattr(place, "TRACKIO_DIR", folder)
    log_steps(trackers.TrackioTracker(tracked()), 1, 2)
    log_steps(trackers.TrackioTracker(tracked(2)), 3)
    name = (tmp_path / "trackers/trackio.id").read_text().strip()
    assert name.startswith("n-")
    logs = SQLiteStorage.get_logs("p", name)
    (key,) = METRICS
    assert [row["step"] for row in logs if key in row] == [1, 2, 3]


@pytest.fixture
def swanlab_fake(monkeypatch):
    """SwanLab 0.10.3: init takes keywords only and has no `experiment_name`."""
    fake = types.ModuleType("swanlab")
    fake.calls = []

    def init(
        *, log_dir=None, mode=None, project=None, name=None, id=None, resume=None, config=None
    ):
        fake.calls.append((mode, id))
        if mode is None and fake.fails:
            raise RuntimeError("Failed to initialize SwanLab in online mode")
        run = FakeRun(mode=mode or "online", url="https://s/run")
        fake.run = run
        return run

    fake.init = init
    fake.Text = lambda content, caption=None: content
    fake.fails = False
    monkeypatch.setitem(sys.modules, "swanlab", fake)
    monkeypatch.setenv("SWANLAB_API_KEY", "key")
    return fake


def test_swanlab_continues_its_run_and_shows_its_address(swanlab_fake, tracked, said):
    log_steps(trackers.SwanLabTracker(tracked()), 1)
    first = swanlab_fake.run
    trackers.SwanLabTracker(tracked(1))
    (_, new), (_, resumed) = swanlab_fake.calls
    assert new == resumed
    assert first.logged[0] == (1, METRICS)
    assert "1+1" in first.logged[1][1]["train/generations"][0]
    assert first.finished == 1
    assert said == ["swanlab: https://s/run"] * 2


def test_swanlab_without_a_network_goes_on_offline(swanlab_fake, tracked, said):
    swanlab_fake.fails = True
    trackers.SwanLabTracker(tracked())
    assert [mode for mode, _ in swanlab_fake.calls] == [None, "offline"]
    assert "Failed to initialize" in said[0] and "swanlab sync" in said[0]


@pytest.fixture
def trackio_fake(monkeypatch):
    """Trackio 0.43.0: resumed runs are found by name."""
    fake = types.ModuleType("trackio")
    fake.calls = []

    def init(project, name=None, config=None, resume="never", *, embed=True):
        fake.calls.append((project, name, resume, embed))
        fake.run = FakeRun()
        return fake.run

    fake.init = init
    fake.Table = lambda columns=None, data=None: (columns, data)
    monkeypatch.setitem(sys.modules, "trackio", fake)
    return fake


def test_trackio_gets_a_unique_name_steps_and_a_table(trackio_fake, tracked):
    log_steps(trackers.TrackioTracker(tracked()), 7)
    first = trackio_fake.run
    trackers.TrackioTracker(tracked(7))
    trackers.TrackioTracker(tracked())
    (_, new, *options), (_, resumed, *_), (_, other, *_) = trackio_fake.calls
    assert new == resumed != other and new.startswith("n-")
    assert options == ["allow", False]
    assert first.logged[0] == (7, METRICS)
    columns, rows = first.logged[1][1]["train/generations"]
    assert columns[:3] == ["step", "prompt", "response"] and rows[0][0] == 7
    assert all(len(row) == len(columns) for row in rows)
