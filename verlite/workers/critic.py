"""The value function: values and updates."""

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
from verlite.protocol.ragged import padded, ragged
from verlite.workers.training import TrainingWorker, cut

if TYPE_CHECKING:
    from verlite.engine.fsdp import Counts


class CriticWorker(TrainingWorker):
    """One rank of the critic: a causal LM's body with a scalar head."""

    def __init__(self, config: Config, plan: Plan, total_steps: int):
        from verlite.engine.fsdp import (
            TrainEngine,
        )  # its libraries take seconds, and the driver only names this class

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

    @register("split", keep_remote=("values",))
    def values(self, batch: DataProto) -> DataProto:
        """Ragged values: the value before each response token, 0 where the token is not trained."""
        rows = padded(batch)
        self.engine.onload()
        out = self.engine.forward(rows, cut(self.plan.value_micro), 1.0)
        self.engine.offload()
        t = rows.batch
        return DataProto.from_dict(
            {}, {"values": ragged(out["values"] * t["response_mask"], t["response_length"])}
        )

    @register("split")
    def update(self, batch: DataProto) -> dict[str, float]:
        """All of the step's critic updates; returns verl's critic/ metrics, equal on every rank."""
        return self.update_in_mini_batches(
            "critic", padded(batch), self.plan.critic, value_objective(self.config, self.plan)
        )


def value_objective(config: Config, plan: Plan):
    """The critic's loss as the engine calls it, aggregated over the whole optimizer step as the policy's is."""

    def objective(
        rows: TensorDict, outputs: dict[str, torch.Tensor], counts: "Counts"
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mask = rows["response_mask"]
        weights = token_weights(
            mask,
            plan.critic.loss_agg_mode,
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
