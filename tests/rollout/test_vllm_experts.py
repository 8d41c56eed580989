"""Mixtures of experts in vLLM on a CPU, whose kernel has a layout of its own for experts.

The oracle is transformers in float64. Each family has an engine, which takes seconds to start.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.models import tiny_model
from tests.rollout.oracle import ask, float64_model, largest_gap, moved
from verlite.rollout.batched import build_engine
from verlite.rollout.types import Sampling, WeightSyncError
from verlite.spec.roles import GenerationSpec, ModelSpec
from verlite.weights.fingerprint import fingerprint

pytest.importorskip("vllm", reason="vLLM is an optional dependency")

pytestmark = pytest.mark.process

LONG = Sampling(max_tokens=12, ignore_eos=True)
PROMPTS = [[4 + (7 * i + j * j) % 120 for j in range(3 + i)] for i in range(8)]
FAMILIES = {
    # vLLM pads 48 to 64 for its kernel.
    "qwen2_moe": dict(
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=96,
    ),
    "qwen3_moe": dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64, head_dim=32),
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=2),
}


def saved(model: torch.nn.Module, folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights as transformers writes them: float32, one matrix per expert."""
    model.float().save_pretrained(folder)
    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module", params=FAMILIES)
def synced(request, tmp_path_factory):
    """An engine, the model that it has after a sync, and a folder."""
    folder = tmp_path_factory.mktemp("experts")
    sizes = dict(hidden_size=128, initializer_range=0.1) | FAMILIES[request.param]
    path = tiny_model(folder / "model", request.param, **sizes)
    rollout = GenerationSpec(enforce_eager=True, kv_cache_gb=0.25, max_num_seqs=16)
    engine = build_engine("vllm", ModelSpec(path=path), rollout, 64, torch.device("cpu"), seed=1)
    yield engine, float64_model(path), folder
    engine.close()


def test_log_probs_after_several_syncs_are_transformers(synced):
    engine, model, folder = synced
    for version in range(3):
        weights = saved(moved(model, 0.3, seed=version), folder / "moved")
        engine.load_weights(iter(weights.items()), engine.version + 1, fingerprint(weights.items()))
        answers = ask(engine, PROMPTS, LONG)
        assert largest_gap(float64_model(folder / "moved"), PROMPTS, answers, LONG) < 2e-5


@pytest.mark.parametrize("synced", ["qwen3_moe"], indirect=True)
def test_experts_that_a_reload_does_not_pack_are_detected(synced, monkeypatch):
    """Packing reorders values, so the fingerprint of unpacked experts is the trainer's."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    engine, model, folder = synced
    weights = saved(moved(model, 0.3), folder / "moved")
    with monkeypatch.context() as patch:
        patch.setattr(CPUUnquantizedExperts, "process_weights_after_loading", lambda self, layer: 0)
        with pytest.raises(WeightSyncError, match="experts that differ from those it was given"):
            engine.load_weights(
                iter(weights.items()), engine.version + 1, fingerprint(weights.items())
            )
    engine.load_weights(iter(weights.items()), engine.version + 1, fingerprint(weights.items()))
