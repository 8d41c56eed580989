"""The update phase: mini-batches, critic update, actor update."""

from verlite.control.machine import Machine
from verlite.controller.supervise import Future
from verlite.controller.worker_group import submit
from verlite.protocol.data import DataProto
from verlite.trainer.batch import mini_batch_indices, to_ranks
from verlite.trainer.log_prob_gap import check_sample_size
from verlite.trainer.run import Run, stage

_LOSS_FIELDS = (
    "loss_mask",
    "rollout_log_probs",
    "old_log_probs",
    "ref_log_prob",
    "teacher_log_prob",
    "advantages",
    "credit",
    "rollout_is_weights",
    "selected_tokens",
)
"""Columns that a policy loss may read, besides the tokens."""


@stage()
def assign_mini_batches(run: Run, batch: DataProto) -> DataProto:
    """Assign each row to an optimizer step of each epoch, for the actor and for the critic."""
    uids = batch.non_tensor_batch["uid"]
    seed = [run.config.actor_rollout_ref.actor.data_loader_seed, run.step]
    batch = batch.with_batch(mini_batch_index=mini_batch_indices(uids, run.plan.actor, seed))
    if run.plan.critic is None:
        return batch
    critic_index = mini_batch_indices(uids, run.plan.critic, [*seed, 1])
    return batch.with_batch(critic_mini_batch_index=critic_index)


def accumulate(run: Run, rows: DataProto) -> Future[list[None]]:
    """Begin to add the gradients of rows of the first mini-batch (trainer.mode=pipelined)."""
    return submit(run.actor.accumulate, to_ranks(run, rows, "actor", *_LOSS_FIELDS))


@stage("update_critic")
def update_critic(run: Run, batch: DataProto) -> None:
    """Fit the critic to the returns."""
    if run.critic is not None:
        run.tell(Machine.update_begins)
        rows = to_ranks(run, batch, "critic", "loss_mask", "values", "returns")
        run.metrics.update(run.critic.update(rows)[0])


@stage("update_actor")
def update_actor(run: Run, batch: DataProto) -> None:
    """Update the policy. During the critic's warm-up this only measures the ranks' tokens."""
    run.tell(Machine.update_begins)
    rows = to_ranks(run, batch, "actor", *_LOSS_FIELDS)
    if run.step >= run.plan.critic_warmup:
        run.metrics.update(run.actor.update(rows)[0])
        check_sample_size(run)
