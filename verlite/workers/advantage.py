"""Computations over all tokens of a training step: rollout correction, advantages, selected tokens.

They are pure functions of padded rows. The rows of a step are compared with each other (whitening,
batch normalization, top fractions), so one process needs all of them.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from verlite.algorithms.advantages import (
    AdvantageInputs,
    compute_advantages,
    place_scores,
    to_go,
)
from verlite.algorithms.kl import apply_kl_penalty
from verlite.algorithms.masked import masked_whiten
from verlite.algorithms.rollout_correction import correct_rollout
from verlite.protocol.data import DataProto
from verlite.protocol.metrics import Metrics, summarize
from verlite.protocol.ragged import ragged
from verlite.spec import catalog
from verlite.spec.correction import RolloutCorrection
from verlite.spec.roles import AdvantageSpec

REWARD_KL = "actor/reward_kl_penalty"


def apply_rollout_correction(t: TensorDict, settings: RolloutCorrection) -> DataProto:
    """Apply `algorithm.rollout_correction` to padded rows [B, R].

    Returns loss_mask, trained_tokens and, with importance sampling, rollout_is_weights;
    meta_info["stage_metrics"] has the `rollout_corr/` metrics.
    """
    weights, mask, metrics = correct_rollout(
        t["old_log_probs"], t["rollout_log_probs"], t["response_mask"], settings
    )
    columns = {"loss_mask": ragged(mask.to(torch.int8), t["response_length"])}
    if weights is not None:
        columns["rollout_is_weights"] = ragged(weights, t["response_length"])
    return DataProto.from_dict({"trained_tokens": mask.sum(1)}, columns, {"stage_metrics": metrics})


def estimate_advantages(
    spec: AdvantageSpec, t: TensorDict, uid: np.ndarray, kl_coefficient: float
) -> tuple[DataProto, Metrics]:
    """Estimate advantages from scores.

    Args:
        t: Rows with scores, response_mask, loss_mask and what the estimator reads. If R = 1, each
            row is a scalar and `loss_mask` holds the row's trained-token count.
        uid: [B] object array; rows with the same uid are a group.
        kl_coefficient: Coefficient of the KL penalty in the reward, if there is one.

    Returns:
        rewards [B], advantages and returns [B, R], 0 outside response_mask; and metrics over the
        tokens of loss_mask.
    """
    metrics: Metrics = {}
    scores = place_scores(t["scores"], t["response_mask"])
    rewards = scores
    if spec.use_kl_in_reward:
        rewards, kl = apply_kl_penalty(
            scores,
            t["old_log_probs"],
            t["ref_log_prob"],
            t["response_mask"],
            kl_coefficient,
            spec.kl_penalty,
        )
        metrics |= {REWARD_KL: kl, "actor/reward_kl_penalty_coeff": kl_coefficient}
    token_kl = spec.kl_in_reward_mode == "token" and catalog.estimator(spec.adv_estimator).by_row
    inputs = AdvantageInputs(
        token_level_rewards=scores if token_kl else rewards,
        response_mask=t["response_mask"],
        uid=uid,
        valid=t["valid"],
        values=t.get("values"),
        reward_baselines=t.get("reward_baselines"),
        token_level_scores=scores,
        old_log_probs=t.get("old_log_probs"),
        sum_pi_squared=t.get("sum_pi_squared"),
        rollout_is_weights=t.get("rollout_is_weights"),
        gdpo_rewards=t.get("gdpo_rewards"),
        gdpo_reward_weights=spec.gdpo_reward_weights,
        gamma=spec.gamma,
        lam=spec.lam,
        norm_adv_by_std_in_grpo=spec.norm_adv_by_std_in_grpo,
        reward_clip_range=spec.reward_clip_range,
        alone=spec.single_samples and len(set(uid)) == len(uid),
        extra=dict(spec.adv_kwargs),
    )
    advantages, returns = compute_advantages(spec.adv_estimator, inputs)
    if token_kl:
        advantages = returns = advantages + to_go(rewards - scores, inputs.mask)
    if spec.whiten_advantages:
        advantages = masked_whiten(advantages, inputs.mask)
    metrics |= token_metrics(advantages, returns, t["loss_mask"], t.get("values"))
    result = {"rewards": rewards.sum(1), "advantages": advantages, "returns": returns}
    return DataProto.from_dict(result), metrics


def by_row(spec: AdvantageSpec) -> bool:
    """Return whether advantages follow from one number per row, without the rows' tokens."""
    needs_tokens = spec.use_kl_in_reward or spec.whiten_advantages
    return catalog.estimator(spec.adv_estimator).by_row and not needs_tokens


def token_selector_path(loss_mode: str) -> str | None:
    """Return the path of the function that selects tokens for this loss, None if it needs none."""
    loss = catalog.LOSSES.get(loss_mode)
    return None if loss is None else loss.selector


def select_loss_tokens(
    t: TensorDict, loss_mode: str, settings: Mapping[str, Any], seed: int
) -> Tensor:
    """Select tokens [B, R] for clip_cov or kl_cov over the whole step.

    The result does not depend on how the step is split into updates.
    """
    path = token_selector_path(loss_mode)
    assert path is not None
    generator = torch.Generator().manual_seed(seed)
    return catalog.load(path)(
        t["old_log_probs"],
        t["advantages"],
        t["loss_mask"].bool(),
        {**settings, "generator": generator},
    )


def token_metrics(
    advantages: Tensor, returns: Tensor, trained: Tensor, values: Tensor | None
) -> Metrics:
    """Summarize advantages, returns and values over trained tokens.

    Args:
        advantages, returns, values: [B, R], or [B, 1] for one number per row.
        trained: [B, R] mask, or [B, 1] trained tokens of each row.
    """
    metrics = summarize("critic/advantages", advantages, trained)
    metrics |= summarize("critic/returns", returns, trained)
    if values is None:
        return metrics
    chosen = trained.bool()
    values = values[chosen].double()
    returns = returns[chosen].double()
    metrics |= summarize("critic/values", values)
    if returns.numel() > 1:
        variance = returns.var().item()
        if variance > 0:
            unexplained = (returns - values).var().item()
            metrics["critic/vf_explained_var"] = 1 - unexplained / variance
    return metrics
