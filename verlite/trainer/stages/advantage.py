"""The advantage phase: log-probs, values, the loss mask and advantages of the step's samples."""

import torch
from tensordict import TensorDict

from verlite.algorithms.advantages import (
    AdvantageInputs,
    compute_advantages,
    place_scores,
)
from verlite.algorithms.gap import gap_metrics, gap_totals
from verlite.algorithms.kl import apply_kl_penalty
from verlite.algorithms.rollout_correction import correct_rollout
from verlite.config import catalog
from verlite.config.schema import Config
from verlite.protocol import fields
from verlite.protocol.data import DataProto
from verlite.protocol.ragged import ragged
from verlite.rollout.types import Status
from verlite.trainer import batch as batches
from verlite.trainer.batch import fetch_padded, to_ranks
from verlite.trainer.errors import LogProbGap
from verlite.trainer.metrics import token_metrics
from verlite.trainer.run import Run, stage


@stage("old_log_prob")
def old_log_probs(run: Run, batch: DataProto) -> DataProto:
    """Log-probs under the policy before this step's updates: old_log_probs, entropy_sums, gap_sums.

    Skipped where they are provably the ones of the update itself (one update, one epoch, and nobody else asks), which then
    measures the same metrics. The first step of a process computes them all the same, since the start-up gate compares
    them with the rollout's. In the bypass mode the rollout's take their place.

    Raises:
        LogProbGap: trainer and engine disagree by more than `rollout.log_prob_gap_limit`, or there is no token to compare.
    """
    gate, needed = run.first_step, run.plan.needs_old_log_probs
    if run.plan.correction.bypass_mode:
        batch = batch.with_non_tensor(old_log_probs=batch.non_tensor_batch["rollout_log_probs"])
    if not needed and not gate:
        return batch
    answer = run.actor.log_probs(to_ranks(run, batch, "actor", "rollout_log_probs"))
    measured = batch.with_batch(**answer.batch).with_non_tensor(**answer.non_tensor_batch)
    gap, tokens = (
        gap_metrics(gap_totals(answer.batch["gap_sums"])),
        batch.batch["trained_tokens"].sum().item(),
    )
    run.metrics.update(
        gap | {"actor/entropy": answer.batch["entropy_sums"].sum().item() / max(1, tokens)}
    )
    limit = run.config.actor_rollout_ref.rollout.log_prob_gap_limit
    if gate and not gap:
        why = next(filter(None, batch.non_tensor_batch["error"]), "all responses are empty")
        raise LogProbGap(
            f"the first step has no trained token, so that trainer and rollout engine cannot be compared: {why}"
        )
    if gate and not gap["training/log_prob_gap"] <= limit:
        raise LogProbGap(
            f"mean |log p_train - log p_rollout| is {gap['training/log_prob_gap']:.2e} before the first update; "
            f"actor_rollout_ref.rollout.log_prob_gap_limit={limit}. "
            f"{_triage(fetch_padded(measured, 'old_log_probs', 'rollout_log_probs'))}"
        )
    # Where they are skipped in later steps the update must not see them now either: a resumed run takes the same numbers.
    return measured if needed else batch


def _triage(t: TensorDict) -> str:
    """Where the gap is says what it comes from."""
    gap = (t["old_log_probs"] - t["rollout_log_probs"]).abs()
    mask = t["response_mask"].bool()
    first = torch.zeros_like(mask)
    first[torch.arange(len(mask)), mask.int().argmax(1)] = mask.any(1)
    rest = mask & ~first
    at_first, elsewhere = gap[first].mean().item(), gap[rest].mean().item() if rest.any() else 0.0
    if at_first > 10 * elsewhere:
        return f"It sits on the first response token ({at_first:.1e} there, {elsewhere:.1e} after it): a position is off by one."
    return (
        f"It is on all tokens ({at_first:.1e} on the first, {elsewhere:.1e} after it): look at the weights' dtype "
        "(rollout.dtype, fsdp_config.dtype), at top_p/top_k, or at a model that the engine runs differently."
    )


def rollout_correction(run: Run, batch: DataProto) -> DataProto:
    """Importance weights and rejection by `algorithm.rollout_correction`: rollout_is_weights, rejected_tokens, rejected."""
    if not run.plan.correction.acts_on_batch:
        return batch
    t = fetch_padded(batch, "old_log_probs", "rollout_log_probs")
    weights, mask, metrics = correct_rollout(
        t["old_log_probs"], t["rollout_log_probs"], t["response_mask"], run.plan.correction
    )
    run.metrics.update(metrics)
    rejected, lengths = (t["response_mask"] - mask).bool(), t["response_length"]
    batch = batch.with_batch(rejected=rejected.sum(1)).with_non_tensor(
        rejected_tokens=ragged(rejected, lengths)
    )
    return (
        batch
        if weights is None
        else batch.with_non_tensor(rollout_is_weights=ragged(weights, lengths))
    )


@stage("ref")
def reference_log_probs(run: Run, batch: DataProto) -> DataProto:
    """Log-probs under the frozen reference: ref_log_prob. Only when a KL term uses it. With LoRA it is the actor without its adapters."""
    if run.plan.reference_is_actor:
        return batch.union(run.actor.reference_log_probs(to_ranks(run, batch, "actor")))
    return (
        batch
        if run.reference is None
        else batch.union(run.reference.log_probs(to_ranks(run, batch, "ref")))
    )


@stage("values")
def values(run: Run, batch: DataProto) -> DataProto:
    """The critic's values. Only for estimators that use them."""
    return (
        batch
        if run.critic is None
        else batch.union(run.critic.values(to_ranks(run, batch, "critic")))
    )


@stage("adv")
def advantages(run: Run, batch: DataProto) -> DataProto:
    """From scores to advantages and returns; then what a few methods do to the batch that is trained on.

    Where a row's tokens all get one number, from one number, the tokens stay where they are: advantages and returns are [B, 1].
    """
    algorithm, by_row = run.config.algorithm, needs_no_tokens(run.config)
    if by_row:
        t = batch.batch.clone(recurse=False)
        t["response_mask"] = (t["trained_tokens"] > 0).long()[:, None]
    else:
        t = fetch_padded(
            batch, "old_log_probs", "ref_log_prob", "values", "sum_pi_squared", "rollout_is_weights"
        )
    scores = rewards = place_scores(t["scores"], t["response_mask"])
    if algorithm.use_kl_in_reward:
        coefficient = run.kl.value
        rewards, kl = apply_kl_penalty(
            rewards,
            t["old_log_probs"],
            t["ref_log_prob"],
            t["response_mask"],
            coefficient,
            algorithm.kl_penalty,
        )
        run.kl.update(kl, len(batch))
        run.metrics.update(
            {"actor/reward_kl_penalty": kl, "actor/reward_kl_penalty_coeff": coefficient}
        )
    inputs = AdvantageInputs(
        token_level_rewards=rewards,
        response_mask=t["response_mask"],
        uid=batch.non_tensor_batch["uid"],
        valid=t["valid"],
        values=t.get("values"),
        reward_baselines=t.get("reward_baselines"),
        token_level_scores=scores,
        old_log_probs=t.get("old_log_probs"),
        sum_pi_squared=t.get("sum_pi_squared"),
        rollout_is_weights=t.get("rollout_is_weights"),
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
        reward_clip_range=tuple(run.config.reward.clip_range or (-10.0, 10.0)),
        extra=algorithm.adv_kwargs,
    )
    adv, returns = compute_advantages(algorithm.adv_estimator, inputs)
    batch = without_untrained(run, batch.with_batch(rewards=rewards.sum(1)))
    trained = (
        batch.batch["trained_tokens"][:, None]
        if by_row
        else fetch_padded(batch, "rejected_tokens")["response_mask"]
    )
    run.metrics.update(token_metrics(adv, returns, trained, t.get("values")))
    if by_row:
        batch = batch.with_batch(advantages=adv, returns=returns)
    else:
        adv, returns = (ragged(values * trained, t["response_length"]) for values in (adv, returns))
        batch = batch.with_non_tensor(advantages=adv, returns=returns)
    return fields.check(with_selected_tokens(run, batch))


def needs_no_tokens(config: Config) -> bool:
    """Whether advantages follow from one number of each row."""
    estimator = catalog.ESTIMATORS.get(config.algorithm.adv_estimator)
    by_row = estimator is not None and estimator.by_row
    return by_row and not config.algorithm.use_kl_in_reward


def without_untrained(run: Run, batch: DataProto) -> DataProto:
    """What rollout correction rejected, and with `algorithm.mask_truncated` the responses that were cut off, leave the loss.

    Only now: their scores are as true as any, and count in the baselines of the others.
    """
    tokens = batch.batch["trained_tokens"]
    if "rejected" in batch.batch.keys():
        tokens = tokens - batch.batch["rejected"]
    if run.config.algorithm.mask_truncated:
        truncated = torch.from_numpy(batch.non_tensor_batch["status"] == Status.LENGTH)
        tokens = tokens.masked_fill(truncated, 0)
        run.metrics["response_length/masked_truncated_ratio"] = truncated.double().mean().item()
    return batch.with_batch(trained_tokens=tokens)


def with_selected_tokens(run: Run, batch: DataProto) -> DataProto:
    """For clip_cov and kl_cov: selected_tokens, chosen over the whole step, so that no split into updates changes them."""
    actor = run.config.actor_rollout_ref.actor
    loss = catalog.LOSSES.get(run.plan.loss_mode)
    if loss is None or loss.selector is None:
        return batch
    t = fetch_padded(batch, "old_log_probs", "advantages", "rejected_tokens")
    seed = batches.seeds(actor.data_loader_seed, run.step, 0, 1)[0]
    settings = {**vars(actor.policy_loss), "generator": torch.Generator().manual_seed(seed)}
    select = catalog.load(loss.selector)
    selected = select(t["old_log_probs"], t["advantages"], t["response_mask"].bool(), settings)
    return batch.with_non_tensor(selected_tokens=ragged(selected, t["response_length"]))
