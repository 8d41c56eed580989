"""The training loop of trainer.mode=async: the engines sample while the policy is updated.

The stages are those of `trainer.ppo`, but for the first and the last: a step takes groups that are
finished, and its weights go to engines that run. No token is older than async_training.max_age
versions, and every prompt that was drawn is trained (`control.flow`).
"""

from verlite.trainer.finish import finish_step, validate_first
from verlite.trainer.run import Run
from verlite.trainer.stages.advantage import (
    advantages,
    loss_mask,
    old_log_probs,
    reference_log_probs,
    teacher_log_probs,
    values,
)
from verlite.trainer.stages.groups import finished_groups, first_weights, sync_running_engines
from verlite.trainer.stages.update import assign_mini_batches, update_actor, update_critic


def train(run: Run) -> None:
    """Train until the last step or until a stop is requested."""
    first_weights(run)
    validate_first(run)
    for _ in run.steps():
        batch = finished_groups(run)  # prompt_ids response_ids response_mask rollout_log_probs ...
        batch = assign_mini_batches(run, batch)  # mini_batch_index
        batch = old_log_probs(run, batch)  # old_log_probs
        batch = loss_mask(run, batch)  # loss_mask
        batch = reference_log_probs(run, batch)  # ref_log_prob
        batch = teacher_log_probs(run, batch)  # teacher_log_prob
        batch = values(run, batch)  # values
        batch = advantages(run, batch)  # rewards advantages returns
        update_critic(run, batch)
        update_actor(run, batch)
        sync_running_engines(run)
        finish_step(run, batch)  # metrics, samples, validation, checkpoint
