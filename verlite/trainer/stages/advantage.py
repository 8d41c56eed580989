"""From samples to advantages: log-probs, the loss mask, values, advantages."""

import torch

from verlite.algorithms.gap import gap_metrics, gap_totals
from verlite.config.compile import reference_service_spec, teacher_service_spec
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
    answer = inferred(run, "old_log_prob", batch)
    if answer is not None:
        gap = gap_metrics(gap_totals(answer.batch["gap_sums"]))
        tokens = batch.batch["sampled_tokens"].sum().item()
        run.metrics.update(gap)
        check_sample_size(run)
        run.metrics["actor/entropy"] = answer.batch["entropy_sums"].sum().item() / max(1, tokens)
        if run.first_step:
            check_first_step(run, with_columns_of(batch, answer), gap)
    return with_old_log_probs(run, batch, answer)


def with_old_log_probs(run: Run, batch: DataProto, answer: DataProto | None) -> DataProto:
    """Return the batch with the log-probs that the losses compare with, if they compare with any
    that are known before the update."""
    if run.plan.correction.bypass_mode:
        return batch.with_non_tensor(old_log_probs=batch.non_tensor_batch["rollout_log_probs"])
    # Without those of the first step's check; otherwise a resumed run, whose first step is another
    # one, would compute different numbers.
    return with_columns_of(batch, answer if run.plan.needs_old_log_probs else None)


def with_columns_of(batch: DataProto, answer: DataProto | None) -> DataProto:
    """Return the batch with a worker's answer about its rows, if there is one."""
    if answer is None:
        return batch
    return batch.with_batch(**answer.batch).with_non_tensor(**answer.non_tensor_batch)


# Passes of models without gradients, over the step's rows or some of them


def inferred(run: Run, phase: str, batch: DataProto) -> DataProto | None:
    """Return the columns of INFERENCE[phase]. With trainer.mode=pipelined they were computed while
    prompts were sampled."""
    if phase in run.current.inferred:
        return run.current.inferred[phase]
    return INFERENCE[phase](run, batch)


def _log_probs(run: Run, batch: DataProto) -> DataProto | None:
    if not run.plan.needs_old_log_probs and not run.first_step:
        return None
    rows = to_ranks(run, batch, run.log_prob_role, "rollout_log_probs")
    return run.log_prob_worker.log_probs(rows)


def _reference_log_probs(run: Run, batch: DataProto) -> DataProto | None:
    if run.plan.reference_is_actor:
        rows = to_ranks(run, batch, run.log_prob_role)
        return run.log_prob_worker.reference_log_probs(rows)
    if run.service is not None:
        rows = to_ranks(run, batch, run.log_prob_role)
        service = reference_service_spec(run.config)
        return run.log_prob_worker.remote_log_probs(rows, service, run.service.model)
    if run.reference is None:
        return None
    return run.reference.log_probs(to_ranks(run, batch, "ref"))


def _teacher_log_probs(run: Run, batch: DataProto) -> DataProto | None:
    batch = _with_teacher_prompts(batch)
    if run.teacher_service is not None:
        rows = to_ranks(run, batch, run.log_prob_role)
        service = teacher_service_spec(run.config)
        answer = run.log_prob_worker.remote_log_probs(rows, service, run.teacher_service.model)
    elif run.teacher is not None:
        answer = run.teacher.log_probs(to_ranks(run, batch, "teacher"))
    else:
        return None
    column = answer.non_tensor_batch["ref_log_prob"]
    return DataProto.from_dict({}, {"teacher_log_prob": column})


def _with_teacher_prompts(batch: DataProto) -> DataProto:
    """Return the rows as the teacher reads them: the same responses, after the prompts of
    data.teacher_prompt_key if it is set."""
    prompts = batch.non_tensor_batch.get("teacher_prompt_ids")
    if prompts is None:
        return batch
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    # Another part: a worker that has the step's rows must not use their prompts.
    part = "teacher", batch.meta_info.get("part")
    rows = batch.with_non_tensor(prompt_ids=prompts).with_batch(prompt_length=lengths)
    return rows.with_meta(part=part)


def _values(run: Run, batch: DataProto) -> DataProto | None:
    if run.critic is None:
        return None
    return run.critic.values(to_ranks(run, batch, "critic"))


INFERENCE = {
    "old_log_prob": _log_probs,
    "ref": _reference_log_probs,
    "teacher": _teacher_log_probs,
    "values": _values,
}
"""By phase, the pass that answers about a batch's rows. None: the run does not need it."""


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
    return with_columns_of(batch, inferred(run, "ref", batch))


@stage("teacher")
def teacher_log_probs(run: Run, batch: DataProto) -> DataProto:
    """Add log-probs under the teacher, if one is distilled. Its worker computes them, or the
    service at teacher_model.url."""
    return with_columns_of(batch, inferred(run, "teacher", batch))


@stage("values")
def values(run: Run, batch: DataProto) -> DataProto:
    """Add the critic's values, if the estimator uses them."""
    return with_columns_of(batch, inferred(run, "values", batch))


@stage("adv")
def advantages(run: Run, batch: DataProto) -> DataProto:
    """Add rewards, advantages and returns; for the losses clip_cov and kl_cov also selected_tokens.

    Outcome estimators need one number per row. They run here, and advantages and returns are
    [B, 1]. Other estimators need all tokens of the step and run on one rank of the actor.
    """
    batch, metrics = with_advantages(run, batch)
    run.metrics.update(metrics)
    if REWARD_KL in metrics:
        run.kl.update(metrics[REWARD_KL], len(batch))
    if token_selector_path(run.plan.loss_mode) is None:
        return batch
    columns = ("response_mask", "loss_mask", "old_log_probs", "advantages", "credit")
    seed = seeds(run.config.actor_rollout_ref.actor.data_loader_seed, run.step, 0, 1)[0]
    return batch.union(run.actor.select_tokens(to_one_rank(run, batch, *columns), seed))


def with_advantages(run: Run, batch: DataProto) -> tuple[DataProto, dict[str, float]]:
    """Add rewards, advantages and returns; and return metrics of them."""
    if by_row(run.advantage):
        return advantages_by_row(run, batch)
    rows = to_one_rank(run, batch, *_ESTIMATOR_FIELDS)
    answer = run.actor.advantages(rows, run.kl.value)
    return with_columns_of(batch, answer), answer.meta_info["stage_metrics"]


def advantages_by_row(run: Run, batch: DataProto) -> tuple[DataProto, dict[str, float]]:
    """Estimate advantages with one number per row in place of its tokens."""
    t = batch.batch.clone(recurse=False)
    t["response_mask"] = (t["sampled_tokens"] > 0).long()[:, None]
    t["loss_mask"] = t["trained_tokens"][:, None]
    result, metrics = estimate_advantages(
        run.advantage, t, batch.non_tensor_batch["uid"], run.kl.value
    )
    return batch.with_batch(**result.batch), metrics
