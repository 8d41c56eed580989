"""When a run validates and saves, and what it forgets between steps; the stages themselves are made up."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.trainer.test_stages import Screen, a_batch
from verlite.config.schema import Config, DataConfig
from verlite.trainer import checkpoints, finish
from verlite.trainer.metrics import Stopwatch
from verlite.trainer.run import Run


def a_run(tmp_path, **fields) -> Run:
    made = dict.fromkeys(Run.__dataclass_fields__) | {
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
        "stop": SimpleNamespace(requested=False),
        "sampler": SimpleNamespace(epoch=0, state_dict=dict),
        "tracking": SimpleNamespace(log=lambda step, metrics: None),
        "step": 0,
        "version": 0,
        "resumed_step": 0,
        "saved_step": 0,
        "failed_saves": 0,
        "metrics": {},
        "stopwatch": Stopwatch(),
    }
    run = Run(**(made | fields))
    run.display.step = lambda step, metrics: None
    return run


@pytest.fixture
def done(monkeypatch):
    """(what, step) of every validation and save."""
    happened = []
    monkeypatch.setattr(
        finish, "validate", lambda run: happened.append(("validate", run.step)) or {}
    )
    monkeypatch.setattr(finish, "save", lambda run: happened.append(("save", run.step)))
    monkeypatch.setattr(finish, "keep_samples", lambda run, batch: None)
    monkeypatch.setattr(
        finish,
        "batch_metrics",
        lambda batch, *longest: {"perf/total_num_tokens": 1.0, "longest": longest},
    )
    return happened


def finished(run, until=99):
    for step in run.steps():
        assert not run.metrics, "a step begins with the metrics of the one before"
        run.stop.requested = step == until
        finish.finish_step(run, a_batch())


def test_validation_and_saves_come_every_few_steps_and_at_the_end(tmp_path, done):
    run = a_run(tmp_path)
    run.config.trainer.test_freq, run.config.trainer.save_freq = 2, 3
    finished(run)
    assert done == [("validate", 2), ("save", 3), ("validate", 4), ("validate", 5), ("save", 5)]
    assert run.metrics["longest"] == (7, 9), (
        "lengths are compared with those of whole samples, turns and all"
    )


def test_never_is_never_also_at_the_end(tmp_path, done):
    run = a_run(tmp_path)
    run.config.trainer.test_freq = run.config.trainer.save_freq = -1
    finished(run)
    assert done == []


def test_a_stop_ends_the_run_with_this_step_and_saves_it_always(tmp_path, done):
    run = a_run(tmp_path)
    run.config.trainer.test_freq = run.config.trainer.save_freq = -1
    finished(run, until=2)
    assert (run.step, done) == (2, [("save", 2)])


@pytest.mark.parametrize(
    ("resumed", "only", "validates", "trains"),
    [(0, False, True, True), (3, False, False, True), (3, True, True, False)],
)
def test_a_run_begins_with_validation_unless_it_goes_on(
    tmp_path, done, resumed, only, validates, trains
):
    run = a_run(tmp_path, resumed_step=resumed, step=resumed)
    run.config.trainer.val_only = only
    assert finish.start_with_validation(run) == trains
    assert done == [("validate", resumed)] * validates


def test_the_first_step_of_a_process_is_first_also_when_resumed(tmp_path):
    run = a_run(tmp_path, resumed_step=3, step=3)
    assert [(step, run.first_step, run.last_step) for step in run.steps()] == [
        (4, True, False),
        (5, False, True),
    ]


class Role:
    """Workers that save, or say why not."""

    def __init__(self, ranks, refusals=()):
        self.ranks, self.refusals = ranks, iter(refusals)

    def save(self, folder):
        Path(folder).mkdir()
        for rank in range(self.ranks):
            (Path(folder) / f"rng_rank_{rank}.json").touch()
        return [None, next(self.refusals, None)]


def test_saves_may_fail_a_few_times_in_a_row(tmp_path, monkeypatch):
    run = a_run(tmp_path, actor=Role(2, ["full", "full", None, "full", "full", "full"]))
    monkeypatch.setattr(Run, "state", lambda run: {})
    run.config.trainer.max_failed_saves = 3
    for run.step in range(1, 6):
        finish.save(run)
    assert (run.saved_step, run.failed_saves, len(run.display)) == (3, 2, 4)
    with pytest.raises(checkpoints.CheckpointError, match="full"):
        finish.save(run)


def test_files_that_the_driver_does_not_see_are_missed(tmp_path, monkeypatch):
    run = a_run(tmp_path, actor=Role(1))
    monkeypatch.setattr(Run, "state", lambda run: {})
    run.step = 1
    finish.save(run)
    assert (
        "2 ranks of the actor wrote" in run.display[0]
        and "sees the files of 1" in run.display[0]
        and run.saved_step == 0
    )
