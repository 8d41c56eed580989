"""The log-prob probe of a weight sync: equal weights pass, weights in a wrong place do not."""

import math
from dataclasses import replace

import pytest
import torch

from tests.engine import programs
from tests.engine.batches import engine as train_engine
from tests.engine.ranks import Ranks
from tests.models import tiny_model
from tests.rollout.oracle import ask, float64_model, naive_log_probs
from verlite.engine import lora
from verlite.engine.fsdp import TrainEngine
from verlite.rollout.batched import BatchedEngine, build_engine
from verlite.rollout.types import EngineError, Sampling, WeightSyncError
from verlite.spec.roles import GenerationSpec, ModelSpec
from verlite.weights.probe import Gap, Probe, gap, probe_ids, probe_limit

pytestmark = pytest.mark.process

GAP_LIMIT = 0.05  # that of dense models
MAX_LENGTH = 64
Weights = dict[str, torch.Tensor]


def rollout_engine(path: str, dtype: str) -> BatchedEngine:
    return build_engine(
        "hf", ModelSpec(path=path), GenerationSpec(dtype=dtype), MAX_LENGTH, torch.device("cpu"), 0
    )


def load(engine: BatchedEngine, trainer: TrainEngine, weights: Weights, version: int) -> None:
    """Load under the trainer's fingerprint, which the weights have in whatever order."""
    dtype = next(iter(weights.values())).dtype
    engine.load_weights(iter(weights.items()), version, trainer.fingerprint(dtype))


def exported(trainer: TrainEngine, dtype: str) -> Weights:
    return dict(trainer.export(getattr(torch, dtype)))


@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "llama", "gpt2"])
@pytest.mark.parametrize(
    "dtypes", [("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "float16")], ids=str
)
def test_equal_weights_pass(arch, dtypes, tmp_path):
    trained, generated = dtypes
    path = tiny_model(tmp_path, arch)
    trainer, engine = train_engine(path, dtype=trained), rollout_engine(path, generated)
    weights = exported(trainer, generated)
    load(engine, trainer, weights, 1)
    probe = trainer.probe(probe_limit(GAP_LIMIT, *dtypes), MAX_LENGTH)
    found = engine.check_log_probs(probe)
    engine.close()
    assert found.relative < probe.limit / 2 and engine.version == 1


def test_probe_has_the_models_log_probs(tiny_qwen2):
    probe = train_engine(tiny_qwen2).probe(1.0, MAX_LENGTH)
    first, *rest = probe.ids
    expected = naive_log_probs(float64_model(tiny_qwen2), [first], rest, Sampling())
    assert len(rest) == 31 and probe.log_probs == pytest.approx(expected, abs=1e-4)
    assert gap(probe, expected).nats < 1e-5
    assert len(train_engine(tiny_qwen2).probe(1.0, max_length=9).ids) == 8


def exchanged(weights: Weights, a: str, b: str) -> Weights:
    return weights | {a: weights[b], b: weights[a]}


def shards_in_another_order(weights: Weights, name: str, dim: int) -> Weights:
    first, second = weights[name].chunk(2, dim)
    return weights | {name: torch.cat([second, first], dim)}


ATTENTION, MLP = "model.layers.0.self_attn.", "model.layers.0.mlp."
FAULTS = {
    "two layers exchanged": lambda w: exchanged(
        w, MLP + "down_proj.weight", "model.layers.1.mlp.down_proj.weight"
    ),
    "k and v exchanged": lambda w: exchanged(
        w, ATTENTION + "k_proj.weight", ATTENTION + "v_proj.weight"
    ),
    "gate and up exchanged": lambda w: exchanged(
        w, MLP + "gate_proj.weight", MLP + "up_proj.weight"
    ),
    "norms exchanged": lambda w: exchanged(
        w, "model.layers.0.input_layernorm.weight", "model.layers.1.input_layernorm.weight"
    ),
    "square weight transposed": lambda w: (
        w | {ATTENTION + "o_proj.weight": w[ATTENTION + "o_proj.weight"].t().contiguous()}
    ),
    "order of column shards": lambda w: shards_in_another_order(w, ATTENTION + "q_proj.weight", 0),
    "order of row shards": lambda w: shards_in_another_order(w, MLP + "down_proj.weight", 1),
    "order of vocabulary shards": lambda w: shards_in_another_order(w, "lm_head.weight", 0),
}


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def synced(request, tiny_qwen2):
    """A trainer, an engine with its weights in a dtype, and the probe."""
    dtype = request.param
    trainer, engine = train_engine(tiny_qwen2, dtype=dtype), rollout_engine(tiny_qwen2, dtype)
    load(engine, trainer, exported(trainer, dtype), 1)
    yield trainer, engine, trainer.probe(probe_limit(GAP_LIMIT, dtype), MAX_LENGTH), dtype
    engine.close()


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_that_the_fingerprint_cannot_see(synced, fault):
    trainer, engine, probe, dtype = synced
    weights, before = exported(trainer, dtype), engine.version
    load(engine, trainer, FAULTS[fault](weights), before + 1)  # the fingerprint is equal
    with pytest.raises(WeightSyncError, match="computes other log-probs") as caught:
        engine.check_log_probs(probe)
    assert engine.version == before and f"stays at version {before}" in str(caught.value)
    with pytest.raises(EngineError, match="sync again"):
        ask(engine, [[5, 6]], Sampling())
    load(engine, trainer, weights, before + 1)
    engine.check_log_probs(probe)
    assert engine.version == before + 1


EXPERTS = dict(num_experts=16, num_experts_per_tok=1, moe_intermediate_size=32, head_dim=8)


def test_two_experts_in_each_others_place_are_detected(tmp_path):
    """Two of sixteen: most tokens visit neither, so the median is that of equal weights."""
    path = tiny_model(tmp_path, "qwen3_moe", **EXPERTS)
    trainer, engine = train_engine(path), rollout_engine(path, "float32")
    weights = exported(trainer, "float32")
    probe = trainer.probe(probe_limit(GAP_LIMIT, "float32"), 256)
    load(engine, trainer, weights, 1)
    assert engine.check_log_probs(probe).is_within(probe.limit / 100)
    one, other = (f"model.layers.1.mlp.experts.{i}." for i in (2, 3))
    for name in ("gate_proj", "up_proj", "down_proj"):
        weights = exchanged(weights, f"{one}{name}.weight", f"{other}{name}.weight")
    load(engine, trainer, weights, 2)  # the fingerprint is equal
    with pytest.raises(WeightSyncError, match=r"for one token in twenty; the limits are"):
        engine.check_log_probs(probe)
    assert engine.version == 1
    engine.close()


def test_probe_visits_every_expert(tmp_path):
    """32 tokens would leave out some."""
    sizes = EXPERTS | {"num_experts_per_tok": 2, "initializer_range": 0.02}
    trainer, seen = train_engine(tiny_model(tmp_path, "qwen3_moe", **sizes)), []
    for module in trainer.model.modules():
        if type(module).__name__ == "Qwen3MoeExperts":
            module.register_forward_pre_hook(lambda module, args: seen.append(args[1]))
    assert len(trainer.probe(1.0, 1000).ids) == 77
    assert [len(chosen.unique()) for chosen in seen] == [16, 16]
    assert [len(chosen[:32].unique()) for chosen in seen] != [16, 16]
    assert len(trainer.probe(1.0, max_length=40).ids) == 39


def test_a_lost_adapter_scale_is_detected(tiny_qwen2, monkeypatch):
    """The trainer hashes what it exports, so the fingerprint is equal."""
    trainer = train_engine(tiny_qwen2, train=True, lora_rank=4, lora_alpha=12)
    for name, parameter in trainer.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    engine = rollout_engine(tiny_qwen2, "float32")
    probe = trainer.probe(probe_limit(GAP_LIMIT, "float32"), MAX_LENGTH)
    load(engine, trainer, exported(trainer, "float32"), 1)
    engine.check_log_probs(probe)
    merged = lora.merged

    def without_scale(layer, dtype, device):
        with monkeypatch.context() as patch:
            patch.setattr(layer, "scaling", dict.fromkeys(layer.scaling, 1.0))
            return merged(layer, dtype, device)

    monkeypatch.setattr(lora, "merged", without_scale)
    load(engine, trainer, exported(trainer, "float32"), 2)
    with pytest.raises(WeightSyncError, match="computes other log-probs"):
        engine.check_log_probs(probe)
    assert engine.version == 1
    engine.close()


def test_a_skipped_bucket_is_detected(synced):
    trainer, engine, _, dtype = synced
    weights, before = exported(trainer, dtype), engine.version
    with pytest.raises(WeightSyncError, match="weights are missing"):
        load(engine, trainer, dict(list(weights.items())[3:]), before + 1)
    assert engine.version == before
    load(engine, trainer, weights, before + 1)


def test_probe_changes_no_random_number_and_no_sampled_token(tiny_qwen2):
    trainer = train_engine(tiny_qwen2)
    answers = []
    for probed in (False, True):
        engine = rollout_engine(tiny_qwen2, "float32")
        state = torch.get_rng_state()
        for version in (1, 2):
            load(engine, trainer, exported(trainer, "float32"), version)
            if probed:
                engine.check_log_probs(trainer.probe(1.0, MAX_LENGTH))
            answers.append(ask(engine, [[5, 6], [7], [8, 9]], Sampling(max_tokens=9)))
        assert torch.equal(torch.get_rng_state(), state)
        engine.close()
    assert answers[:2] == answers[2:]


def test_all_ranks_compute_the_same_probe(tiny_qwen2: str, two_ranks: Ranks):
    expected = train_engine(tiny_qwen2).probe(1.0, MAX_LENGTH)
    for probe in two_ranks.call(programs.probe, tiny_qwen2, MAX_LENGTH):
        assert probe.ids == expected.ids
        assert probe.log_probs == pytest.approx(expected.log_probs, abs=1e-5)


def test_gap_is_relative_to_the_spread_and_not_finite_values_fail():
    probe = Probe((1, 2, 3, 4), (-1.0, -2.0, -3.0), limit=0.1)
    spread = math.sqrt(2 / 3)
    expected = Gap(0.25, pytest.approx(0.25 / spread), pytest.approx(0.5 / spread))
    assert gap(probe, [-1.0, -2.25, -3.5]) == expected
    assert not gap(probe, [-1.0, math.nan, -3.0]).is_within(1e9)
    assert Gap(0, 0.1, 0.2).is_within(0.1)
    assert not Gap(0, 0.11, 0).is_within(0.1) and not Gap(0, 0, 0.21).is_within(0.1)
    with pytest.raises(ValueError):
        gap(probe, [-1.0, -2.0])
    assert gap(replace(probe, log_probs=(-1.0,) * 3), [-1.0, -1.5, -2.0]).relative > 1
    assert probe_ids(100) == probe_ids(100) and max(probe_ids(5)) < 5
    assert probe_limit(0.05, "float32", "float32") < probe_limit(0.05, "float32", "bfloat16")
