"""Log-probs on devices of their own: a second copy of the policy, with weights from the actor."""

from pathlib import Path

import torch

from verlite.controller.dispatch import register
from verlite.protocol.data import DataProto
from verlite.rollout.types import WeightSyncError
from verlite.spec.roles import InferenceSpec
from verlite.weights.probe import gap
from verlite.weights.transport import Export, Offer
from verlite.workers.log_probs import LogProbWorker
from verlite.workers.weight_reader import WeightReader


class InferenceWorker(LogProbWorker):
    """One rank of the policy's copy. It has no optimizer, and computes what the actor would.

    version: of its weights. None before the first sync.
    """

    spec: InferenceSpec

    def __init__(self, spec: InferenceSpec) -> None:
        super().__init__(spec)
        self.version: int | None = None
        self._not_ready: str | None = "no weight sync has reached it"
        self._dtype: torch.dtype = getattr(torch, spec.dtype)
        folder = Path(spec.run_dir, "weights")
        self._reader = WeightReader("inference", self.rank, folder, self.device)

    def check_version(self, batch: DataProto) -> None:
        """Raise WeightSyncError if the weights are not of the version in meta_info."""
        needed = batch.meta_info["version"]
        reason = self._not_ready
        if reason is None and self.version != needed:
            reason = f"the step's responses are from version {needed}"
        if reason is not None:
            raise WeightSyncError(
                f"inference (weight version {self.version}) refuses to compute log-probs: {reason}"
            )

    @register("all")
    def fetch_weights(self, offers: list[Offer]) -> Export:
        """Receive this node's copy of the weights while the actor publishes them.

        offers: of the actor's ranks.

        Returns:
            The copy, if this rank received it.
        """
        return self._reader.receive(offers)

    @register("all")
    def load_weights(self, offer: Offer, exports: list[Export]) -> None:
        """Load the published weights as the offer's version: each rank copies its own shards.

        offer: of the version. exports: of all processes; one has the copy of this node.

        Raises:
            WeightSyncError: the weights have another fingerprint than the actor's or, if the offer
                has a log-prob probe, give other log-probs. The version stays what it was, and
                log-probs are refused until a sync succeeds.
        """
        self._not_ready = f"the sync to version {offer.version} did not complete; sync again"
        self.rank_rows.clear()  # of the step before
        self.engine.onload()
        adapters = self.spec.engine.model.trains_adapters
        self.engine.load_weights(self._reader.published(offer, exports, trained=adapters))
        found = self.engine.own_fingerprint(self._dtype)
        if found != offer.own_fingerprint:
            raise WeightSyncError(
                f"sync to weight version {offer.version}: the weights of inference have "
                f"fingerprint {found:08x}; the actor's is {offer.own_fingerprint:08x}"
            )
        if offer.probe is not None:
            own = self.engine.probe(offer.probe.limit, self.spec.max_model_len)
            difference = gap(offer.probe, own.log_probs)
            if not difference.is_within(offer.probe.limit):
                raise WeightSyncError(
                    f"sync to weight version {offer.version}: inference has the actor's weights, "
                    f"but computes other log-probs with them: over {len(own.log_probs)} tokens the "
                    f"difference is {difference}. A shard may be in the place of another"
                )
        self.engine.offload()
        self.version = offer.version
        self._not_ready = None

    @register("all")
    def release_weights(self) -> None:
        """Free this node's copy, after all its readers have loaded it."""
        self._reader.release()
