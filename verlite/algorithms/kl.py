"""KL divergence to the reference policy: per-token estimators, the penalty in the reward, and the weight's controller.

With d = log pi - log ref on sampled tokens (Schulman, "Approximating KL divergence", 2020):

kind            value                gradient through log pi, expected under pi
kl, k1          d                    0: useless in a loss, right in a (detached) reward
abs             |d|                  sign only
mse, k2         d^2 / 2              of KL(pi || ref): the right one in a loss
low_var_kl, k3  exp(-d) - 1 + d      of KL(ref || pi): a different divergence
any kind + "+"  that of the kind     k2's (straight-through)
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verlite.algorithms.masked import masked_mean
from verlite.config.catalog import KL_BASE_KINDS, KL_KINDS

LOG_PROB_FLOOR = -1e4  # stands for log 0: exp of it is 0, and its square is still finite
MAX_LOG_RATIO = 20.0  # exp(20) = 5e8 is still a sane float32 after squaring
K3_LIMIT = 10.0


def kl_estimate(log_prob: Tensor, ref_log_prob: Tensor, kind: str) -> Tensor:
    """KL(policy || reference) of each token, in the shape of `log_prob`, differentiable in it; kinds as in the table above.

    Finite for every finite or -inf input: log-probs are floored at -1e4, and k3, which grows exponentially, is limited to
    10 with gradient 0 beyond it (as in verl; "k3+" keeps a gradient there). NaN stays NaN.
    ValueError: an unknown kind.
    """
    base = KL_BASE_KINDS.get(kind.removesuffix("+"))
    if base is None:
        raise ValueError(f"unknown KL estimator {kind!r}: choose one of {', '.join(KL_KINDS)}")
    d = log_prob.clamp(min=LOG_PROB_FLOOR) - ref_log_prob.clamp(min=LOG_PROB_FLOOR)
    if base == "k1":
        value = d
    elif base == "abs":
        value = d.abs()
    elif base == "k2":
        value = d.square() / 2
    else:
        log_ratio = (-d).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        value = (torch.expm1(log_ratio) - log_ratio).clamp(
            max=K3_LIMIT
        )  # expm1: exp(x) - 1 cancels near 0, where KL lives
    if kind.endswith("+"):
        surrogate = d.square() / 2
        value = value.detach() + (surrogate - surrogate.detach())
    return value


def kl_loss(
    log_prob: Tensor, ref_log_prob: Tensor, response_mask: Tensor, weights: Tensor, kind: str
) -> Tensor:
    """KL as a term of the loss: scalar sum over [b, R] of the per-token estimate times `weights` (aggregation.token_weights).

    What lies under mask 0, NaN included, changes neither value nor gradient.
    """
    mask = response_mask.bool()
    return (
        kl_estimate(torch.where(mask, log_prob, 0), torch.where(mask, ref_log_prob, 0), kind)
        * weights
    ).sum()


def apply_kl_penalty(
    token_level_scores: Tensor,
    old_log_probs: Tensor,
    ref_log_prob: Tensor,
    response_mask: Tensor,
    coef: float,
    kind: str = "kl",
) -> tuple[Tensor, float]:
    """Rewards with the KL penalty: scores - coef * KL on trainable tokens, and the current KL for the controller.

    All tensors [B, R]; the result is float32 and detached. The current KL is the mean over rows that have trainable tokens
    of the mean over their trainable tokens. (InstructGPT, arXiv:2203.02155, eq. 2, per token.)
    """
    mask = response_mask.bool()
    with torch.no_grad():
        kl = kl_estimate(old_log_probs, ref_log_prob, kind)
        kl = torch.where(mask, kl, 0)
        current = masked_mean(masked_mean(kl, mask, dim=-1), mask.any(-1))
        return torch.add(token_level_scores, kl, alpha=-coef).to(torch.float32), float(current)


@dataclass
class FixedKLController:
    """A constant weight of the KL penalty."""

    value: float

    def update(self, current_kl: float, n_steps: int) -> None:
        """Nothing to learn."""

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


@dataclass
class AdaptiveKLController:
    """A weight that holds the KL near a target (Ziegler et al. 2019, arXiv:1909.08593, section 2.2).

    value: the weight, from its initial value on. target: KL per token to hold. horizon: samples over which it follows.
    """

    value: float
    target: float
    horizon: int

    def update(self, current_kl: float, n_steps: int) -> None:
        """After `n_steps` samples whose mean KL was `current_kl`."""
        error = min(max(current_kl / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * n_steps / self.horizon

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]
