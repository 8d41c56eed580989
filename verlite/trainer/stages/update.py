"""The update phase: mini-batches, critic update, actor update."""

from verlite.protocol.data import DataProto
from verlite.trainer import batch as batches
from verlite.trainer.batch import to_ranks
from verlite.trainer.run import Run, stage

_LOSS_FIELDS = (
    "rollout_log_probs",
    "old_log_probs",
    "ref_log_prob",
    "advantages",
    "rollout_is_weights",
    "rejected_tokens",
    "selected_tokens",
)
"""Columns that a policy loss may read beside the tokens."""


def balance(run: Run, batch: DataProto) -> DataProto:
    """Decide which rows update together: mini_batch_index, and critic_mini_batch_index where there is a critic."""
    uids, seed = (
        batch.non_tensor_batch["uid"],
        [run.config.actor_rollout_ref.actor.data_loader_seed, run.step],
    )
    batch = batch.with_batch(mini_batch_index=batches.update_numbers(uids, run.plan.actor, seed))
    if run.plan.critic is None:
        return batch
    return batch.with_batch(
        critic_mini_batch_index=batches.update_numbers(uids, run.plan.critic, [*seed, 1])
    )


@stage("update_critic")
def update_critic(run: Run, batch: DataProto) -> None:
    """Fit the critic to the returns."""
    if run.critic is not None:
        run.metrics.update(
            run.critic.update(
                to_ranks(run, batch, "critic", "values", "returns", "rejected_tokens")
            )[0]
        )


@stage("update_actor")
def update_actor(run: Run, batch: DataProto) -> None:
    """Update the policy, once the critic's warm-up is over."""
    if run.step >= run.plan.critic_warmup:
        run.metrics.update(run.actor.update(to_ranks(run, batch, "actor", *_LOSS_FIELDS))[0])
