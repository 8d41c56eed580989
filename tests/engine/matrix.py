"""Gradients of the actor's whole loss for every arrangement of the rows, and a closed form."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.algorithms import reference
from tests.engine import programs
from tests.engine.batches import P, naive_log_probs, ragged_batch
from tests.engine.ranks import Ranks

ORDERS = {"in order": list(range(8)), "shuffled": [5, 2, 7, 0, 4, 6, 1, 3]}
SPLITS: dict[str, dict[str, int]] = {
    "all rows at once": {"size": 8},
    "5 rows": {"size": 5},
    "3 rows": {"size": 3},
    "2 rows": {"size": 2},
    "1 row": {"size": 1},
    "24 tokens": {"max_tokens": 24},
}
LAYOUTS = {"packed": programs.gradients, "padded": programs.padded_gradients}
TOLERANCE = 5e-6
"""Limit of `difference`: float32 passes through two layers, sums of a few hundred terms.

The eps of float32 is 6e-8.
"""

Gradients = dict[str, Tensor]
Key = tuple[str, str, str]  # ranks, layout, "split, order"


def columns(path: str) -> dict[str, Tensor]:
    """Return old and reference log-probs close to the model's, so that few ratios are clipped.

    They are NaN where the mask is 0.
    """
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
    batch = ragged_batch()
    with torch.no_grad():
        log_probs, _ = naive_log_probs(model, batch, programs.TEMPERATURE)
    noise = torch.randn(
        2, *log_probs.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    old, ref = log_probs + noise * torch.tensor([0.3, 0.5])[:, None, None]
    given = {
        "old_log_probs": old.float(),
        "ref_log_prob": ref.float(),
        "advantages": batch.batch["advantages"],
    }
    return {
        name: values.masked_fill(batch.batch["response_mask"] == 0, math.nan)
        for name, values in given.items()
    }


def closed_form(path: str, mode: str, given: dict[str, Tensor]) -> tuple[float, Gradients]:
    """Return loss and float64 gradient by the formulas, token by token.

    Autograd computes only the derivatives of log-probs and entropies.
    """
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
    batch = ragged_batch().with_batch(**given).batch
    s = programs.POLICY
    loss = 0.0
    surrogate = torch.zeros((), dtype=torch.float64)
    for row, weight in enumerate(
        reference.row_weights(batch["response_mask"], mode, programs.SCALE)
    ):
        item = batch[row]
        ids = item["input_ids"][item["attention_mask"].bool()]
        prompt = int(item["attention_mask"][:P].sum())
        log_p = torch.log_softmax(model(ids[None]).logits[0] / programs.TEMPERATURE, -1)
        for j in item["response_mask"].nonzero().flatten().tolist():
            token_log_p = log_p[prompt + j - 1]
            new = token_log_p[ids[prompt + j]]
            entropy = -(token_log_p.exp() * token_log_p).sum()
            old, ref, advantage = (
                float(item[name][j]) for name in ("old_log_probs", "ref_log_prob", "advantages")
            )
            value, slope = reference.ppo_token(
                float(new.detach()), old, advantage, s, worst=s["clip_c"]
            )
            kl, kl_slope = reference.kl_token("k3", float(new.detach()), ref)
            loss += weight * (
                value + s["kl_loss_coef"] * kl - s["entropy_coeff"] * float(entropy.detach())
            )
            surrogate = surrogate + weight * (
                (slope + s["kl_loss_coef"] * kl_slope) * new - s["entropy_coeff"] * entropy
            )
    surrogate.backward()
    return loss, {name: p.grad for name, p in model.named_parameters()}


def arrangements(
    path: str, modes: Sequence[str], given: dict[str, Tensor], ranks: Ranks
) -> dict[str, dict[Key, tuple[dict[str, float], Gradients]]]:
    """Return (metrics, gradients) of every mode for every split, order, layout and number of ranks.

    One engine per layout and number of ranks computes all modes. The two ranks must agree exactly.
    """
    names = [(mode, split, order) for mode in modes for split in SPLITS for order in ORDERS]
    cases: list[dict[str, Any]] = [
        {"mode": mode, "rows": ORDERS[order], "columns": given, **SPLITS[split]}
        for mode, split, order in names
    ]
    results: dict[str, dict[Key, tuple[dict[str, float], Gradients]]] = {m: {} for m in modes}
    for layout, program in LAYOUTS.items():
        alone = program(path, cases)
        first, second = ranks.call(program, path, cases)
        for (mode, *name), one, two, other in zip(names, alone, first, second, strict=True):
            assert two[0] == other[0], "the ranks disagree"
            for key in two[1]:
                assert torch.equal(two[1][key], other[1][key]), "the ranks disagree"
            results[mode]["1 rank", layout, ", ".join(name)] = one
            results[mode]["2 ranks", layout, ", ".join(name)] = two
    return results


def comparable(metrics: dict[str, float]) -> dict[str, float]:
    """Return an update's metrics without those that depend on how work is split."""
    own = ("tokens_computed", "actor/tokens_computed")
    return {k: v for k, v in metrics.items() if k not in own and "/perf/" not in k}


def difference(actual: Gradients, expected: Gradients) -> float:
    """Return |actual - expected| / |expected|, with norms over all parameters."""
    assert actual.keys() == expected.keys()
    squares = [
        ((actual[name].double() - g.double()).square().sum(), g.double().square().sum())
        for name, g in expected.items()
    ]
    return math.sqrt(sum(float(d) for d, _ in squares) / sum(float(g) for _, g in squares))
