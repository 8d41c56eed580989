"""The critic: values and updates."""

from typing import TYPE_CHECKING

import torch
from tensordict import TensorDict

from verlite.algorithms.aggregation import token_weights
from verlite.algorithms.losses import value_loss
from verlite.controller.dispatch import register
from verlite.protocol.data import DataProto
from verlite.protocol.metrics import Metrics
from verlite.protocol.ragged import ragged
from verlite.spec.roles import CriticSpec
from verlite.workers.training import TrainingWorker

if TYPE_CHECKING:
    from verlite.engine.fsdp import Counts, LossFn


class CriticWorker(TrainingWorker):
    """One rank of the critic: a causal LM's body with a scalar head."""

    spec: CriticSpec
    head = "value"

    @register("split", keep_remote=("values",), fetch=False)
    def values(self, batch: DataProto) -> DataProto:
        """Return ragged values: the value before each response token, 0 outside response_mask."""
        rows = self.rank_rows.padded(batch)
        self.engine.onload()
        out = self.forward(rows, self.spec.micro, 1.0)
        self.engine.offload()
        t = rows.batch
        values = ragged(out["values"] * t["response_mask"], t["response_length"])
        return DataProto.from_dict({}, {"values": values})

    @register("split", fetch=False)
    def update(self, batch: DataProto) -> Metrics:
        """Do the step's critic updates; return verl's critic/ metrics, equal on every rank."""
        rows = self.rank_rows.padded(batch)
        return self.update_in_mini_batches(
            "critic", rows, self.spec.updates, value_objective(self.spec)
        )


def value_objective(spec: CriticSpec) -> "LossFn":
    """Return the critic's loss, aggregated over the whole optimizer step like the policy's."""

    def objective(
        rows: TensorDict, outputs: dict[str, torch.Tensor], counts: "Counts"
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mask = rows["response_mask"]  # holds loss_mask, see update_in_mini_batches
        weights = token_weights(
            mask,
            spec.updates.loss_agg_mode,
            tokens=counts.tokens,
            sequences=counts.sequences,
            scale=spec.loss_scale,
            row_tokens=rows.get("trained_tokens"),
        )
        loss, metrics = value_loss(
            outputs["values"],
            rows["values"],
            rows["returns"],
            mask,
            weights,
            cliprange=spec.cliprange_value,
            tokens=counts.tokens,
        )
        return loss, {**metrics, "critic/vf_loss": loss.detach()}

    return objective
