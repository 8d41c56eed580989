"""KL divergence to the reference policy: estimators per token, reward penalty, KL controllers.

With d = log pi - log pi_ref on sampled tokens (Schulman 2020, "Approximating KL Divergence"):

kind            value               expected gradient as a loss term
kl, k1          d                   0, so use it in the reward only
abs             |d|                 of the sign only
mse, k2         d^2 / 2             that of KL(pi || pi_ref)
low_var_kl, k3  exp(-d) - 1 + d     that of KL(pi_ref || pi)
kind + "+"      that of the kind    that of k2 (straight-through estimator)
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verlite.algorithms.masked import masked_mean
from verlite.spec.catalog import KL_BASE_KINDS, KL_KINDS

LOG_PROB_FLOOR = -1e4
"""Replaces log 0: its exp is 0 and its square is finite."""
MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this before exp: exp(20) = 5e8 can still be squared in float32."""
K3_LIMIT = 10.0
"""Largest value of k3, as in verl."""


def kl_estimate(log_prob: Tensor, ref_log_prob: Tensor, kind: str) -> Tensor:
    """Estimate KL(policy || reference) per token, in the shape of `log_prob`, with gradient.

    The result is finite for all finite inputs and for -inf: log-probs are floored at -1e4. k3 grows
    exponentially and is limited to 10, with gradient 0 beyond; "k3+" keeps a gradient there. NaN
    stays NaN.

    Args:
        log_prob: log-probs of the sampled tokens under the policy, of any shape.
        ref_log_prob: the same under the reference, in the same shape.
        kind: one of catalog.KL_KINDS; see the table above.

    Raises:
        ValueError: the kind is unknown.
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
        # expm1 avoids the cancellation of exp(x) - 1 near 0.
        value = (torch.expm1(log_ratio) - log_ratio).clamp(max=K3_LIMIT)
    if kind.endswith("+"):
        surrogate = d.square() / 2
        value = value.detach() + (surrogate - surrogate.detach())
    return value


def kl_loss(
    log_prob: Tensor, ref_log_prob: Tensor, response_mask: Tensor, weights: Tensor, kind: str
) -> Tensor:
    """Return the KL term of the actor's loss: the sum over tokens of the estimate times `weights`.

    Entries under mask 0 change neither value nor gradient, even if they are NaN.

    Args:
        log_prob: [b, R], under the policy.
        ref_log_prob: [b, R], under the reference.
        response_mask: [b, R], 1 on trainable tokens.
        weights: [b, R], from aggregation.token_weights.
        kind: one of catalog.KL_KINDS.
    """
    mask = response_mask.bool()
    log_prob = torch.where(mask, log_prob, 0)
    ref_log_prob = torch.where(mask, ref_log_prob, 0)
    return (kl_estimate(log_prob, ref_log_prob, kind) * weights).sum()


def apply_kl_penalty(
    token_level_scores: Tensor,
    old_log_probs: Tensor,
    ref_log_prob: Tensor,
    response_mask: Tensor,
    coef: float,
    kind: str = "kl",
) -> tuple[Tensor, float]:
    """Subtract the KL penalty from token-level scores (InstructGPT, arXiv:2203.02155, eq. 2).

    Args:
        token_level_scores: [B, R].
        old_log_probs: [B, R], under the policy.
        ref_log_prob: [B, R], under the reference.
        response_mask: [B, R], 1 on sampled tokens of rows that count. Only these are penalized.
        coef: the penalty's coefficient.
        kind: one of catalog.KL_KINDS.

    Returns:
        token-level rewards: [B, R] float32, detached.
        current KL: the mean over rows of a row's mean KL per token, for the KL controller. Rows
            without such tokens are left out.
    """
    mask = response_mask.bool()
    with torch.no_grad():
        kl = torch.where(mask, kl_estimate(old_log_probs, ref_log_prob, kind), 0)
        current = masked_mean(masked_mean(kl, mask, dim=-1), mask.any(-1))
        rewards = torch.add(token_level_scores, kl, alpha=-coef).to(torch.float32)
        return rewards, float(current)


@dataclass
class KLController:
    """The coefficient of the KL penalty. With a target it adapts, so that the KL stays near it
    (Ziegler et al. 2019, arXiv:1909.08593, 2.2).

    value: the current coefficient; initially the starting value.
    target: KL per token to reach. None: the coefficient is constant.
    horizon: samples over which the coefficient adapts.
    """

    value: float
    target: float | None = None
    horizon: int = 1

    def update(self, current_kl: float, n_steps: int) -> None:
        """Adapt the coefficient to `n_steps` samples with mean KL `current_kl`."""
        if self.target is not None:
            error = min(max(current_kl / self.target - 1, -0.2), 0.2)
            self.value *= 1 + error * n_steps / self.horizon

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]
