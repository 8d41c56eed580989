"""The base of actor and inference workers, which both compute log-probs under the policy."""

import torch

from verlite import progress
from verlite.algorithms.gap import gap_rows
from verlite.controller.dispatch import register
from verlite.engine import reference_client
from verlite.protocol.branches import split
from verlite.protocol.data import DataProto
from verlite.protocol.ragged import ragged
from verlite.spec.roles import ActorSpec, InferenceSpec, ReferenceServiceSpec
from verlite.workers.training import TrainingWorker


class LogProbWorker(TrainingWorker):
    """One rank of the policy. Its engine has the weights that sampled the step's responses."""

    spec: ActorSpec | InferenceSpec

    def check_version(self, batch: DataProto) -> None:
        """Raise an error if the engine has other weights than the batch needs. The actor's are
        always the newest."""

    @register("split", keep_remote=("old_log_probs", "entropys", "sum_pi_squared"), fetch=False)
    def log_probs(self, batch: DataProto) -> DataProto:
        """Compute log-probs of the responses under the current policy.

        Returns:
            Ragged old_log_probs, entropys and, if the estimator needs it, sum_pi_squared;
            entropy_sums [b], and gap_sums [b, G] between these log-probs and those of the rollout
            engine.
        """
        self.check_version(batch)
        rows = self.rank_rows.padded(batch)
        self.engine.onload()
        out = self.forward(
            rows,
            self.spec.log_probs.micro,
            self.spec.temperature,
            with_entropy=True,
            with_sum_pi_squared=self.spec.log_probs.needs_sum_pi_squared,
        )
        self.engine.offload()
        t = rows.batch
        sums = {
            "entropy_sums": out["entropy"].double().sum(1),
            "gap_sums": gap_rows(out["log_probs"], t["rollout_log_probs"], t["response_mask"]),
        }
        columns = {
            "old_log_probs": ragged(out["log_probs"], t["response_length"]),
            "entropys": ragged(out["entropy"], t["response_length"]),
        }
        if self.spec.log_probs.needs_sum_pi_squared:
            columns["sum_pi_squared"] = ragged(out["sum_pi_squared"], t["response_length"])
        return DataProto.from_dict(sums, columns)

    @register("split", keep_remote=("ref_log_prob",), fetch=False)
    def reference_log_probs(self, batch: DataProto) -> DataProto:
        """Return ragged ref_log_prob of the responses under the policy without its adapters."""
        rows = self.rank_rows.padded(batch)
        micro = self.spec.log_probs.reference_micro
        assert micro is not None
        self.engine.onload()
        with self.engine.without_adapters():
            out = self.forward(rows, micro, self.spec.temperature)
        self.engine.offload()
        log_probs = ragged(out["log_probs"], rows.batch["response_length"])
        return DataProto.from_dict({}, {"ref_log_prob": log_probs})

    @register("split", keep_remote=("ref_log_prob",), fetch=False)
    def remote_log_probs(
        self, batch: DataProto, service: ReferenceServiceSpec, model: str
    ) -> DataProto:
        """Return ragged ref_log_prob of the responses, computed by a reference service.

        model: the ModelInfo.model that the answers must have.

        Raises:
            ReferenceUnavailable, WrongReference: see engine/reference_client.py.
        """
        rows = self.rank_rows.padded(batch)
        sequences, places = split(rows)
        t = sequences.batch
        # As in the engine, rows without a counted token are not computed.
        counted = t["response_mask"].any(-1).nonzero().flatten().tolist()
        attended = t["attention_mask"].bool()
        ids = [t["input_ids"][i][attended[i]].numpy() for i in counted]
        lengths = t["response_length"].flatten().tolist()
        with progress.waiting_for(f"the {service.name}"):
            found = reference_client.log_probs(
                service,
                ids,
                [lengths[i] for i in counted],
                self.spec.temperature,
                model,
            )
        log_probs = torch.zeros(t["response_mask"].shape)
        for i, values in zip(counted, found, strict=True):
            log_probs[i, : lengths[i]] = torch.from_numpy(values.copy())
        log_probs *= t["response_mask"]
        whole = log_probs if places is None else places.put(log_probs)
        column = ragged(whole, rows.batch["response_length"])
        return DataProto.from_dict({}, {"ref_log_prob": column})
