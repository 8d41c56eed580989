"""Real actor and inference workers in one process: a sync, and the same log-probs on both."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.engine.batches import R, ragged_batch
from verlite.config import make_plan
from verlite.config.compile import role_spec
from verlite.config.schema import Config, DataConfig, ModelConfig
from verlite.engine.checkpoint import local_part
from verlite.protocol.data import DataProto
from verlite.rollout.types import WeightSyncError
from verlite.weights.transport import Offer
from verlite.workers.actor import ActorWorker
from verlite.workers.inference import InferenceWorker
from verlite.workers.reference import ReferenceWorker

pytestmark = pytest.mark.process


@pytest.fixture(autouse=True)
def one_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Rows:
    """Stands for the rows that a worker has fetched."""

    def padded(self, batch: DataProto) -> DataProto:
        rows = ragged_batch()
        lengths = rows.batch["attention_mask"][:, -R:].sum(1)
        return rows.with_batch(response_length=lengths, rollout_log_probs=torch.zeros(len(rows), R))

    def clear(self) -> None:
        """Forget nothing."""


def worker(role, config, plan):
    """Build a role's worker as the only rank, without Ray."""
    kind = {"actor": ActorWorker, "inference": InferenceWorker, "ref": ReferenceWorker}[role]
    made = kind.__new__(kind)
    made.rank, made.world_size = 0, 1
    made._spec = SimpleNamespace(device_kind="cpu", address="127.0.0.1")
    made.__init__(role_spec(role, config, plan, 1))
    made.rank_rows = Rows()
    return made


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_inference_computes_what_the_actor_would(lora_rank, tiny_qwen2):
    """Also the reference's log-probs: with LoRA without the adapters, otherwise by the role ref."""
    config = Config(data=DataConfig(train_files="x"))
    config.actor_rollout_ref.model = ModelConfig(path=tiny_qwen2, lora_rank=lora_rank)
    config.actor_rollout_ref.actor.use_kl_loss = True
    config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu = 3
    config.actor_rollout_ref.rollout.name = "hf"
    config.algorithm.adv_estimator = "grpo"
    config.trainer.n_gpus_per_node = 3
    config.cluster.component_placement = {"rollout": "0", "inference": "1", "actor": "2"}
    plan = make_plan(config, "cpu", count_rows=False)
    actor, inference = worker("actor", config, plan), worker("inference", config, plan)
    batch = DataProto.from_dict({}, {}, {"version": 1, "step": 1})
    reference = inference if lora_rank else worker("ref", config, plan)
    call = reference.reference_log_probs if lora_rank else reference.log_probs
    before = call(batch).non_tensor_batch["ref_log_prob"]
    with torch.no_grad():
        for parameter in actor.engine.parameters:
            local_part(parameter).add_(0.05 * torch.randn(parameter.shape))
    with pytest.raises(WeightSyncError, match="no weight sync has reached it"):
        inference.log_probs(batch)

    offer: Offer = actor.offer_weights(1, 0.005, plan.weights)
    inference.load_weights(offer, [actor.publish_weights(offer)])
    actor.release_weights()

    expected, found = actor.log_probs(batch), inference.log_probs(batch)
    assert (found.batch["entropy_sums"] == expected.batch["entropy_sums"]).all()
    assert (found.batch["gap_sums"] == expected.batch["gap_sums"]).all()
    columns = [answer.non_tensor_batch["old_log_probs"] for answer in (expected, found)]
    for actors, own, at_start in zip(*columns, before, strict=True):
        assert (actors == own).all() and (own != at_start).any() == actors.any()
    after = call(batch).non_tensor_batch["ref_log_prob"]
    assert all((a == b).all() for a, b in zip(before, after, strict=True))
    actor.offer_weights(2, None, plan.weights)
    with pytest.raises(WeightSyncError, match=r"version 1\) refuses .* from version 2"):
        inference.log_probs(batch.with_meta(version=2))
