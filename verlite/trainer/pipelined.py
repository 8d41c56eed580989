"""The training loop of trainer.mode=pipelined: on-policy, but inference and gradients of finished
prompts are computed while the engines sample the others.

The stages are those of `trainer.ppo`, but for the first and the last. What the first has computed
of the batch, the others do not compute again.
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
from verlite.trainer.stages.groups import first_weights, sync_running_engines
from verlite.trainer.stages.overlap import overlapped_groups
from verlite.trainer.stages.update import assign_mini_batches, update_actor, update_critic


def train(run: Run) -> None:
    """Train until the last step or until a stop is requested."""
    first_weights(run)
    validate_first(run)
    for _ in run.steps():
        batch = overlapped_groups(run)  # prompt_ids response_ids response_mask scores ...
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
