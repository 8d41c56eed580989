"""The frozen reference policy: log-probs only."""

from verlite.config.plan import Plan
from verlite.config.schema import Config
from verlite.controller.dispatch import register
from verlite.protocol.data import DataProto
from verlite.protocol.ragged import padded, ragged
from verlite.workers.training import TrainingWorker, cut


class ReferenceWorker(TrainingWorker):
    """One rank of the reference. It has no optimizer, so nothing can change it."""

    def __init__(self, config: Config, plan: Plan, total_steps: int):
        from verlite.engine.fsdp import (
            TrainEngine,
        )  # its libraries take seconds, and the driver only names this class

        super().__init__(config, plan, total_steps)
        policy = config.actor_rollout_ref
        self.engine = TrainEngine(
            policy.model,
            policy.ref.fsdp_config,
            None,
            head="lm",
            total_training_steps=total_steps,
            grad_clip=0.0,
            max_nonfinite_updates=0,
            device=self.device,
            seed=config.data.seed,
            sequence_parallel=plan.sequence_parallel["ref"],
        )
        self.engine.offload()

    @register("split", keep_remote=("ref_log_prob",))
    def log_probs(self, batch: DataProto) -> DataProto:
        """Ragged ref_log_prob of the responses."""
        rows = padded(batch)
        self.engine.onload()
        out = self.engine.forward(
            rows, cut(self.plan.ref_micro), self.config.actor_rollout_ref.rollout.temperature
        )
        self.engine.offload()
        return DataProto.from_dict(
            {}, {"ref_log_prob": ragged(out["log_probs"], rows.batch["response_length"])}
        )
