"""The learning rate, from its formula and through an engine."""

import math

import pytest

from tests.engine import programs
from tests.engine.batches import engine, ragged_batch
from verlite.engine.micro import MicroBatching
from verlite.engine.optim import learning_rate
from verlite.spec.roles import OptimSpec


def rates(total: int = 10, **settings: object) -> list[float]:
    return [learning_rate(OptimSpec(lr=2.0, **settings), step, total) for step in range(total)]


def test_constant_learning_rate() -> None:
    assert rates() == [2.0] * 10
    assert rates(lr_warmup_steps=0, lr_warmup_steps_ratio=0.5) == [2.0] * 10, (
        "steps win over the ratio, 0 included"
    )


def test_warmup_reaches_the_peak_and_starts_above_zero() -> None:
    assert rates(lr_warmup_steps=4) == [0.5, 1.0, 1.5] + [2.0] * 7
    assert rates(lr_warmup_steps_ratio=0.4) == rates(lr_warmup_steps=4)


def test_cosine_learning_rate() -> None:
    actual = rates(lr_warmup_steps=2, lr_scheduler_type="cosine", min_lr_ratio=0.1)
    assert actual == pytest.approx(
        [1.0, 2.0, *[0.2 + 1.8 * (1 + math.cos(math.pi * k / 8)) / 2 for k in range(8)]]
    )
    assert learning_rate(
        OptimSpec(lr=2.0, lr_scheduler_type="cosine", min_lr_ratio=0.1), 99, 10
    ) == pytest.approx(0.2)
    assert rates(lr_scheduler_type="cosine", num_cycles=1.0)[5] == pytest.approx(0, abs=1e-12)


def test_linear_learning_rate() -> None:
    actual = rates(lr_warmup_steps=2, lr_scheduler_type="linear")
    assert actual == pytest.approx([1.0, 2.0, *[2 - 2 * k / 8 for k in range(8)]])
    floored = OptimSpec(lr=2.0, lr_scheduler_type="linear", min_lr_ratio=0.1)
    assert learning_rate(floored, 5, 10) == pytest.approx(1.1)  # half way from 2 to 0.2
    assert learning_rate(floored, 99, 10) == pytest.approx(0.2)


def test_schedules_that_need_total_steps_raise() -> None:
    with pytest.raises(
        ValueError, match="lr_scheduler_type=cosine needs the number of training steps"
    ):
        learning_rate(OptimSpec(lr_scheduler_type="cosine"), 3, None)
    with pytest.raises(ValueError, match="'step' must be constant, cosine or linear"):
        learning_rate(OptimSpec(lr_scheduler_type="step"), 3, 10)


def test_schedule_advances_per_training_step(tiny_qwen2: str) -> None:
    subject = engine(tiny_qwen2, train=True, lr=2.0, lr_warmup_steps=4)
    seen = []
    for updates in (2, 0, 1, 3):  # a step without an update (the critic's warm-up) does not count
        for _ in range(updates):
            seen.append(
                subject.update(
                    ragged_batch()[[0]],
                    MicroBatching(size=1),
                    1.0,
                    programs.weighted_loss("token-mean"),
                )["lr"]
            )
        subject.step_schedule()
    assert seen == [0.5, 0.5, 1.0, 1.5, 1.5, 1.5]
