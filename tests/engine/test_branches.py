"""Samples whose conversations branch: their gradient is that of every request, once."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine import graphs, matrix
from tests.engine.ranks import Ranks
from verlite.algorithms.aggregation import AGGREGATION_MODES
from verlite.spec.roles import Micro
from verlite.workers.actor import ActorWorker
from verlite.workers.training import StepRows

pytestmark = pytest.mark.process

MICRO = {"one row": Micro(1, None), "all": Micro(9, None), "tokens": Micro(None, 12)}
"""12 tokens are the longest sequence, and fewer than the third sample has."""
CREDITS = ("graph", "branch", "0.5")


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_the_gradient_is_the_sum_over_all_requests(tiny_qwen2: str, mode: str) -> None:
    for credit, micro in zip(CREDITS, MICRO.values(), strict=True):
        _, expected = graphs.closed_form(tiny_qwen2, mode, credit)
        case = {"mode": mode, "credit": credit, "micro": micro}
        _, found = graphs.step(tiny_qwen2, case)
        assert matrix.difference(found, expected) < matrix.TOLERANCE, credit


@pytest.mark.parametrize("micro", MICRO)
def test_log_probs_are_those_after_each_requests_own_context(tiny_qwen2: str, micro: str) -> None:
    expected, _ = graphs.closed_form(tiny_qwen2, "token-mean", "graph")
    case = {"mode": "token-mean", "credit": "graph", "micro": MICRO[micro]}
    found, _ = graphs.step(tiny_qwen2, case)
    begin = 0
    for row, session in enumerate(graphs.sessions()):
        # Requests in the order of the row; see test_branches_of_a_graph_worked_out_by_hand.
        order = [n.number for path, known in session.branches() for n in path[known:]]
        own = expected[begin : begin + len(order)]
        begin += len(order)
        values = found.non_tensor_batch["old_log_probs"][row]
        mask = np.asarray(graphs.batch("graph").non_tensor_batch["response_mask"][row], dtype=bool)
        np.testing.assert_allclose(values[mask], np.concatenate([own[n] for n in order]), rtol=2e-6)
        assert not values[~mask].any()


def test_a_reference_service_gets_each_branch_as_a_sequence(monkeypatch) -> None:
    asked = []

    def log_probs(service, sequences, scored, temperature, model):
        asked.extend(zip(map(list, sequences), scored, strict=True))
        return [-ids[-n:] / 10 for ids, n in zip(sequences, scored, strict=True)]

    monkeypatch.setattr("verlite.engine.reference_client.log_probs", log_probs)
    worker: Any = ActorWorker.__new__(ActorWorker)
    worker.rank_rows = StepRows()
    worker.spec = SimpleNamespace(temperature=1.0)
    rows = graphs.batch("graph")
    service: Any = SimpleNamespace(name="reference service")
    found = worker.remote_log_probs(rows.with_meta(step=1), service, "model")
    # Sessions sampled each token with minus a tenth of its number, too.
    for own, same in zip(
        found.non_tensor_batch["ref_log_prob"],
        rows.non_tensor_batch["rollout_log_probs"],
        strict=True,
    ):
        np.testing.assert_allclose(own, same, rtol=1e-6)
    leaves = [leaf.context for session in graphs.sessions() for leaf in session.leaves()]
    assert sorted(ids for ids, _ in asked) == sorted(leaves)


@pytest.mark.parametrize("settings", [{}, {"use_remove_padding": False}, {"sequence_parallel": 2}])
@pytest.mark.parametrize("parts", [False, True])
def test_ranks_and_parts_of_a_step_do_not_change_it(
    tiny_qwen2: str, two_ranks: Ranks, settings: dict[str, Any], parts: bool
) -> None:
    """With parts, gradients are accumulated row by row before the update."""
    mode = "seq-mean-token-mean"
    _, expected = graphs.closed_form(tiny_qwen2, mode, "branch")
    case = {"mode": mode, "credit": "branch", "micro": Micro(None, 12), "parts": parts}
    results = two_ranks.call(_step, tiny_qwen2, case, settings)
    for found in results:
        assert matrix.difference(found, expected) < matrix.TOLERANCE


def _step(path: str, case: dict[str, Any], settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    return graphs.step(path, case, **settings)[1]
