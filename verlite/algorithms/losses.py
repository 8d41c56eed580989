"""Policy losses, value loss and entropy, as sums of weighted per-token terms that add over micro-batches and ranks.

A policy loss is a function (PolicyLossInputs) -> (loss, metrics). To add one: write it and add it to POLICY_LOSSES in `verlite.config.catalog`.
`loss` is a scalar with gradient: the sum of per-token losses times inputs.weights. Metrics are detached scalars whose sums
over the micro-batches of a step are means over its tokens: a per-token quantity goes through inputs.token_mean.

In formulas below: ratio = exp(log_prob - old_log_prob), A = advantage.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from verlite.algorithms.kl import LOG_PROB_FLOOR, MAX_LOG_RATIO
from verlite.algorithms.masked import masked_mean
from verlite.algorithms.rollout_correction import (
    bounded_weights,
    importance_ratios,
    log_ratios,
    rejection_mask,
)
from verlite.config.catalog import LOSSES, resolve
from verlite.config.correction import RolloutCorrection


@dataclass(kw_only=True)
class PolicyLossInputs:
    """All that a policy loss may look at; b rows of one micro-batch.

    log_prob [b, R] with gradient, old_log_prob [b, R], advantages [b, R]; `policy_loss` sets them to 0 where the mask is 0.
    response_mask [b, R]: 1 on trainable tokens.
    weights [b, R]: from aggregation.token_weights, 0 where the mask is 0.
    tokens: trainable tokens in the whole optimizer step, over micro-batches and ranks: the denominator of metrics.
    clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high]. clip_c: dual-clip bound, above 1.
    loss_agg_mode: the mode that made the weights, for losses that care.
    rollout_is_weights [b, R]: truncated importance weights of the rollout engine against the trainer. None: 1.
    extra: settings and fields of particular losses.
    """

    log_prob: Tensor
    old_log_prob: Tensor
    advantages: Tensor
    response_mask: Tensor
    weights: Tensor
    tokens: int
    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_c: float = 3.0
    loss_agg_mode: str = "token-mean"
    rollout_is_weights: Tensor | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def mask(self) -> Tensor:
        """[b, R] bool."""
        return self.response_mask.bool()

    @cached_property
    def log_ratio(self) -> Tensor:
        """[b, R] log_prob - old_log_prob within +-20 (outside of that its gradient is 0), so that exp of it is finite."""
        return (self.log_prob - self.old_log_prob).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    def total(self, token_losses: Tensor) -> Tensor:
        """Scalar: the sum of per-token losses [b, R] times weights and, where present, rollout_is_weights."""
        weights = (
            self.weights
            if self.rollout_is_weights is None
            else self.weights * self.rollout_is_weights
        )
        return torch.dot(token_losses.flatten(), weights.to(token_losses.dtype).flatten())

    def token_mean(self, x: Tensor) -> Tensor:
        """Scalar, detached: this micro-batch's part of the mean of `x` [b, R], float or bool, over all trainable tokens of the step."""
        total = (
            (x & self.mask).count_nonzero()
            if x.dtype == torch.bool
            else torch.where(self.mask, x.detach(), 0).sum()
        )
        return total / max(self.tokens, 1)


PolicyLoss = Callable[[PolicyLossInputs], tuple[Tensor, dict[str, Tensor]]]


def policy_loss(
    name: str | PolicyLoss, inputs: PolicyLossInputs
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss (scalar with gradient) and additive metrics, by the policy loss called `name`.

    `name` is a key of catalog.LOSSES, a user's own "package.module:function", or the function itself. Before the call, what lies
    under mask 0 is set to 0 and log-probs are floored at -1e4, so that neither padding nor an impossible token makes value or
    gradient NaN.
    ValueError: an unknown name, or shapes that differ.
    """
    function = resolve(name, LOSSES, "policy loss") if isinstance(name, str) else name
    for key in ("old_log_prob", "advantages", "response_mask", "weights", "rollout_is_weights"):
        value = getattr(inputs, key)
        if value is not None and value.shape != inputs.log_prob.shape:
            raise ValueError(
                f"{key} has shape {tuple(value.shape)}, but log_prob has {tuple(inputs.log_prob.shape)}"
            )
    mask, is_weights = inputs.mask, inputs.rollout_is_weights
    return function(
        replace(
            inputs,
            log_prob=torch.where(mask, inputs.log_prob, 0).clamp(min=LOG_PROB_FLOOR),
            old_log_prob=torch.where(mask, inputs.old_log_prob, 0).clamp(min=LOG_PROB_FLOOR),
            advantages=torch.where(mask, inputs.advantages, 0),
            rollout_is_weights=None if is_weights is None else torch.where(mask, is_weights, 0),
        )
    )


def vanilla(inputs: PolicyLossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped loss with dual clip (arXiv:1707.06347, eq. 7; arXiv:1912.09729, eq. 5).

    max(-A ratio, -A clip(ratio, 1 - clip_low, 1 + clip_high)), and at most -A clip_c where A < 0.
    """
    ratio = inputs.log_ratio.exp()
    losses, clipped = _clipped_losses(inputs, ratio, worst=inputs.clip_c)
    capped = (inputs.advantages < 0) & (ratio > inputs.clip_c)
    return inputs.total(losses), _metrics(inputs, clipped) | {
        "actor/pg_clipfrac_lower": inputs.token_mean(capped)
    }


def gspo(inputs: PolicyLossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """GSPO: PPO's clip (no dual clip) on one ratio per row, the geometric mean of its tokens' (arXiv:2507.18071, the GSPO-token form).

    ratio_t = exp(log_prob - sg[log_prob] + sg[mean over the row of log_prob - old_log_prob]), exponent at most 10: the row's
    ratio, with a gradient to each token. The paper aggregates by seq-mean-token-mean and clips at 3e-4 and 4e-4.
    """
    row = masked_mean(inputs.log_prob.detach() - inputs.old_log_prob, inputs.mask, -1).unsqueeze(-1)
    ratio = (inputs.log_prob - inputs.log_prob.detach() + row).clamp(max=10).exp()
    losses, clipped = _clipped_losses(inputs, ratio)
    return inputs.total(losses), _metrics(inputs, clipped)


def sapo(inputs: PolicyLossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """SAPO: a soft gate in place of the clip, -A sigmoid(tau (ratio - 1)) 4 / tau (arXiv:2511.20347).

    tau is extra["tau_pos"] (1.0) where A > 0, else extra["tau_neg"] (1.05). The paper aggregates by seq-mean-token-mean.
    """
    tau = torch.where(
        inputs.advantages > 0,
        float(inputs.extra.get("tau_pos", 1.0)),
        float(inputs.extra.get("tau_neg", 1.05)),
    )
    gate = torch.sigmoid(tau * (inputs.log_ratio.exp() - 1)) * 4 / tau
    return inputs.total(-inputs.advantages * gate), _metrics(inputs)


def gpg(inputs: PolicyLossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """The plain policy gradient, -A log_prob, without ratio or clip (GPG, arXiv:2504.02546)."""
    return inputs.total(-inputs.advantages * inputs.log_prob), _metrics(inputs)


def geo_mean(inputs: PolicyLossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """GMPO: -A times the geometric mean of a row's clipped ratios (arXiv:2507.20673).

    A token's log-ratio is limited to at most clip_high where A > 0, and to at least -clip_low where A < 0: bounds of the
    log-ratio, unlike everywhere else (the paper uses 0.4). A row's A is the mean of its tokens'. Each of its tokens gets the
    row's loss; with seq-mean-token-mean that is the paper's mean over rows.
    """
    positive, negative = inputs.advantages > 0, inputs.advantages < 0
    lowest = torch.where(negative, -inputs.clip_low, -torch.inf)
    highest = torch.where(positive, inputs.clip_high, torch.inf)
    bounded = torch.where(positive | negative, inputs.log_ratio.clamp(lowest, highest), 0)
    row_loss = (
        -masked_mean(inputs.advantages, inputs.mask, -1)
        * masked_mean(bounded, inputs.mask, -1).exp()
    )
    clipped = (inputs.log_ratio < lowest) | (inputs.log_ratio > highest)
    return inputs.total(row_loss.unsqueeze(-1).expand_as(bounded)), _metrics(inputs, clipped)


def cispo(inputs: PolicyLossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """CISPO: the policy gradient weighted by the clipped ratio, -sg[clip(ratio)] A log_prob (MiniMax-M1, arXiv:2506.13585, section 3.1).

    Clipped tokens keep their gradient.
    """
    ratio = inputs.log_ratio.detach().exp()
    weight = ratio.clamp(1 - inputs.clip_low, 1 + inputs.clip_high)
    return inputs.total(-inputs.advantages * weight * inputs.log_prob), _metrics(
        inputs, ratio != weight
    )


def dppo_tv(inputs: PolicyLossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """DPPO with total variation: trust region on the probability itself, not on the ratio (arXiv:2602.04879).

    -A sg[min(ratio, clip_c)] log_prob, for tokens whose probability has not yet risen by more than clip_high (A > 0) or fallen
    by more than clip_low (A <= 0) since the rollout.
    """
    change = inputs.log_prob.detach().exp() - inputs.old_log_prob.exp()
    return _dppo(
        inputs,
        torch.where(inputs.advantages > 0, change <= inputs.clip_high, change >= -inputs.clip_low),
    )


def dppo_kl(inputs: PolicyLossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """DPPO with the KL of "this token or another": as dppo_tv, but the distance is KL(Bernoulli(p_old) || Bernoulli(p)).

    Tokens that moved against their advantage always stay in (arXiv:2602.04879).
    """
    new, old = inputs.log_prob.detach(), inputs.old_log_prob
    p, p_old = new.exp(), old.exp()
    kl = (
        p_old * (old - new)
        + (1 - p_old) * (((1 - p_old).clamp(min=0) + 1e-8) / ((1 - p).clamp(min=0) + 1e-8)).log()
    )
    limit, moved_against = (
        torch.where(inputs.advantages > 0, inputs.clip_high, inputs.clip_low),
        torch.where(inputs.advantages > 0, p <= p_old, p >= p_old),
    )
    return _dppo(inputs, (kl <= limit) | moved_against)


def clip_cov(inputs: PolicyLossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Clip-Cov: PPO's clip (no dual clip), and no loss at all for a few tokens of high covariance (arXiv:2505.22617).

    The tokens are extra["selected"] [b, R] bool where given, else select_clip_cov of this micro-batch. The latter depends on
    how rows were split into micro-batches; choose over the whole optimizer step to be free of that.
    """
    losses, clipped = _clipped_losses(inputs, inputs.log_ratio.exp())
    selected = inputs.extra.get("selected")
    if selected is None:
        selected = select_clip_cov(
            inputs.log_prob, inputs.advantages, inputs.mask, inputs.extra, clipped
        )
    return inputs.total(losses.masked_fill(selected, 0)), _metrics(inputs, clipped | selected)


def kl_cov(inputs: PolicyLossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """KL-Cov: -A ratio, plus extra["ppo_kl_coef"] (1.0) |log ratio| on the tokens of highest covariance (arXiv:2505.22617).

    The tokens are extra["selected"] where given, else select_kl_cov of this micro-batch; see clip_cov.
    """
    selected = inputs.extra.get("selected")
    if selected is None:
        selected = select_kl_cov(inputs.log_prob, inputs.advantages, inputs.mask, inputs.extra)
    penalty = float(inputs.extra.get("ppo_kl_coef", 1.0)) * inputs.log_ratio.abs() * selected
    return inputs.total(-inputs.advantages * inputs.log_ratio.exp() + penalty), _metrics(inputs)


def bypass_mode(inputs: PolicyLossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Losses for old_log_prob = the rollout engine's log-probs, with extra["rollout_correction"] a RolloutCorrection.

    loss_type ppo_clip is vanilla, whose ratio then corrects for the engine too; reinforce is -A w log_prob with w =
    sg[pi / pi_rollout] bounded by the settings (1 without rollout_is). Rejected tokens are left out of the sum; they stay in
    the denominators, which were fixed before the current policy was known.
    """
    settings: RolloutCorrection = inputs.extra["rollout_correction"]
    log_ratio = log_ratios(inputs.log_prob.detach(), inputs.old_log_prob, inputs.mask)
    kept, _ = rejection_mask(log_ratio, inputs.mask, settings)
    inputs = replace(inputs, weights=inputs.weights * kept)
    if settings.loss_type == "ppo_clip":
        loss, metrics = vanilla(inputs)
    else:
        ratios = (
            importance_ratios(log_ratio, inputs.mask, settings.rollout_is)
            if settings.rollout_is
            else None
        )
        weight = 1.0 if ratios is None else bounded_weights(ratios, settings)
        loss, metrics = (
            inputs.total(-inputs.advantages * weight * inputs.log_prob),
            _metrics(inputs),
        )
    return loss, metrics | {"rollout_corr/rollout_rs_masked_fraction": inputs.token_mean(~kept)}


def select_clip_cov(
    log_prob: Tensor,
    advantages: Tensor,
    mask: Tensor,
    settings: Mapping[str, Any],
    clipped: Tensor | None = None,
) -> Tensor:
    """[b, R] bool: tokens that Clip-Cov takes out. At random, settings["clip_cov_ratio"] (0.0002) of the mask's tokens, at least
    one, among those not yet `clipped` whose covariance lies between settings["clip_cov_lb"] (1) and ["clip_cov_ub"] (5);
    ["generator"] is the torch.Generator, or None.
    """
    covariance = _covariance(log_prob, advantages, mask)
    low, high = settings.get("clip_cov_lb", 1.0), settings.get("clip_cov_ub", 5.0)
    within = mask & (covariance > low) & (covariance < high)
    candidates = (within if clipped is None else within & ~clipped).flatten().nonzero().squeeze(1)
    count = max(int(settings.get("clip_cov_ratio", 0.0002) * int(mask.sum())), 1)
    order = torch.randperm(len(candidates), generator=settings.get("generator"), device="cpu").to(
        candidates.device
    )
    return _at(candidates[order[:count]], mask)


def select_kl_cov(
    log_prob: Tensor, advantages: Tensor, mask: Tensor, settings: Mapping[str, Any]
) -> Tensor:
    """[b, R] bool: tokens that KL-Cov holds back, settings["kl_cov_ratio"] (0.0002) of the mask's, at least one: those of the
    highest covariance.
    """
    tokens = int(mask.sum())
    count = min(max(int(settings.get("kl_cov_ratio", 0.0002) * tokens), 1), tokens)
    covariance = _covariance(log_prob, advantages, mask).masked_fill(~mask, -torch.inf)
    return _at(covariance.flatten().topk(count).indices, mask)


def _clipped_losses(
    inputs: PolicyLossInputs, ratio: Tensor, worst: float = torch.inf
) -> tuple[Tensor, Tensor]:
    """Token losses max(-A ratio, -A clip(ratio, 1 - clip_low, 1 + clip_high)), at most -A worst where A < 0; and which were
    clipped, [b, R] each.

    Written as -A times a ratio that is bounded on the side where the loss would gain: above by 1 + clip_high where A >= 0,
    below by 1 - clip_low (and above by `worst`) where A < 0. It is the same number and the same gradient.
    """
    negative = inputs.advantages < 0
    lowest = torch.where(negative, 1 - inputs.clip_low, 0.0)
    highest = torch.where(negative, worst, 1 + inputs.clip_high)
    clipped = torch.where(negative, ratio < lowest, (ratio > highest) & (inputs.advantages > 0))
    return -inputs.advantages * ratio.clamp(lowest, highest), clipped


def _dppo(inputs: PolicyLossInputs, inside: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    weight = inputs.log_ratio.detach().exp().clamp(max=inputs.clip_c)
    return inputs.total(-inputs.advantages * weight * inside * inputs.log_prob), _metrics(
        inputs, ~inside
    )


def _covariance(log_prob: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """[b, R] (A - mean A) (log_prob - mean log_prob), means over the mask; detached."""
    log_prob = log_prob.detach()
    return (advantages - masked_mean(advantages, mask)) * (log_prob - masked_mean(log_prob, mask))


def _at(flat_indices: Tensor, mask: Tensor) -> Tensor:
    chosen = torch.zeros(mask.numel(), dtype=torch.bool, device=mask.device)
    chosen[flat_indices] = True
    return chosen.view(mask.shape)


def _metrics(inputs: PolicyLossInputs, clipped: Tensor | None = None) -> dict[str, Tensor]:
    metrics = {"actor/ppo_kl": inputs.token_mean(-inputs.log_ratio)}
    return (
        metrics if clipped is None else metrics | {"actor/pg_clipfrac": inputs.token_mean(clipped)}
    )


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    weights: Tensor,
    *,
    cliprange: float,
    tokens: int,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped value loss 0.5 max((V - G)^2, (clip(V, V_old +- cliprange) - G)^2), weighted and summed; all tensors [b, R].

    weights, tokens: as in PolicyLossInputs. Metrics: share of tokens where the clipped error is the larger, mean value.
    """
    mask = response_mask.bool()
    values, old_values, returns = (torch.where(mask, x, 0) for x in (values, old_values, returns))
    error = (values - returns).square()
    clipped_error = (
        values.clamp(old_values - cliprange, old_values + cliprange) - returns
    ).square()
    loss = 0.5 * (torch.maximum(error, clipped_error) * weights).sum()
    count = max(tokens, 1)
    return loss, {
        "critic/vf_clipfrac": (clipped_error > error).count_nonzero() / count,
        "critic/vpred_mean": values.detach().sum() / count,
    }


def entropy_sum(entropy: Tensor, response_mask: Tensor, weights: Tensor) -> Tensor:
    """Scalar with gradient: entropies [b, R] of trainable tokens, times weights. Subtract entropy_coeff times it from the loss."""
    return (torch.where(response_mask.bool(), entropy, 0) * weights).sum()
