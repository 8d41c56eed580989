"""Policy losses, value loss and entropy.

Every loss is a sum of weighted token terms, so the parts from micro-batches and ranks add up to the
loss of the optimizer step.

A policy loss is a function (PolicyLossInputs) -> (loss, metrics). `loss` is a scalar with gradient:
the sum of token losses times inputs.weights, see PolicyLossInputs.total. `metrics` maps names to
detached scalars. Their sums over the micro-batches of a step are means over its trainable tokens,
see PolicyLossInputs.token_mean. To add a loss, write the function and add one entry to
POLICY_LOSSES in verlite/spec/catalog.py.

In formulas: ratio = exp(log_prob - old_log_prob), A = advantage, sg = stop-gradient.

Metrics have verl's names and meaning. Unless a loss's docstring defines them otherwise,
`actor/ppo_kl` is the mean of old_log_prob - log_prob, and `actor/pg_clipfrac` is the fraction of
clipped tokens.
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
from verlite.spec.catalog import LOSSES, resolve
from verlite.spec.correction import RolloutCorrection


@dataclass(kw_only=True)
class PolicyLossInputs:
    """Inputs of a policy loss: b rows of one micro-batch, R response tokens.

    log_prob: [b, R], with gradient. old_log_prob, advantages: [b, R]. `policy_loss` sets all three
        to 0 where the mask is 0.
    response_mask: [b, R], 1 on trainable tokens.
    weights: [b, R], from aggregation.token_weights; 0 where the mask is 0.
    tokens: trainable tokens of the whole optimizer step, over all micro-batches and ranks. Metrics
        are divided by it.
    clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
    clip_c: dual-clip bound of the ratio for negative advantages, above 1.
    loss_agg_mode: the aggregation mode that `weights` were computed with.
    rollout_is_weights: [b, R], importance weights of rollout correction. None: 1.
    extra: settings and columns that only some losses read.
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
        """Return response_mask as bool [b, R]."""
        return self.response_mask.bool()

    @cached_property
    def log_ratio(self) -> Tensor:
        """Return log_prob - old_log_prob [b, R], clamped to [-20, 20] so that its exp is finite.

        The gradient is 0 where the clamp is active.
        """
        return (self.log_prob - self.old_log_prob).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    def total(self, token_losses: Tensor) -> Tensor:
        """Return the sum of token losses [b, R] times weights and, if set, rollout_is_weights."""
        weights = self.weights
        if self.rollout_is_weights is not None:
            weights = weights * self.rollout_is_weights
        return torch.dot(token_losses.flatten(), weights.to(token_losses.dtype).flatten())

    def token_mean(self, x: Tensor) -> Tensor:
        """Return this micro-batch's part of the mean of `x` over the step's trainable tokens.

        x: [b, R], float or bool. The result is a detached scalar.
        """
        if x.dtype == torch.bool:
            total = (x & self.mask).count_nonzero()
        else:
            total = torch.where(self.mask, x.detach(), 0).sum()
        return total / max(self.tokens, 1)


Metrics = dict[str, Tensor]
PolicyLoss = Callable[[PolicyLossInputs], tuple[Tensor, Metrics]]


def policy_loss(name: str | PolicyLoss, inputs: PolicyLossInputs) -> tuple[Tensor, Metrics]:
    """Compute the policy loss called `name`: a scalar with gradient, and additive metrics.

    Before the call, inputs under mask 0 are set to 0 and log-probs are floored at -1e4, so neither
    padding nor a token of probability 0 can make value or gradient NaN.

    Args:
        name: a key of catalog.LOSSES, a user's own "package.module:function", or the function.
        inputs: one micro-batch.

    Raises:
        ValueError: the name is unknown, or the inputs have different shapes.
    """
    function = resolve(name, LOSSES, "policy loss") if isinstance(name, str) else name
    for key in ("old_log_prob", "advantages", "response_mask", "weights", "rollout_is_weights"):
        value = getattr(inputs, key)
        if value is not None and value.shape != inputs.log_prob.shape:
            raise ValueError(
                f"{key} has shape {tuple(value.shape)}, "
                f"but log_prob has {tuple(inputs.log_prob.shape)}"
            )
    mask = inputs.mask
    is_weights = inputs.rollout_is_weights
    if is_weights is not None:
        is_weights = torch.where(mask, is_weights, 0)
    cleaned = replace(
        inputs,
        log_prob=torch.where(mask, inputs.log_prob, 0).clamp(min=LOG_PROB_FLOOR),
        old_log_prob=torch.where(mask, inputs.old_log_prob, 0).clamp(min=LOG_PROB_FLOOR),
        advantages=torch.where(mask, inputs.advantages, 0),
        rollout_is_weights=is_weights,
    )
    loss, metrics = function(cleaned)
    return loss, metrics


def vanilla(inputs: PolicyLossInputs) -> tuple[Tensor, Metrics]:
    """PPO with dual clip (Schulman et al. 2017, arXiv:1707.06347, eq. 7; arXiv:1912.09729, eq. 5).

    max(-A ratio, -A clip(ratio, 1 - clip_low, 1 + clip_high)), and at most -A clip_c where A < 0.
    pg_clipfrac_lower: fraction of tokens at the bound clip_c.
    """
    ratio = inputs.log_ratio.exp()
    losses, clipped = _clipped_losses(inputs, ratio, max_ratio=inputs.clip_c)
    at_dual_clip = (inputs.advantages < 0) & (ratio > inputs.clip_c)
    metrics = _metrics(inputs, pg_clipfrac=clipped, pg_clipfrac_lower=at_dual_clip)
    return inputs.total(losses), metrics


def gspo(inputs: PolicyLossInputs) -> tuple[Tensor, Metrics]:
    """GSPO: PPO's clip on one ratio per row (arXiv:2507.18071, the GSPO-token objective).

    The row's ratio is the geometric mean of its token ratios:
    ratio_t = exp(log_prob_t - sg[log_prob_t] + sg[mean over the row of log_prob - old_log_prob]),
    with the exponent limited to 10. Each token receives its own gradient. Dual clip is not applied,
    so pg_clipfrac_lower is 0. The paper aggregates with seq-mean-token-mean and sets
    clip_low = 3e-4 and clip_high = 4e-4.
    """
    log_prob = inputs.log_prob
    row_mean = masked_mean(log_prob.detach() - inputs.old_log_prob, inputs.mask, -1).unsqueeze(-1)
    ratio = (log_prob - log_prob.detach() + row_mean).clamp(max=10).exp()
    losses, clipped = _clipped_losses(inputs, ratio)
    metrics = _metrics(inputs, pg_clipfrac=clipped, pg_clipfrac_lower=_no_tokens(inputs))
    return inputs.total(losses), metrics


def sapo(inputs: PolicyLossInputs) -> tuple[Tensor, Metrics]:
    """SAPO: -A sigmoid(tau (ratio - 1)) 4 / tau, a soft gate instead of clip (arXiv:2511.20347).

    tau is extra["tau_pos"] (default 1.0) where A > 0, else extra["tau_neg"] (default 1.05). Nothing
    is clipped, so pg_clipfrac and pg_clipfrac_lower are 0. The paper aggregates with
    seq-mean-token-mean.
    """
    tau_pos = float(inputs.extra.get("tau_pos", 1.0))
    tau_neg = float(inputs.extra.get("tau_neg", 1.05))
    tau = torch.where(inputs.advantages > 0, tau_pos, tau_neg)
    gate = torch.sigmoid(tau * (inputs.log_ratio.exp() - 1)) * 4 / tau
    nothing = _no_tokens(inputs)
    metrics = _metrics(inputs, pg_clipfrac=nothing, pg_clipfrac_lower=nothing)
    return inputs.total(-inputs.advantages * gate), metrics


def gpg(inputs: PolicyLossInputs) -> tuple[Tensor, Metrics]:
    """GPG: the plain policy gradient -A log_prob, without ratio or clip (arXiv:2504.02546)."""
    return inputs.total(-inputs.advantages * inputs.log_prob), _metrics(inputs)


def geo_mean(inputs: PolicyLossInputs) -> tuple[Tensor, Metrics]:
    """GMPO: -A times the geometric mean of a row's clipped ratios (arXiv:2507.20673).

    clip_low and clip_high bound the log-ratio here (0.4 in the paper): it is at most clip_high
    where A > 0, and at least -clip_low where A < 0. A row's A is the mean over its tokens. Every
    token receives the row's loss; with seq-mean-token-mean that is the paper's mean over rows.

    pg_clipfrac, pg_clipfrac_lower: fraction of tokens with A > 0, or A < 0, whose log-ratio is
        outside [-clip_low, clip_high] on either side, as in verl.
    ratio_clipfrac: fraction of tokens whose log-ratio the loss bounded (verlite's own).
    """
    positive = inputs.advantages > 0
    negative = inputs.advantages < 0
    lowest = torch.where(negative, -inputs.clip_low, -torch.inf)
    highest = torch.where(positive, inputs.clip_high, torch.inf)
    bounded = torch.where(positive | negative, inputs.log_ratio.clamp(lowest, highest), 0)
    row_ratio = masked_mean(bounded, inputs.mask, -1).exp()
    row_loss = -masked_mean(inputs.advantages, inputs.mask, -1) * row_ratio
    outside = (inputs.log_ratio < -inputs.clip_low) | (inputs.log_ratio > inputs.clip_high)
    metrics = _metrics(
        inputs,
        pg_clipfrac=outside & positive,
        pg_clipfrac_lower=outside & negative,
        ratio_clipfrac=(inputs.log_ratio < lowest) | (inputs.log_ratio > highest),
    )
    return inputs.total(row_loss.unsqueeze(-1).expand_as(bounded)), metrics


def cispo(inputs: PolicyLossInputs) -> tuple[Tensor, Metrics]:
    """CISPO: the policy gradient weighted by the clipped ratio (arXiv:2506.13585, section 3.1).

    -sg[clip(ratio, 1 - clip_low, 1 + clip_high)] A log_prob. Clipped tokens keep their gradient.
    pg_clipfrac counts tokens whose ratio is clipped on either side; pg_clipfrac_lower is 0.
    """
    ratio = inputs.log_ratio.detach().exp()
    weight = ratio.clamp(1 - inputs.clip_low, 1 + inputs.clip_high)
    metrics = _metrics(inputs, pg_clipfrac=ratio != weight, pg_clipfrac_lower=_no_tokens(inputs))
    return inputs.total(-inputs.advantages * weight * inputs.log_prob), metrics


def dppo_tv(inputs: PolicyLossInputs) -> tuple[Tensor, Metrics]:
    """DPPO with total variation: a trust region on the token probability (arXiv:2602.04879).

    -A sg[min(ratio, clip_c)] log_prob for tokens inside the trust region, 0 outside. A token is
    inside while its probability has risen by at most clip_high (A > 0), or fallen by at most
    clip_low (A <= 0), since the rollout.
    pg_clipfrac: fraction of tokens outside. pg_clipfrac_lower: fraction inside with ratio > clip_c.
    """
    change = inputs.log_prob.detach().exp() - inputs.old_log_prob.exp()
    is_up_inside = change <= inputs.clip_high
    is_down_inside = change >= -inputs.clip_low
    return _dppo(inputs, torch.where(inputs.advantages > 0, is_up_inside, is_down_inside))


def dppo_kl(inputs: PolicyLossInputs) -> tuple[Tensor, Metrics]:
    """DPPO with binary KL: dppo_tv, but the distance is a KL divergence (arXiv:2602.04879).

    The distance is KL(Bernoulli(p_old) || Bernoulli(p)), with p the probability of the sampled
    token; its bound is clip_high where A > 0, else clip_low. Tokens whose probability moved against
    their advantage are always inside.
    """
    new = inputs.log_prob.detach()
    old = inputs.old_log_prob
    p = new.exp()
    p_old = old.exp()
    other_ratio = ((1 - p_old).clamp(min=0) + 1e-8) / ((1 - p).clamp(min=0) + 1e-8)
    kl = p_old * (old - new) + (1 - p_old) * other_ratio.log()
    is_positive = inputs.advantages > 0
    limit = torch.where(is_positive, inputs.clip_high, inputs.clip_low)
    moved_against = torch.where(is_positive, p <= p_old, p >= p_old)
    return _dppo(inputs, (kl <= limit) | moved_against)


def clip_cov(inputs: PolicyLossInputs) -> tuple[Tensor, Metrics]:
    """Clip-Cov: PPO's clip, and no loss for a few tokens of high covariance (arXiv:2505.22617).

    The tokens are `extra["selected"]`, `[b, R]` bool, which training computes over the whole step.
    If it is missing, select_clip_cov chooses within this micro-batch. Dual clip is not applied.

    pg_clipfrac: fraction of tokens selected by covariance, as in verl.
    ratio_clipfrac: fraction of tokens whose ratio is clipped (verlite's own).
    """
    losses, clipped = _clipped_losses(inputs, inputs.log_ratio.exp())
    selected = inputs.extra.get("selected")
    if selected is None:
        selected = select_clip_cov(
            inputs.log_prob, inputs.advantages, inputs.mask, inputs.extra, clipped
        )
    metrics = _metrics(inputs, pg_clipfrac=selected, ratio_clipfrac=clipped)
    return inputs.total(losses.masked_fill(selected, 0)), metrics


def kl_cov(inputs: PolicyLossInputs) -> tuple[Tensor, Metrics]:
    """KL-Cov: -A ratio, and a KL penalty on the tokens of highest covariance (arXiv:2505.22617).

    The penalty is extra["ppo_kl_coef"] (default 1.0) times |log ratio|. The tokens are
    extra["selected"] if present, else select_kl_cov of this micro-batch; see clip_cov.

    ppo_kl: mean of |log ratio|, as in verl.
    ppo_kl_k1: mean of old_log_prob - log_prob, which other losses report as ppo_kl (verlite's own).
    """
    selected = inputs.extra.get("selected")
    if selected is None:
        selected = select_kl_cov(inputs.log_prob, inputs.advantages, inputs.mask, inputs.extra)
    coef = float(inputs.extra.get("ppo_kl_coef", 1.0))
    distance = inputs.log_ratio.abs()
    losses = -inputs.advantages * inputs.log_ratio.exp() + coef * distance * selected
    metrics = {
        "actor/ppo_kl": inputs.token_mean(distance),
        "actor/ppo_kl_k1": inputs.token_mean(-inputs.log_ratio),
    }
    return inputs.total(losses), metrics


def bypass_mode(inputs: PolicyLossInputs) -> tuple[Tensor, Metrics]:
    """Losses for rollout correction in bypass mode, where old_log_prob is the rollout's log-prob.

    extra["rollout_correction"] is a RolloutCorrection. Its loss_type is one of:
    ppo_clip: vanilla. Its ratio pi / pi_rollout also corrects the mismatch.
    reinforce: -A w log_prob, with w = sg[pi / pi_rollout] bounded by the settings, or 1 without
        rollout_is.

    Rejected tokens add nothing to the sum. They still count in the denominators, which are fixed
    before the current policy is known.
    """
    settings: RolloutCorrection = inputs.extra["rollout_correction"]
    log_ratio = log_ratios(inputs.log_prob.detach(), inputs.old_log_prob, inputs.mask)
    kept, _ = rejection_mask(log_ratio, inputs.mask, settings)
    inputs = replace(inputs, weights=inputs.weights * kept)
    if settings.loss_type == "ppo_clip":
        loss, metrics = vanilla(inputs)
    else:
        losses = -inputs.advantages * inputs.log_prob
        if settings.rollout_is:
            ratios = importance_ratios(log_ratio, inputs.mask, settings.rollout_is)
            losses = -inputs.advantages * bounded_weights(ratios, settings) * inputs.log_prob
        loss = inputs.total(losses)
        metrics = _metrics(inputs)
    metrics["rollout_corr/rollout_rs_masked_fraction"] = inputs.token_mean(~kept)
    return loss, metrics


def select_clip_cov(
    log_prob: Tensor,
    advantages: Tensor,
    mask: Tensor,
    settings: Mapping[str, Any],
    clipped: Tensor | None = None,
) -> Tensor:
    """Select the tokens that Clip-Cov excludes, [b, R] bool (arXiv:2505.22617).

    A random choice of settings["clip_cov_ratio"] (default 0.0002) of the mask's tokens, at least
    one. Candidates are not `clipped` and have a covariance between settings["clip_cov_lb"]
    (default 1) and settings["clip_cov_ub"] (default 5).

    log_prob, advantages, mask, clipped: [b, R]. settings["generator"]: torch.Generator or None.
    """
    covariance = _covariance(log_prob, advantages, mask)
    low = settings.get("clip_cov_lb", 1.0)
    high = settings.get("clip_cov_ub", 5.0)
    is_candidate = mask & (covariance > low) & (covariance < high)
    if clipped is not None:
        is_candidate = is_candidate & ~clipped
    candidates = is_candidate.flatten().nonzero().squeeze(1)
    count = max(int(settings.get("clip_cov_ratio", 0.0002) * int(mask.sum())), 1)
    order = torch.randperm(len(candidates), generator=settings.get("generator"), device="cpu")
    return _flags_at(candidates[order.to(candidates.device)[:count]], mask)


def select_kl_cov(
    log_prob: Tensor, advantages: Tensor, mask: Tensor, settings: Mapping[str, Any]
) -> Tensor:
    """Select the tokens that KL-Cov penalizes, [b, R] bool (arXiv:2505.22617).

    They are settings["kl_cov_ratio"] (default 0.0002) of the mask's tokens, at least one: those of
    the highest covariance. log_prob, advantages, mask: [b, R].
    """
    tokens = int(mask.sum())
    count = min(max(int(settings.get("kl_cov_ratio", 0.0002) * tokens), 1), tokens)
    covariance = _covariance(log_prob, advantages, mask).masked_fill(~mask, -torch.inf)
    return _flags_at(covariance.flatten().topk(count).indices, mask)


def _clipped_losses(
    inputs: PolicyLossInputs, ratio: Tensor, max_ratio: float = torch.inf
) -> tuple[Tensor, Tensor]:
    """Return PPO's clipped token losses and which tokens are clipped, [b, R] each.

    The loss is max(-A ratio, -A clip(ratio, 1 - clip_low, 1 + clip_high)), and at most
    -A max_ratio where A < 0. It is computed as -A times a ratio that is bounded only where the
    clip matters: above by 1 + clip_high where A >= 0; below by 1 - clip_low and above by max_ratio
    where A < 0. Value and gradient are the same.
    """
    negative = inputs.advantages < 0
    lowest = torch.where(negative, 1 - inputs.clip_low, 0.0)
    highest = torch.where(negative, max_ratio, 1 + inputs.clip_high)
    clipped = torch.where(negative, ratio < lowest, (ratio > highest) & (inputs.advantages > 0))
    return -inputs.advantages * ratio.clamp(lowest, highest), clipped


def _dppo(inputs: PolicyLossInputs, inside: Tensor) -> tuple[Tensor, Metrics]:
    """Return DPPO's loss and metrics from the tokens inside the trust region, [b, R] bool."""
    ratio = inputs.log_ratio.detach().exp()
    losses = -inputs.advantages * ratio.clamp(max=inputs.clip_c) * inside * inputs.log_prob
    truncated = inside & (ratio > inputs.clip_c)
    metrics = _metrics(inputs, pg_clipfrac=~inside, pg_clipfrac_lower=truncated)
    return inputs.total(losses), metrics


def _covariance(log_prob: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Return (A - mean A) (log_prob - mean log_prob) [b, R], detached; means over the mask."""
    log_prob = log_prob.detach()
    return (advantages - masked_mean(advantages, mask)) * (log_prob - masked_mean(log_prob, mask))


def _flags_at(flat_indices: Tensor, mask: Tensor) -> Tensor:
    """Return a bool tensor of the mask's shape, True at the given positions of the flat mask."""
    flags = torch.zeros(mask.numel(), dtype=torch.bool, device=mask.device)
    flags[flat_indices] = True
    return flags.view(mask.shape)


def _no_tokens(inputs: PolicyLossInputs) -> Tensor:
    return torch.zeros_like(inputs.mask)


def _metrics(inputs: PolicyLossInputs, **flags: Tensor) -> Metrics:
    """Return ppo_kl, and for each keyword the fraction of tokens where its flag [b, R] is True."""
    metrics = {"actor/ppo_kl": inputs.token_mean(-inputs.log_ratio)}
    for name, flag in flags.items():
        metrics[f"actor/{name}"] = inputs.token_mean(flag)
    return metrics


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    weights: Tensor,
    *,
    cliprange: float,
    tokens: int,
) -> tuple[Tensor, Metrics]:
    """Compute the clipped value loss of PPO: a scalar with gradient, and additive metrics.

    0.5 max((V - G)^2, (clip(V, V_old - cliprange, V_old + cliprange) - G)^2) per token, weighted
    and summed. V = values, V_old = old_values, G = returns, all [b, R].

    weights [b, R], tokens: as in PolicyLossInputs.

    critic/vf_clipfrac: fraction of tokens whose clipped error is the larger one.
    critic/vpred_mean: mean value.
    """
    mask = response_mask.bool()
    values = torch.where(mask, values, 0)
    old_values = torch.where(mask, old_values, 0)
    returns = torch.where(mask, returns, 0)
    clipped_values = values.clamp(old_values - cliprange, old_values + cliprange)
    error = (values - returns).square()
    clipped_error = (clipped_values - returns).square()
    loss = 0.5 * (torch.maximum(error, clipped_error) * weights).sum()
    count = max(tokens, 1)
    metrics = {
        "critic/vf_clipfrac": (clipped_error > error).count_nonzero() / count,
        "critic/vpred_mean": values.detach().sum() / count,
    }
    return loss, metrics


def entropy_sum(entropy: Tensor, response_mask: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of token entropies [b, R] on the mask, a scalar with gradient.

    The actor's loss subtracts entropy_coeff times this.
    """
    return (torch.where(response_mask.bool(), entropy, 0) * weights).sum()
