"""A frozen model, the reference policy or a teacher: log-probs only."""

from verlite.controller.dispatch import register
from verlite.protocol.data import DataProto
from verlite.protocol.ragged import ragged
from verlite.spec.roles import ReferenceSpec
from verlite.workers.training import TrainingWorker


class ReferenceWorker(TrainingWorker):
    """One rank of a frozen model. It has no optimizer, so its weights cannot change."""

    spec: ReferenceSpec

    @register("split", keep_remote=("ref_log_prob",), fetch=False)
    def log_probs(self, batch: DataProto) -> DataProto:
        """Return ragged ref_log_prob of the responses."""
        rows = self.rank_rows.padded(batch)
        self.engine.onload()
        out = self.forward(rows, self.spec.micro, self.spec.temperature)
        self.engine.offload()
        self.rank_rows.clear()  # this is the role's only call in a step
        log_probs = ragged(out["log_probs"], rows.batch["response_length"])
        return DataProto.from_dict({}, {"ref_log_prob": log_probs})
