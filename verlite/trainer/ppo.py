"""The training loop: PPO, and with another `algorithm.adv_estimator` GRPO and its relatives.

Each stage takes the run and the batch, and adds the fields that the comment names
(protocol/fields.py). The configuration decides which stages have work to do: no critic unless the
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
from verlite.trainer.stages.rollout import rollout
from verlite.trainer.stages.update import assign_mini_batches, update_actor, update_critic
from verlite.trainer.stages.weights import sync_weights


def train(run: Run) -> None:
    """Train until the last step or until a stop is requested."""
    sync_weights(run)
    validate_first(run)
    for _ in run.steps():
        batch = rollout(run)  # prompt_ids response_ids response_mask rollout_log_probs scores valid
        batch = assign_mini_batches(run, batch)  # mini_batch_index
        batch = old_log_probs(run, batch)  # old_log_probs
        batch = loss_mask(run, batch)  # loss_mask
        batch = reference_log_probs(run, batch)  # ref_log_prob
        batch = teacher_log_probs(run, batch)  # teacher_log_prob
        batch = values(run, batch)  # values
        batch = advantages(run, batch)  # rewards advantages returns
        update_critic(run, batch)
        update_actor(run, batch)
        sync_weights(run)
        finish_step(run, batch)  # metrics, samples, validation, checkpoint
