"""The critic: values and updates."""

import dataclasses
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDict

from verlite.algorithms.aggregation import token_weights
from verlite.algorithms.losses import value_loss
from verlite.config.plan import Plan
from verlite.config.schema import Config
from verlite.controller.dispatch import register
from verlite.protocol.data import DataProto
from verlite.protocol.metrics import Metrics
from verlite.protocol.ragged import ragged
from verlite.workers.training import TrainingWorker, micro_batching

if TYPE_CHECKING:
    from verlite.engine.fsdp import Counts, LossFn


class CriticWorker(TrainingWorker):
    """One rank of the critic: a causal LM's body with a scalar head."""

    def __init__(self, config: Config, plan: Plan, total_steps: int) -> None:
        # Imported here: these libraries take seconds, and the driver only names this class.
        from verlite.engine.fsdp import TrainEngine

        super().__init__(config, plan, total_steps)
        critic = config.critic
        self.engine = TrainEngine(
            dataclasses.replace(critic.model, path=plan.critic_model_path),
            critic.model.fsdp_config,
            critic.optim,
            head="value",
            total_training_steps=total_steps,
            grad_clip=critic.grad_clip,
            max_nonfinite_updates=critic.max_nonfinite_updates,
            device=self.device,
            seed=config.data.seed,
            sequence_parallel=plan.sequence_parallel["critic"],
        )
        self.engine.offload()

    @register("split", keep_remote=("values",), fetch=False)
    def values(self, batch: DataProto) -> DataProto:
        """Return ragged values: the value before each response token, 0 outside response_mask."""
        rows = self.rank_rows.padded(batch)
        self.engine.onload()
        out = self.engine.forward(rows, micro_batching(self.plan.value_micro), 1.0)
        self.engine.offload()
        t = rows.batch
        values = ragged(out["values"] * t["response_mask"], t["response_length"])
        return DataProto.from_dict({}, {"values": values})

    @register("split", fetch=False)
    def update(self, batch: DataProto) -> Metrics:
        """Do the step's critic updates; return verl's critic/ metrics, equal on every rank."""
        rows = self.rank_rows.padded(batch)
        objective = value_objective(self.config, self.plan)
        assert self.plan.critic is not None
        return self.update_in_mini_batches("critic", rows, self.plan.critic, objective)


def value_objective(config: Config, plan: Plan) -> "LossFn":
    """Return the critic's loss, aggregated over the whole optimizer step like the policy's."""
    assert plan.critic is not None
    loss_agg_mode = plan.critic.loss_agg_mode

    def objective(
        rows: TensorDict, outputs: dict[str, torch.Tensor], counts: "Counts"
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mask = rows["response_mask"]  # holds loss_mask, see update_in_mini_batches
        weights = token_weights(
            mask,
            loss_agg_mode,
            tokens=counts.tokens,
            sequences=counts.sequences,
            scale=plan.loss_scale,
        )
        loss, metrics = value_loss(
            outputs["values"],
            rows["values"],
            rows["returns"],
            mask,
            weights,
            cliprange=config.critic.cliprange_value,
            tokens=counts.tokens,
        )
        return loss, {**metrics, "critic/vf_loss": loss.detach()}

    return objective
