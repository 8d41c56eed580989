"""The distillation term's gradient is the same in every split and on two ranks."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.algorithms import reference
from tests.engine import matrix, programs
from tests.engine.batches import P, ragged_batch
from tests.engine.ranks import Ranks

pytestmark = pytest.mark.process
LOSSES = [{"loss_mode": "k1", "use_policy_gradient": True}, {"loss_mode": "k2"}]
MODES = ["token-mean", "seq-mean-token-mean"]


def closed_form(path: str, mode: str, teacher: torch.Tensor) -> matrix.Gradients:
    """Return the float64 gradient: weight x (log p - log q) x d log p, token by token."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
    batch = ragged_batch().batch
    total = torch.zeros((), dtype=torch.float64)
    weights = reference.row_weights(batch["response_mask"], mode, programs.SCALE)
    for row, weight in enumerate(weights):
        item = batch[row]
        ids = item["input_ids"][item["attention_mask"].bool()]
        prompt = int(item["attention_mask"][:P].sum())
        log_p = torch.log_softmax(model(ids[None]).logits[0] / programs.TEMPERATURE, -1)
        for j in item["response_mask"].nonzero().flatten().tolist():
            new = log_p[prompt + j - 1][ids[prompt + j]]
            total = total + weight * (new.detach() - float(teacher[row, j])) * new
    total.backward()
    return {name: p.grad for name, p in model.named_parameters()}


def test_gradient_is_the_same_in_every_split_and_on_two_ranks(
    tiny_qwen2: str, two_ranks: Ranks
) -> None:
    teacher = matrix.columns(tiny_qwen2)["ref_log_prob"]  # NaN where the mask is 0
    columns = {"teacher_log_prob": teacher, "rollout_log_probs": torch.zeros_like(teacher)}
    orders = list(matrix.ORDERS.values())
    cases: list[dict[str, Any]] = [
        {"mode": mode, "rows": rows, "columns": columns, "distillation": loss, **split}
        for mode in MODES
        for loss in LOSSES
        for rows, split in zip(orders * 3, matrix.SPLITS.values(), strict=True)
    ]
    expected = {mode: closed_form(tiny_qwen2, mode, teacher) for mode in MODES}
    alone = programs.gradients(tiny_qwen2, cases)
    first, second = two_ranks.call(programs.gradients, tiny_qwen2, cases)
    for case, one, two, other in zip(cases, alone, first, second, strict=True):
        assert two[0] == other[0], "the ranks disagree"
        for _, gradients in (one, two):
            assert matrix.difference(gradients, expected[case["mode"]]) < matrix.TOLERANCE
        assert one[0]["distillation/kl"] == pytest.approx(two[0]["distillation/kl"], abs=1e-6)
        assert one[0]["distillation/abs_loss"] > 0.01
