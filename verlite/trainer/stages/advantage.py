"""From samples to advantages: log-probs, the loss mask, values, advantages."""

import torch

from verlite.algorithms.gap import gap_metrics, gap_totals
from verlite.protocol.data import DataProto
from verlite.protocol.ragged import clear_rows
from verlite.rollout.types import Status
from verlite.trainer.batch import seeds, to_one_rank, to_ranks
from verlite.trainer.log_prob_gap import check_first_step, check_sample_size
from verlite.trainer.run import Run, stage
from verlite.workers.advantage import (
    REWARD_KL,
    by_row,
    estimate_advantages,
    token_selector_path,
)

_ESTIMATOR_FIELDS = (
    "uid",
    "response_mask",
    "loss_mask",
    "old_log_probs",
    "ref_log_prob",
    "values",
    "sum_pi_squared",
    "rollout_is_weights",
)
"""Columns that advantages of tokens depend on."""


@stage("old_log_prob")
def old_log_probs(run: Run, batch: DataProto) -> DataProto:
    """Add log-probs under the policy before this step's updates, and measure the log-prob gap.

    Skipped if the step has a single optimizer update and nothing else reads old log-probs. The
    update then measures the same metrics. The first step of a process always runs the pass, for the
    start-up log-prob check: it compares trainer and rollout engine. In bypass mode the rollout's
    log-probs take the place of the old ones.

    Raises:
        LogProbGap: The gap exceeds `rollout.log_prob_gap_limit`, or there is no token to compare.
    """
    if run.plan.correction.bypass_mode:
        batch = batch.with_non_tensor(old_log_probs=batch.non_tensor_batch["rollout_log_probs"])
    if not run.plan.needs_old_log_probs and not run.first_step:
        return batch
    rows = to_ranks(run, batch, run.log_prob_role, "rollout_log_probs")
    answer = run.log_prob_worker.log_probs(rows)
    measured = batch.with_batch(**answer.batch).with_non_tensor(**answer.non_tensor_batch)
    gap = gap_metrics(gap_totals(answer.batch["gap_sums"]))
    tokens = batch.batch["sampled_tokens"].sum().item()
    run.metrics.update(gap)
    check_sample_size(run)
    run.metrics["actor/entropy"] = answer.batch["entropy_sums"].sum().item() / max(1, tokens)
    if run.first_step:
        check_first_step(run, measured, gap)
    # Drop them if the plan does not need them; otherwise a resumed run, whose first step is another
    # one, would compute different numbers.
    return measured if run.plan.needs_old_log_probs else batch


@stage("adv")
def loss_mask(run: Run, batch: DataProto) -> DataProto:
    """Add the mask of tokens that the losses train on.

    It is response_mask without the tokens that rollout correction rejects and, with
    `algorithm.mask_truncated`, without truncated responses. The scores of removed rows still count
    in their groups' statistics.
    """
    lengths = batch.batch["response_length"]
    mask = batch.non_tensor_batch["response_mask"]
    tokens = batch.batch["sampled_tokens"]
    if run.plan.correction.acts_on_batch:
        columns = ("response_mask", "old_log_probs", "rollout_log_probs")
        answer = run.actor.rollout_correction(to_one_rank(run, batch, *columns))
        run.metrics.update(answer.meta_info["stage_metrics"])
        tokens = answer.batch["trained_tokens"]
        batch = batch.with_non_tensor(**answer.non_tensor_batch)
        mask = batch.non_tensor_batch["loss_mask"]
    if run.config.algorithm.mask_truncated:
        truncated = torch.from_numpy(batch.non_tensor_batch["status"] == Status.LENGTH)
        ratio = truncated.double().mean().item()
        run.metrics["response_length/masked_truncated_ratio"] = ratio
        tokens = tokens.masked_fill(truncated, 0)
        mask = clear_rows(mask, lengths, truncated)
    return batch.with_batch(trained_tokens=tokens).with_non_tensor(loss_mask=mask)


@stage("ref")
def reference_log_probs(run: Run, batch: DataProto) -> DataProto:
    """Add log-probs under the reference policy, if a KL term uses them.

    With LoRA the policy without its adapters is the reference. With ref.url a service computes
    them; the workers send it the tokens, which the driver does not have.
    """
    if run.plan.reference_is_actor:
        rows = to_ranks(run, batch, run.log_prob_role)
        return batch.union(run.log_prob_worker.reference_log_probs(rows))
    if run.service is not None:
        rows = to_ranks(run, batch, run.log_prob_role)
        rows.meta_info["reference"] = run.service.model
        return batch.union(run.log_prob_worker.remote_reference_log_probs(rows))
    if run.reference is None:
        return batch
    return batch.union(run.reference.log_probs(to_ranks(run, batch, "ref")))


@stage("values")
def values(run: Run, batch: DataProto) -> DataProto:
    """Add the critic's values, if the estimator uses them."""
    if run.critic is None:
        return batch
    return batch.union(run.critic.values(to_ranks(run, batch, "critic")))


@stage("adv")
def advantages(run: Run, batch: DataProto) -> DataProto:
    """Add rewards, advantages and returns; for the losses clip_cov and kl_cov also selected_tokens.

    Outcome estimators need one number per row. They run here, and advantages and returns are
    [B, 1]. Other estimators need all tokens of the step and run on one rank of the actor.
    """
    if by_row(run.advantage):
        batch, metrics = advantages_by_row(run, batch)
    else:
        rows = to_one_rank(run, batch, *_ESTIMATOR_FIELDS)
        answer = run.actor.advantages(rows, run.kl.value)
        metrics = answer.meta_info["stage_metrics"]
        batch = batch.with_batch(**answer.batch).with_non_tensor(**answer.non_tensor_batch)
    run.metrics.update(metrics)
    if REWARD_KL in metrics:
        run.kl.update(metrics[REWARD_KL], len(batch))
    if token_selector_path(run.plan.loss_mode) is None:
        return batch
    columns = ("response_mask", "loss_mask", "old_log_probs", "advantages")
    seed = seeds(run.config.actor_rollout_ref.actor.data_loader_seed, run.step, 0, 1)[0]
    return batch.union(run.actor.select_tokens(to_one_rank(run, batch, *columns), seed))


def advantages_by_row(run: Run, batch: DataProto) -> tuple[DataProto, dict[str, float]]:
    """Estimate advantages with one number per row in place of its tokens."""
    t = batch.batch.clone(recurse=False)
    t["response_mask"] = (t["sampled_tokens"] > 0).long()[:, None]
    t["loss_mask"] = t["trained_tokens"][:, None]
    result, metrics = estimate_advantages(
        run.advantage, t, batch.non_tensor_batch["uid"], run.kl.value
    )
    return batch.with_batch(**result.batch), metrics
