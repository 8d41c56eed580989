"""What the training roles share: metrics over mini-batches, and saves that the disk refuses."""

from types import SimpleNamespace

import pytest
import torch

from verlite.config.plan import Micro, Updates
from verlite.config.schema import Config, DataConfig
from verlite.protocol.data import DataProto
from verlite.workers.training import TrainingWorker


def worker(engine) -> TrainingWorker:
    made = TrainingWorker.__new__(TrainingWorker)
    made.config, made.engine, made._seat = Config(data=DataConfig(train_files="x")), engine, SimpleNamespace(device_kind="cpu")
    return made


def updated(steps: list[dict[str, float]]) -> dict[str, float]:
    answers = iter(steps)
    engine = SimpleNamespace(
        onload=lambda **_: None, offload=lambda: None, step_schedule=lambda: None, update=lambda *args, **options: next(answers)
    )
    numbers = torch.arange(len(steps))[:, None]
    batch = DataProto.from_dict({"mini_batch": numbers}).with_meta(updates=len(steps), step=3)
    metrics = worker(engine).update_in_mini_batches("actor", batch, Updates(1, len(steps), 1, 1, Micro(1, None), False, "token-mean"), None)
    return {key: value for key, value in metrics.items() if "/perf/" not in key}


@pytest.mark.parametrize("dead", [0, 1, None])
def test_a_mini_batch_without_votes_hides_no_metric_of_the_others(dead):
    steps = [{"loss": 1.0, "actor/pg_loss": 1.0, "lr": 0.1}, {"loss": 3.0, "actor/pg_loss": 3.0, "lr": 0.3}]
    if dead is not None:
        steps[dead] = {"lr": steps[dead]["lr"]}
    mean = {0: 3.0, 1: 1.0, None: 2.0}[dead]
    assert updated(steps) == pytest.approx({"actor/loss": mean, "actor/pg_loss": mean, "actor/lr": 0.2})


def test_what_the_disk_refuses_is_told_and_everything_else_is_raised():
    def full(folder):
        raise OSError(f"cannot write {folder}: no space left")

    def broken(folder):
        raise ZeroDivisionError

    assert worker(SimpleNamespace(save=full)).save("here") == "cannot write here: no space left"
    assert worker(SimpleNamespace(save=lambda folder: None)).save("here") is None
    with pytest.raises(ZeroDivisionError):
        worker(SimpleNamespace(save=broken)).save("here")
