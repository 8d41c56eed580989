"""Generation behind Ray: one engine per worker, hundreds of trajectories at once."""

import asyncio

import numpy as np
import torch

from verlite.config.plan import Plan
from verlite.config.schema import Config
from verlite.controller.dispatch import register
from verlite.controller.worker import Worker
from verlite.protocol.data import DataProto
from verlite.protocol.weights import read_buckets
from verlite.rollout.build import build_engine
from verlite.rollout.trajectory import Request, run_all
from verlite.workers.actor import Export


class RolloutWorker(Worker):
    """One generation engine."""

    def __init__(self, config: Config, plan: Plan):
        policy = config.actor_rollout_ref
        self.config = config
        self.engine = build_engine(plan.rollout_name, policy.model, policy.rollout, plan.max_model_len, self.device, policy.rollout.seed)

    @register("split")
    def generate(self, requests: DataProto, sleep_after: bool) -> DataProto:
        """Ragged answers to [b] requests: response_ids, response_mask, rollout_log_probs as arrays a row; status, error, turns, version."""
        columns = requests.non_tensor_batch
        wanted = [Request(ids, sampling) for ids, sampling in zip(columns["prompt_ids"], columns["sampling"], strict=True)]
        trajectories = asyncio.run(run_all(self.engine, wanted))
        if sleep_after:
            self.engine.sleep()
        return DataProto.from_dict(
            {
                "turns": torch.tensor([t.turns for t in trajectories], dtype=torch.int64),
                "weight_version": torch.tensor(
                    [t.weight_versions[-1] if t.weight_versions else -1 for t in trajectories], dtype=torch.int64
                ),
            },
            {
                "response_ids": [np.asarray(t.response_ids, dtype=np.int64) for t in trajectories],
                "response_mask": [np.asarray(t.response_mask, dtype=np.int8) for t in trajectories],
                "rollout_log_probs": [np.asarray(t.log_probs, dtype=np.float32) for t in trajectories],
                "status": [str(t.status) for t in trajectories],
                "error": [t.error for t in trajectories],
            },
        )

    @register("all")
    def load_weights(self, exports: list[Export], version: int) -> None:
        """Load this node's copy of the trainer's weights, compare fingerprints, reset caches, and only then take the version."""
        mine = next((e for e in exports if e.paths and e.node_id == self.node_id), None)
        if mine is None:
            raise RuntimeError(f"no actor rank on node {self.node_id} wrote weights there: place the actor on every node of the rollout")
        self.engine.load_weights(read_buckets(mine.paths), version, mine.fingerprint)

    def close(self) -> None:
        """End the engine and its processes, whose shared memory would otherwise outlive them."""
        if hasattr(self, "engine"):  # not if it failed to start
            self.engine.close()
        super().close()

    @register("all")
    def wake(self, what: str) -> None:
        """Bring back what sleep freed: "weights" or "kv_cache"."""
        self.engine.wake(what)
