"""The training loop: PPO, and with another `algorithm.adv_estimator` GRPO and its relatives.

Each stage takes the run and the batch, and adds the fields that the comment names
(protocol/fields.toml). The configuration decides which stages have work to do: no critic unless the
estimator uses values, no reference policy unless a KL term uses it, no teacher unless it is
distilled.
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
from verlite.trainer.stages.groups import finished_groups, sync_running_engines
from verlite.trainer.stages.overlap import overlapped_groups
from verlite.trainer.stages.rollout import rollout
from verlite.trainer.stages.update import assign_mini_batches, update_actor, update_critic
from verlite.trainer.stages.weights import sync_weights


def train(run: Run) -> None:
    """Train until the last step or until a stop is requested.

    `trainer.mode` decides where a step's samples come from, and whether the engines run when they
    get its weights. All stages between are the same:

    - sync: the engines sample the step's prompts, and sleep while the policy is updated.
    - pipelined: inference and gradients of finished prompts are computed while the engines sample
      the others. What has been computed, the stages do not compute again.
    - async: the engines sample while the policy is updated, and a step takes prompts that are
      finished. No token is older than `async_training.max_age` versions, and every prompt that was
      drawn is trained (`control.flow`).
    """
    samples, publish = {
        "sync": (rollout, sync_weights),
        "pipelined": (overlapped_groups, sync_running_engines),
        "async": (finished_groups, sync_running_engines),
    }[run.config.trainer.mode]
    sync_weights(run)
    validate_first(run)
    for _ in run.steps():
        batch = samples(run)  # prompt_ids response_ids response_mask rollout_log_probs scores valid
        batch = assign_mini_batches(run, batch)  # mini_batch_index
        batch = old_log_probs(run, batch)  # old_log_probs
        batch = loss_mask(run, batch)  # loss_mask
        batch = reference_log_probs(run, batch)  # ref_log_prob
        batch = teacher_log_probs(run, batch)  # teacher_log_prob
        batch = values(run, batch)  # values
        batch = advantages(run, batch)  # rewards advantages returns
        update_critic(run, batch)
        update_actor(run, batch)
        publish(run)
        finish_step(run, batch)  # metrics, samples, validation, checkpoint
