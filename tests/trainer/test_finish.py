"""Validation, saves and the sequence of steps. The stages are stubs."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.trainer.test_stages import Screen, rewarded_batch
from verlite.config.schema import Config, DataConfig
from verlite.controller.stop import Stop
from verlite.files import RetryingWriter
from verlite.trainer import checkpoints, finish
from verlite.trainer.errors import StepAborted
from verlite.trainer.run import Run, StepState
from verlite.trainer.time_limit import TimeLimit


def fake_run(tmp_path, resumed_step=0, **fields) -> Run:
    values = dict.fromkeys(Run.__dataclass_fields__)
    values |= {
        "config": Config(data=DataConfig(train_files="x")),
        "total_steps": 5,
        "run_dir": tmp_path,
        "display": Screen(),
        "val_data": object(),
        "plan": SimpleNamespace(
            n_devices=1,
            validates_first=True,
            placement={"actor": [0, 1]},
            longest_prompt=7,
            longest_response=9,
        ),
        "stop": SimpleNamespace(requested=None, checkpoint=lambda: "Last checkpoint: step 2."),
        "limit": TimeLimit(None),
        "sampler": SimpleNamespace(epoch=0, state_dict=dict),
        "tracking": SimpleNamespace(
            log=lambda step, metrics: None, samples=lambda step, kind, records: None
        ),
        "writer": RetryingWriter(pytest.fail),
        "advantage": None,
        "workers": {},
        "current": StepState(number=resumed_step),
        "version": 0,
        "resumed_step": resumed_step,
        "saved_step": 0,
        "failed_saves": checkpoints.FailedSaves(),
        "finished_step": 0,
        "can_abort": False,
    }
    run = Run(**(values | fields))
    run.display.step = lambda step, metrics: None
    return run


@pytest.fixture
def events(monkeypatch):
    """Record (name, step) of every validation and save."""
    events = []
    monkeypatch.setattr(finish, "validate", lambda run: events.append(("validate", run.step)) or {})
    monkeypatch.setattr(finish, "save", lambda run: events.append(("save", run.step)))
    monkeypatch.setattr(finish, "keep_samples", lambda run, batch: None)
    monkeypatch.setattr(
        finish,
        "batch_metrics",
        lambda batch, *longest: {"perf/total_num_tokens": 1.0, "longest": longest},
    )
    return events


def finish_all_steps(run, stop_at=None):
    for step in run.steps():
        assert not run.metrics, "a step starts with the metrics of the previous one"
        run.stop.requested = "SIGTERM" if step == stop_at else None
        batch = rewarded_batch()
        trained = batch.batch["sampled_tokens"]
        finish.finish_step(run, batch.with_batch(trained_tokens=trained))


def test_validation_and_saves_follow_their_frequencies_and_the_last_step(tmp_path, events):
    run = fake_run(tmp_path)
    run.config.trainer.test_freq = 2
    run.config.trainer.save_freq = 3
    finish_all_steps(run)
    assert events == [("validate", 2), ("save", 3), ("validate", 4), ("validate", 5), ("save", 5)]
    assert run.metrics["longest"] == (7, 9), "length metrics use the plan's limits"


def test_negative_frequencies_never_validate_or_save(tmp_path, events):
    run = fake_run(tmp_path)
    run.config.trainer.test_freq = -1
    run.config.trainer.save_freq = -1
    finish_all_steps(run)
    assert events == []


def test_a_stop_request_ends_the_run_after_the_step_and_saves(tmp_path, events):
    run = fake_run(tmp_path)
    run.config.trainer.test_freq = -1
    run.config.trainer.save_freq = -1
    finish_all_steps(run, stop_at=2)
    assert run.step == 2
    assert events == [("save", 2)]


@pytest.mark.parametrize(
    ("resumed", "only", "validates", "trains"),
    [(0, False, True, True), (3, False, False, True), (3, True, True, False)],
)
def test_validation_before_training_is_skipped_on_resume(
    tmp_path, events, resumed, only, validates, trains
):
    run = fake_run(tmp_path, resumed_step=resumed)
    run.config.trainer.val_only = only
    assert finish.start_with_validation(run) == trains
    assert events == [("validate", resumed)] * validates


def test_a_stop_waits_only_for_finished_steps_without_a_checkpoint(tmp_path, events, monkeypatch):
    """What `must_save` says at the start of each step, before its end, and after its save."""
    seen = []
    run = fake_run(tmp_path, resumed_step=2)
    run.config.trainer.test_freq = -1
    run.config.trainer.save_freq = 2

    def save(run):
        seen.append(("save", run.step, run.must_save))
        run.saved_step = run.step

    monkeypatch.setattr(finish, "save", save)
    batch = rewarded_batch()
    batch = batch.with_batch(trained_tokens=batch.batch["sampled_tokens"])
    for step in run.steps():
        seen.append(("start", step, run.must_save))
        finish.finish_step(run, batch)
    seen.append(("end", run.step, run.must_save))
    assert seen == [
        ("start", 3, False),
        ("start", 4, True),
        ("save", 4, True),
        ("start", 5, False),
        ("save", 5, True),
        ("end", 5, False),
    ]


def stoppable(run, monkeypatch):
    """Record the rollout workers that end when a worker call is given up."""
    ended = []
    engines = SimpleNamespace(workers=["engine"], supervisor=SimpleNamespace(stop=ended.append))
    run.workers["rollout"] = engines
    monkeypatch.setattr("verlite.trainer.run.group", lambda workers: workers)
    return ended


def test_a_step_is_given_up_only_before_its_first_update(tmp_path, monkeypatch):
    run = fake_run(tmp_path)
    ended = stoppable(run, monkeypatch)
    next(run.steps())
    run.obey_stop()
    run.stop.requested = "SIGTERM"
    with pytest.raises(StepAborted):
        run.obey_stop()
    assert ended == [["engine"]]
    run.can_abort = True
    with pytest.raises(StepAborted):
        run.begin_update()
    run.stop.requested = None
    run.can_abort = True
    run.begin_update()
    run.stop.requested = "SIGTERM"
    run.obey_stop()
    run.begin_update()
    assert ended == [["engine"]] * 2


def test_a_stop_during_validation_saves_the_step_without_its_result(tmp_path, events, monkeypatch):
    run = fake_run(tmp_path)
    ended = stoppable(run, monkeypatch)
    run.config.trainer.test_freq = 1
    run.config.trainer.save_freq = -1

    def validate(run):
        run.stop.requested = "SIGTERM"
        run.obey_stop()  # as a wait for workers does

    monkeypatch.setattr(finish, "validate", validate)
    monkeypatch.setattr(finish, "straggler_metrics", lambda run: {})  # its workers are not real
    batch = rewarded_batch()
    batch = batch.with_batch(trained_tokens=batch.batch["sampled_tokens"])
    for _ in run.steps():
        finish.finish_step(run, batch)
    assert events == [("save", 1)]
    assert ended == [["engine"]]
    assert run.display == ["SIGTERM: the validation of step 1 was given up"]


def test_first_step_is_the_first_of_the_process(tmp_path):
    run = fake_run(tmp_path, resumed_step=3)
    steps = [(step, run.first_step, run.last_step) for step in run.steps()]
    assert steps == [(4, True, False), (5, False, True)]


def test_a_run_ends_before_a_step_that_does_not_fit_into_its_wall_time(tmp_path):
    asked = []
    run = fake_run(tmp_path, stop=Stop())
    run.stop.must_save = lambda: True
    run.stop.on_defer = asked.append
    run.config.trainer.max_runtime = "1h"
    done = []
    for step in run.steps():
        done.append(step)
        run.limit.observe({"timing_s/step": 100.0, "timing_s/save_checkpoint": 1.0})
        run.limit.deadline = time.time() + (1000.0 if step < 2 else 150.0)
    assert done == [1, 2]
    assert asked == ["trainer.max_runtime=1h"]
    assert run.stop.exit_code == 75


def test_undo_step_restores_number_metrics_and_sampler(tmp_path):
    loaded = []
    positions = iter([{"position": 0}, {"position": 8}])
    sampler = SimpleNamespace(state_dict=lambda: next(positions), load_state_dict=loaded.append)
    run = fake_run(tmp_path, sampler=sampler)
    steps = run.steps()
    next(steps)
    run.metrics["loss"] = 1.0
    next(steps)
    run.metrics["loss"] = 2.0
    run.undo_step()
    assert run.step == 1
    assert run.metrics == {"loss": 1.0}
    assert loaded == [{"position": 8}]


class Workers:
    """A worker group that saves files, or returns an error."""

    def __init__(self, ranks, errors=()):
        self.ranks = ranks
        self.errors = iter(errors)

    def save(self, folder):
        Path(folder).mkdir()
        for rank in range(self.ranks):
            (Path(folder) / f"rng_rank_{rank}.json").touch()
        return [None, next(self.errors, None)]


def test_saves_may_fail_a_few_times_in_a_row(tmp_path, monkeypatch):
    workers = Workers(2, ["full", "full", None, "full", "full", "full", "full"])
    run = fake_run(tmp_path, workers={"actor": workers})
    monkeypatch.setattr(Run, "state", lambda run: {})
    run.config.trainer.max_failed_saves = 3
    clock = iter([0.0, 1000.0, 2000.0, 2001.0, 2119.9, 2120.0])
    monkeypatch.setattr(checkpoints, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    for run.current.number in range(1, 7):
        finish.save(run)
    assert (run.saved_step, run.failed_saves.count, len(run.display)) == (3, 3, 5)
    assert "trainer.max_failed_saves=3, but not within 120 s of the first" in run.display[-1]
    with pytest.raises(checkpoints.CheckpointError, match="full"):
        finish.save(run)


def test_a_save_fails_if_the_driver_does_not_see_all_files(tmp_path, monkeypatch):
    run = fake_run(tmp_path, workers={"actor": Workers(1)})
    monkeypatch.setattr(Run, "state", lambda run: {})
    run.current.number = 1
    finish.save(run)
    assert "2 ranks of the actor wrote" in run.display[0]
    assert "sees the files of 1" in run.display[0]
    assert run.saved_step == 0


def test_only_roles_that_train_are_saved(tmp_path):
    run = fake_run(tmp_path, workers={"actor": 1, "critic": 2, "ref": 3, "rollout": 4})
    assert run.saved_workers == {"actor": 1, "critic": 2}
    assert run.reference == 3
