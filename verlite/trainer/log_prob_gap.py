"""Checks of the log-probs of trainer and rollout engine: they must agree before the first update,
and in asynchronous training differ so little that the weights can be corrected."""

import torch
from tensordict import TensorDict

from verlite.algorithms.gap import EFF_SAMPLE_SIZE, gap_metrics, gap_totals
from verlite.config.compile import model_spec
from verlite.engine.folder import experts_of, load_config
from verlite.protocol.data import DataProto
from verlite.trainer.batch import fetch_padded
from verlite.trainer.errors import FewEffectiveSamples, LogProbGap
from verlite.trainer.run import Run
from verlite.weights import GAP_LIMIT

GAP_KEY = "actor_rollout_ref.rollout.log_prob_gap_limit"
GAP_LIMIT_OF_EXPERTS = 0.15
"""Three times what a healthy mixture of experts may show in bfloat16.

Ma et al. (arXiv 2510.11370) measure KL(rollout, trainer) = 1.5e-3 for Qwen3-30B-A3B, whose routers
differ in about 10% of the choices, and 6.4e-4 for the dense Qwen3-8B. The mean gap is at most its
root mean square, about sqrt(2 KL): 0.055, and 0.036.
"""


def check_first_step(run: Run, measured: DataProto, gap: dict[str, float]) -> None:
    """Compare trainer and rollout engine in the first step of a process; see `check_log_prob_gap`.

    Samples of older weights, which a checkpoint of asynchronous training has, do not compare them.
    If the step has no others, only the log-prob probe of the first weight sync has.
    """
    if run.groups is not None:
        versions = measured.batch["oldest_version"]  # -1 without a token
        if ((versions >= 0) & (versions < run.version)).any():
            measured = measured.select_idxs(versions == run.version)
            gap = gap_metrics(gap_totals(measured.batch["gap_sums"]))
            if not gap:
                return
    check_log_prob_gap(run, measured, gap)


def check_log_prob_gap(run: Run, batch: DataProto, gap: dict[str, float]) -> None:
    """Raise LogProbGap if trainer and rollout engine disagree before the first update."""
    if not gap:
        errors = batch.non_tensor_batch["error"]
        reason = next(filter(None, errors), "all responses are empty")
        raise LogProbGap(
            "the first step has no sampled token that counts, so trainer and rollout engine cannot "
            f"be compared: {reason}"
        )
    limit = gap_limit(run)
    mean_gap = gap["training/log_prob_gap"]
    if not mean_gap <= limit:  # also for NaN
        t = fetch_padded(batch, "old_log_probs", "rollout_log_probs")
        raise LogProbGap(
            f"mean |log p_train - log p_rollout| is {mean_gap:.2e} before the first update; "
            f"{GAP_KEY}={limit}. {_diagnose_gap(t)} If only rounding is left, raise {GAP_KEY}."
        )


def gap_limit(run: Run) -> float:
    """Return rollout.log_prob_gap_limit, or what null means for this model and these dtypes."""
    policy = run.config.actor_rollout_ref
    if policy.rollout.log_prob_gap_limit is not None:
        return policy.rollout.log_prob_gap_limit
    if run.plan.train_dtype == run.plan.rollout_dtype == "float32":
        return GAP_LIMIT
    experts, _ = experts_of(load_config(model_spec(policy.model)))
    return GAP_LIMIT_OF_EXPERTS if experts else GAP_LIMIT


def _diagnose_gap(t: TensorDict) -> str:
    """Diagnose the mismatch from its position."""
    gap = (t["old_log_probs"] - t["rollout_log_probs"]).abs()
    mask = t["response_mask"].bool()
    first = torch.zeros_like(mask)
    first[torch.arange(len(mask)), mask.int().argmax(1)] = mask.any(1)
    rest = mask & ~first
    at_first = gap[first].mean().item()
    after = gap[rest].mean().item() if rest.any() else 0.0
    if at_first > 10 * after:
        return (
            f"The gap is on the first response token ({at_first:.1e}, {after:.1e} after it): a "
            "position is off by one."
        )
    return (
        f"The gap is on all tokens ({at_first:.1e} on the first, {after:.1e} after it): check the "
        "weights' dtype (rollout.dtype, fsdp_config.dtype), top_p and top_k, and whether the "
        "engine computes this model differently."
    )


def check_sample_size(run: Run) -> None:
    """Check the effective sample size of the step, if its old log-probs or its update measured it.

    One that is not a number passes: log-probs are not finite then, which age does not do. The
    optimizer skips such an update, and `max_nonfinite_updates` limits how many.

    Raises:
        FewEffectiveSamples: it is below `async_training.min_eff_sample_size`.
    """
    settings = run.config.async_training
    level = "seq" if run.plan.correction.rollout_is == "sequence" else "token"
    size = run.metrics.get(f"{EFF_SAMPLE_SIZE}_{level}")
    floor = settings.min_eff_sample_size
    if run.config.trainer.mode != "async" or size is None or floor is None or not size < floor:
        return
    saved = run.stop.machine.saved_step
    raise FewEffectiveSamples(
        f"the effective sample size of step {run.step} is {size:.6g} of its "
        f"{'samples' if level == 'seq' else 'tokens'}, less than "
        f"async_training.min_eff_sample_size={floor}: the weights that sampled (up to "
        f"async_training.max_age={settings.max_age} versions older) and those that train differ so "
        "much that few tokens decide the update. Lower async_training.max_age, "
        "actor_rollout_ref.actor.optim.lr or the number of updates per step. "
        + (
            f"The checkpoint of step {saved} is from before it"
            if saved
            else "No checkpoint was saved before it (trainer.save_freq)"
        )
    )
