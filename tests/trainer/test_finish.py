"""Validation, saves and the sequence of steps. The stages are stubs."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.trainer.test_stages import Screen, rewarded_batch
from verlite.config.schema import Config, DataConfig
from verlite.control.commands import Do
from verlite.control.machine import Machine
from verlite.files import RetryingWriter
from verlite.trainer import checkpoints, finish
from verlite.trainer import stop as stop_module
from verlite.trainer.errors import StepAborted
from verlite.trainer.run import Run, StepState
from verlite.trainer.stop import Stop


def fake_run(tmp_path, resumed_step=0, saved_step=0, trainer=None, **fields) -> Run:
    """Return a run that begins after `resumed_step`. trainer: settings that are not the default."""
    config = Config(data=DataConfig(train_files="x"))
    vars(config.trainer).update(trainer or {})
    values = dict.fromkeys(Run.__dataclass_fields__)
    values |= {
        "config": config,
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
        "stop": Stop(embedded=True),
        "sampler": SimpleNamespace(epoch=0, state_dict=dict),
        "tracking": SimpleNamespace(
            log=lambda step, metrics: None, samples=lambda step, kind, records: None
        ),
        "writer": RetryingWriter(pytest.fail),
        "advantage": None,
        "workers": {},
        "current": StepState(number=resumed_step),
        "version": 0,
    }
    run = Run(**(values | fields))
    run.stop.checkpoint = lambda: "Last checkpoint: step 2."
    run.display.step = lambda step, metrics: None
    run.begin(saved_step)
    return run


@pytest.fixture
def events(monkeypatch):
    """Record (name, step) of every validation and save."""
    events = []
    monkeypatch.setattr(finish, "validate", lambda run: events.append(("validate", run.step)) or {})
    monkeypatch.setattr(
        finish, "save", lambda run: events.append(("save", run.step)) or run.tell(Machine.saved)
    )
    monkeypatch.setattr(finish, "keep_samples", lambda run, batch: None)
    monkeypatch.setattr(
        finish,
        "batch_metrics",
        lambda batch, *given: {"perf/total_num_tokens": 1.0, "longest": given[:2]},
    )
    return events


def finish_all_steps(run, stop_at=None):
    for step in run.steps():
        assert not run.metrics, "a step starts with the metrics of the previous one"
        run.tell(Machine.update_begins)
        if step == stop_at:
            run.stop.tell(Machine.asked, "SIGTERM")
        batch = rewarded_batch()
        trained = batch.batch["sampled_tokens"]
        finish.finish_step(run, batch.with_batch(trained_tokens=trained))


def test_validation_and_saves_follow_their_frequencies_and_the_last_step(tmp_path, events):
    run = fake_run(tmp_path, trainer={"test_freq": 2, "save_freq": 3})
    finish_all_steps(run)
    assert events == [("validate", 2), ("save", 3), ("validate", 4), ("validate", 5), ("save", 5)]
    assert run.metrics["longest"] == (7, 9), "length metrics use the plan's limits"


def test_negative_frequencies_never_validate_or_save(tmp_path, events):
    run = fake_run(tmp_path, trainer={"test_freq": -1, "save_freq": -1})
    finish_all_steps(run)
    assert events == []


def test_a_stop_request_ends_the_run_after_the_step_and_saves(tmp_path, events):
    run = fake_run(tmp_path, trainer={"test_freq": -1, "save_freq": -1})
    finish_all_steps(run, stop_at=2)
    assert run.step == 2
    assert events == [("save", 2)]
    assert run.display == ["SIGTERM: the run finishes step 2, saves it, and stops"]


@pytest.mark.parametrize(
    ("resumed", "only", "validates", "trains"),
    [(0, False, True, True), (3, False, False, True), (3, True, True, False)],
)
def test_validation_before_training_is_skipped_on_resume(
    tmp_path, events, resumed, only, validates, trains
):
    run = fake_run(tmp_path, resumed_step=resumed, trainer={"val_only": only})
    finish.validate_first(run)
    assert events == [("validate", resumed)] * validates
    assert list(run.steps()) == ([*range(resumed + 1, 6)] if trains else [])


def stoppable(run, monkeypatch):
    """Record the rollout workers that end when a worker call is given up."""
    ended = []
    engines = SimpleNamespace(workers=["engine"], supervisor=SimpleNamespace(stop=ended.append))
    run.workers["rollout"] = engines
    monkeypatch.setattr("verlite.trainer.run.group", lambda workers: workers)
    return ended


def test_a_step_is_given_up_only_before_its_first_update(tmp_path, events, monkeypatch):
    run = fake_run(tmp_path, trainer={"save_freq": -1, "test_freq": -1})
    ended = stoppable(run, monkeypatch)
    monkeypatch.setattr(finish, "straggler_metrics", lambda run: {})
    steps = run.steps()
    next(steps)
    run.tell(Machine.polled)
    run.tell(Machine.update_begins)
    batch = rewarded_batch()
    batch = batch.with_batch(trained_tokens=batch.batch["sampled_tokens"])
    finish.finish_step(run, batch)
    next(steps)
    run.stop.tell(Machine.asked, "SIGTERM")
    with pytest.raises(StepAborted):
        run.tell(Machine.update_begins)
    assert ended == [["engine"]]


def test_a_stop_during_validation_saves_the_step_without_its_result(tmp_path, events, monkeypatch):
    run = fake_run(tmp_path, trainer={"save_freq": -1, "test_freq": 1})
    ended = stoppable(run, monkeypatch)
    looks = []
    run.groups = SimpleNamespace(look=looks.append)

    def validate(run):
        assert looks == [run.rollout]
        run.stop.tell(Machine.asked, "SIGTERM")
        run.tell(Machine.polled)  # as a wait for workers does

    monkeypatch.setattr(finish, "validate", validate)
    monkeypatch.setattr(finish, "straggler_metrics", lambda run: {})  # its workers are not real
    finish_all_steps(run)
    assert events == [("save", 1)]
    assert ended == [["engine"]]
    assert run.display[1:] == ["SIGTERM: the validation of step 1 was given up"]


def test_first_step_is_the_first_of_the_process(tmp_path):
    run = fake_run(tmp_path, resumed_step=3)
    steps = [(step, run.first_step) for step in run.steps()]
    assert steps == [(4, True), (5, False)]


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


def save_next_step(run):
    """Take a step whose checkpoint is due."""
    next(run.steps())
    run.tell(Machine.step_finished)
    assert run.tell(Machine.step_measured) is Do.SAVE
    finish.save(run)
    run.tell(Machine.step_ends, 1.0)


EVERY_STEP = {"save_freq": 1, "test_freq": -1}


def test_saves_may_fail_a_few_times_in_a_row(tmp_path, monkeypatch):
    workers = Workers(2, ["full", "full", None, "full", "full", "full", "full"])
    settings = EVERY_STEP | {"max_failed_saves": 3}
    run = fake_run(tmp_path, workers={"actor": workers}, trainer=settings, total_steps=9)
    monkeypatch.setattr(Run, "state", lambda run: {})
    now = [0.0]
    monkeypatch.setattr(stop_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    for now[0] in (0.0, 1000.0, 1500.0, 2000.0, 2001.0, 2119.9):
        save_next_step(run)
    assert (run.stop.machine.saved_step, len(run.display)) == (3, 5)
    assert "trainer.max_failed_saves=3, but not within 120 s of the first" in run.display[-1]
    now[0] = 2120.0
    with pytest.raises(checkpoints.CheckpointError, match="full"):
        save_next_step(run)


def test_a_save_fails_if_the_driver_does_not_see_all_files(tmp_path, monkeypatch):
    run = fake_run(tmp_path, workers={"actor": Workers(1)}, trainer=EVERY_STEP)
    monkeypatch.setattr(Run, "state", lambda run: {})
    save_next_step(run)
    assert "2 ranks of the actor wrote" in run.display[0]
    assert "sees the files of 1" in run.display[0]
    assert run.stop.machine.saved_step == 0


def test_only_roles_that_train_are_saved(tmp_path):
    saved = []
    workers = {
        role: SimpleNamespace(save=lambda folder: saved.append(Path(folder).name) or [])
        for role in ("actor", "critic", "ref", "rollout")
    }
    run = fake_run(tmp_path, workers=workers)
    run.plan.placement = dict.fromkeys(workers, [])
    finish.save_workers(run, tmp_path)
    assert saved == ["actor", "critic"]
