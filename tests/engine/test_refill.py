"""An engine with another engine's weights computes what the other one does, bit for bit."""

from pathlib import Path

import pytest
import torch

from tests.engine import programs
from tests.engine.batches import engine
from tests.engine.ranks import Ranks
from tests.engine.test_loading import ARCHITECTURES
from tests.models import tiny_model

pytestmark = pytest.mark.process

MODELS = ARCHITECTURES | {"gpt2": {}, "qwen2": {}, "llama": {"tie_word_embeddings": True}}


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("arch", MODELS)
def test_log_probs_equal_those_of_the_trainer(arch: str, compute: str, tmp_path: Path) -> None:
    """The trainer holds float32, the other engine its compute dtype, and float32 or the compute
    dtype travels. Tied, renamed and fused weights; a buffer that stays float32."""
    path = tiny_model(tmp_path, arch, **MODELS[arch])
    for sent in {compute, "float32"}:
        found = programs.refilled(path, compute, sent)
        assert found["fingerprints"][0] == found["fingerprints"][1] != found["before"]
        for trainers, own in found["log_probs"]:
            assert torch.equal(trainers, own)
        assert not torch.equal(found["log_probs"][0][0], found["log_probs_before"])


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_adapters_alone_are_enough(compute: str, tiny_qwen2: str) -> None:
    """With LoRA also the reference, which is the model without adapters, is equal."""
    found = programs.refilled(tiny_qwen2, compute, compute, lora_rank=4, lora_alpha=12)
    assert found["fingerprints"][0] == found["fingerprints"][1] != found["before"]
    (trainers, own), (trainers_reference, own_reference) = found["log_probs"]
    assert torch.equal(trainers, own) and torch.equal(trainers_reference, own_reference)
    assert not torch.equal(trainers, trainers_reference)


@pytest.mark.parametrize("fault", [None, "one shard", "exchanged shards"])
def test_each_rank_copies_its_own_shard(
    fault: str | None, tiny_qwen2: str, two_ranks: Ranks
) -> None:
    """If all ranks copy the first shard, the fingerprint differs. If they exchange their shards,
    only the log-prob probe can tell."""
    for found in two_ranks.call(programs.refilled_with, tiny_qwen2, fault):
        assert (found["fingerprints"][0] == found["fingerprints"][1]) == (fault != "one shard")
        assert (found["gap"] == 0) == (fault is None)
        assert fault is None or found["gap"] > 0.05


def test_missing_unknown_and_misshapen_weights_are_named(tiny_qwen2: str) -> None:
    trainer, other = engine(tiny_qwen2, train=True), engine(tiny_qwen2)
    weights = dict(trainer.export())
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(ValueError, match="the model has no weight called x.weight"):
        other.load_weights((weights | {"x.weight": torch.ones(2)}).items())
    with pytest.raises(ValueError, match=rf"{name} has shape \[32, 64\], .* \[64, 32\]"):
        other.load_weights((weights | {name: weights[name].t()}).items())
    del weights[name]
    with pytest.raises(ValueError, match=f"1 weights are missing, such as {name}"):
        other.load_weights(weights.items())
