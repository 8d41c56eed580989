"""Gradients that are added up before all rows of an optimizer step exist: the step is the same."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine import matrix, programs
from tests.engine.ranks import Ranks
from verlite.algorithms.aggregation import AGGREGATION_MODES
from verlite.engine.fsdp import TrainEngine
from verlite.spec.catalog import LOSSES

pytestmark = pytest.mark.process

PARTS = {
    "all at once": [[0, 1, 2, 3, 4, 5, 6, 7]],
    "one by one": [[3], [7], [0], [4], [2], [1], [6], [5]],
    "some": [[6, 7, 1], [4], [2, 0, 3, 5]],
}
"""Row 4 has no trainable token: a part without a pass."""
SPLITS: tuple[dict[str, int], ...] = ({"size": 2}, {"max_tokens": 24})
TOLERANCE = 2e-6
"""Relative, of float32 sums in another order, of which 1.1e-6 was seen. Its eps is 6e-8."""


def cases(given: dict[str, Tensor]) -> list[dict[str, Any]]:
    """Every loss, aggregation, split and sequence of parts."""
    losses = [name for name, entry in LOSSES.items() if entry.selector is None]
    found = [
        {"loss": loss, "mode": mode, "columns": given, "parts": PARTS["some"], "size": 3}
        for loss in losses
        for mode in AGGREGATION_MODES
    ]
    return found + [
        {"loss": "vanilla", "mode": mode, "columns": given, "parts": parts, **split}
        for mode in AGGREGATION_MODES
        for parts in PARTS.values()
        for split in SPLITS
    ]


@pytest.fixture(scope="module")
def columns(tiny_qwen2: str) -> dict[str, Tensor]:
    given = matrix.columns(tiny_qwen2)
    return given | {"rollout_log_probs": given["old_log_probs"]}


def check(cases: list[dict[str, Any]], results: list[Any]) -> None:
    assert len(cases) == len(results)
    for case, ((metrics, expected), (own_metrics, own)) in zip(cases, results, strict=True):
        name = {key: value for key, value in case.items() if key != "columns"}
        assert matrix.difference(own, expected) < TOLERANCE, name
        assert own_metrics.keys() == metrics.keys(), name
        metrics, own_metrics = map(matrix.comparable, (metrics, own_metrics))
        assert own_metrics == pytest.approx(metrics, rel=2e-5, abs=1e-7), name
        assert metrics["grad_norm"] > 0


def test_the_step_is_that_of_all_rows_at_once(tiny_qwen2: str, columns: dict[str, Tensor]) -> None:
    found = cases(columns)
    check(found, programs.accumulated_gradients(tiny_qwen2, found))


def test_the_step_on_two_ranks_is_that_of_all_rows_at_once(
    tiny_qwen2: str, columns: dict[str, Tensor], two_ranks: Ranks
) -> None:
    """Each part is spread over the ranks by itself, and one has no row of some."""
    found = cases(columns)
    first, second = two_ranks.call(programs.accumulated_gradients, tiny_qwen2, found)
    check(found, first)
    for one, other in zip(first, second, strict=True):
        assert one[1][0] == other[1][0]
        assert all(torch.equal(one[1][1][name], other[1][1][name]) for name in one[1][1])


@pytest.mark.parametrize(
    "settings",
    [{"use_remove_padding": False}, {"reshard_after_forward": False}, {"sequence_parallel": 2}],
    ids=lambda s: next(iter(s)),
)
def test_engine_options(
    tiny_qwen2: str, columns: dict[str, Tensor], two_ranks: Ranks, settings: dict[str, Any]
) -> None:
    found = cases(columns)[-4:]
    (results, _) = two_ranks.call(programs.accumulated_gradients_with, tiny_qwen2, found, settings)
    check(found, results)


def test_parameters_stay_on_the_device_with_their_gradients(
    tiny_qwen2: str, columns: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test treats this CPU as a device with its own memory. The calls of a step's other passes
    would take the parameters away between `accumulate` and `update`."""
    moves: list[Any] = []
    monkeypatch.setattr("verlite.engine.fsdp.has_own_memory", lambda device: True)
    monkeypatch.setattr(
        TrainEngine, "_replace_parameters", lambda subject, move: moves.append(move)
    )
    case = cases(columns)[-1]
    settings = {"param_offload": True, "optimizer_offload": True}
    check([case], programs.accumulated_gradients_with(tiny_qwen2, [case], settings))
    assert moves == []


def test_gradients_of_a_step_that_was_given_up_are_gone(
    tiny_qwen2: str, columns: dict[str, Tensor]
) -> None:
    found = programs.interrupted_accumulation(tiny_qwen2, columns)
    first, second = found["undisturbed"], found["given up"]
    assert all(first[name].equal(second[name]) for name in first)
    assert found["error"] == (
        "gradients of 1 tokens in 1 rows were accumulated, but the optimizer step has 34 in 7"
    )


def test_a_workers_step_of_several_mini_batches_is_the_same(
    tiny_qwen2: str, columns: dict[str, Tensor], two_ranks: Ranks
) -> None:
    """Only rows of the first mini-batch (0, 2, 4 and 6) are accumulated; the others come after its
    optimizer step. A rejected token is in no denominator."""
    parts = [[6], [0, 4], [2]]
    alone = programs.worker_updates(tiny_qwen2, columns, parts)
    ranks = two_ranks.call(programs.worker_updates, tiny_qwen2, columns, parts)
    for (metrics, expected), (own_metrics, own) in (alone, ranks[0], ranks[1]):
        assert matrix.difference(own, expected) < TOLERANCE
        assert matrix.comparable(own_metrics) == pytest.approx(
            matrix.comparable(metrics), rel=2e-5, abs=1e-7
        )
    begin = programs.initial_weights(tiny_qwen2)
    assert matrix.difference(alone[0][1], begin) > 1e3 * TOLERANCE, "an update must be seen"
