"""Rows of a step are fetched and padded once per worker, whatever number of calls use them."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.protocol.test_ragged import ROWS, thin
from tests.trainer.test_stages import local_actor
from verlite.protocol.data import DataProto
from verlite.spec.roles import Micro, Updates
from verlite.workers import training
from verlite.workers.critic import CriticWorker
from verlite.workers.training import StepRows

LENGTHS = (3, 1)


def floats() -> list[np.ndarray]:
    return [np.full(length, -0.5, dtype=np.float32) for length in LENGTHS]


def a_step(step: int, *columns: str) -> DataProto:
    """Return the two rows of ROWS with these columns, as the driver sends them."""
    batch = thin(ROWS, **{name: floats() for name in columns if name != "loss_mask"})
    if "loss_mask" in columns:
        mask = batch.non_tensor_batch["response_mask"]
        batch = batch.with_non_tensor(loss_mask=mask)
        batch = batch.with_batch(trained_tokens=batch.batch["sampled_tokens"])
    index = torch.zeros(2, 1, dtype=torch.int64)
    batch = batch.with_batch(mini_batch_index=index, critic_mini_batch_index=index)
    return batch.with_meta(step=step, updates=1)


@pytest.fixture
def padded_columns(monkeypatch) -> Counter:
    """Return how often each column was padded."""
    counts: Counter = Counter()
    pad_columns = training.pad_columns

    def counting(batch):
        counts.update(batch.non_tensor_batch.keys())
        return pad_columns(batch)

    monkeypatch.setattr(training, "pad_columns", counting)
    return counts


def with_engine(worker):
    zeros = torch.zeros(2, 3)
    worker.engine = SimpleNamespace(
        onload=lambda **_: None,
        offload=lambda: None,
        step_schedule=lambda: None,
        forward=lambda *_, **__: {"log_probs": zeros, "entropy": zeros, "values": zeros},
        update=lambda *_, **__: {"loss": 1.0},
    )
    micro = Micro(1, None)
    updates = Updates(2, 2, 1, 1, micro, False, "token-mean")
    worker.spec = SimpleNamespace(
        run_dir="run",
        temperature=1.0,
        log_probs=SimpleNamespace(micro=micro, needs_sum_pi_squared=False),
        micro=micro,
        updates=updates,
        loss=SimpleNamespace(entropy_coeff=0.0, use_kl_loss=False),
        calculate_entropy=False,
        loss_scale=1.0,
        cliprange_value=0.5,
    )
    worker.rank_rows = StepRows()
    worker._objective = None  # the engine above does not call it
    worker._spec = SimpleNamespace(device_kind="cpu")
    return worker


def test_an_actor_pads_each_column_once_per_step(padded_columns):
    worker = with_engine(local_actor(None, None))
    for step in (1, 2):
        worker.log_probs(a_step(step, "rollout_log_probs"))
        worker.update(a_step(step, "loss_mask", "rollout_log_probs", "old_log_probs", "advantages"))
        assert set(padded_columns.values()) == {step}
    assert {"prompt_ids", "response_ids", "response_mask", "loss_mask"} < set(padded_columns)


def test_a_critic_pads_each_column_once_per_step(padded_columns):
    worker = with_engine(CriticWorker.__new__(CriticWorker))
    worker.values(a_step(1))
    worker.update(a_step(1, "loss_mask", "values", "returns"))
    assert set(padded_columns.values()) == {1}


def test_a_call_gets_only_the_columns_that_it_names():
    rows = StepRows()
    rows.padded(a_step(1, "old_log_probs"))
    assert "old_log_probs" not in rows.padded(a_step(1)).batch.keys()


def test_rows_of_another_step_are_padded_again():
    rows = StepRows()
    rows.padded(a_step(1))
    other = thin(ROWS[::-1]).with_meta(step=2)
    assert rows.padded(other).batch["responses"].tolist() == [[12, 0, 0], [10, 0, 11]]


def test_other_rows_in_the_same_step_are_an_error():
    rows = StepRows()
    rows.padded(a_step(1))
    with pytest.raises(ValueError, match="these are another row's tokens"):
        rows.padded(thin(ROWS[::-1]).with_meta(step=1))
