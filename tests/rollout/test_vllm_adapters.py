"""The vLLM engine with rollout.lora_sync=adapter: the base model once, then only adapters.

The module shares one engine, because starting vLLM takes 20 seconds.
"""

import copy
import dataclasses
import itertools
import json
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.models import tiny_model
from tests.rollout.oracle import ask, float64_model, largest_gap, naive_log_probs, weights_of
from verlite.rollout.batched import build_engine
from verlite.rollout.types import EngineError, Sampling, WeightSyncError
from verlite.spec.roles import GenerationSpec, ModelSpec
from verlite.weights.fingerprint import combine, fingerprint, settle
from verlite.weights.probe import Probe, probe_ids, probe_limit

pytest.importorskip("vllm", reason="vLLM is an optional dependency")

from verlite.rollout.engines.vllm import VLLMCore, _max_lora_rank
from verlite.rollout.engines.vllm_worker import _adapter_parts, adapter_request, combine_shards

pytestmark = pytest.mark.process

LONG = Sampling(max_tokens=20, ignore_eos=True)
PROMPTS = [list(range(4, 110))] * 4  # equal prompts longer than a block of the prefix cache
SAMPLINGS = [dataclasses.replace(LONG, seed=i) for i in range(4)]
RANK = 6
ROLLOUT = GenerationSpec(
    enforce_eager=True,
    kv_cache_gb=0.25,
    max_num_seqs=32,
    engine_kwargs={"vllm": {"block_size": 32}},
    syncs_adapters=True,
)


class Policy(NamedTuple):
    """adapters: A and s B by their names in a sync. merged: the model with them, in float64."""

    adapters: dict[str, Tensor]
    merged: PreTrainedModel


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> PreTrainedModel:
    """Tied embeddings, shared KV heads and biases."""
    sizes = dict(hidden_size=128, vocab_size=130, initializer_range=0.05, tie_word_embeddings=True)
    return float64_model(tiny_model(tmp_path_factory.mktemp("adapters"), "qwen2", **sizes))


@pytest.fixture(scope="module")
def policies(base) -> list[Policy]:
    return [adapted(base, seed) for seed in range(3)]


def adapted(base: PreTrainedModel, seed: int) -> Policy:
    """Return random adapters of all linear layers but the head, with a scale of 1.5."""
    generator = torch.Generator().manual_seed(seed)
    merged = copy.deepcopy(base)
    adapters = {}
    for name, module in merged.model.named_modules():
        if isinstance(module, torch.nn.Linear):
            a = 0.2 * torch.randn(RANK, module.in_features, generator=generator)
            b = 0.2 * torch.randn(module.out_features, RANK, generator=generator)
            adapters[f"model.{name}.lora_A.weight"] = a
            adapters[f"model.{name}.lora_B.weight"] = 1.5 * b
            with torch.no_grad():
                module.weight += 1.5 * (b.double() @ a.double())
    return Policy(adapters, merged)


@pytest.fixture(scope="module")
def engine(base):
    model = ModelSpec(path=base.name_or_path, lora_rank=RANK, lora_alpha=9)
    engine = build_engine("vllm", model, ROLLOUT, 160, torch.device("cpu"), seed=1)
    yield engine
    engine.close()


def expected(base, policy: Policy) -> int:
    return combine(fingerprint(weights_of(base)), fingerprint(policy.adapters.items()))


def load(engine, base, policy: Policy, sent=None, with_base=False) -> None:
    """Sync, under the fingerprint of `policy`, the adapters `sent`; None: the policy's own."""
    named = (policy.adapters if sent is None else sent).items()
    if with_base:
        named = itertools.chain(named, weights_of(base))
    engine.load_weights(iter(named), engine.version + 1, expected(base, policy))


@pytest.fixture
def synced(engine, base, policies):
    """The shared engine with the base model and the first policy's adapters."""
    load(engine, base, policies[0], with_base=True)
    return engine


def gap_to(policy: Policy, engine) -> float:
    return largest_gap(policy.merged, PROMPTS, ask(engine, PROMPTS, *SAMPLINGS), LONG)


def test_log_probs_are_those_of_the_merged_weights(synced, base, policies):
    """First with the base model, then with adapters alone, and once more with both. No version has
    anything of another: the prompts are long, equal, and in the prefix cache."""
    answers = []
    for policy in (*policies, policies[0]):
        load(synced, base, policy)
        answers.append(ask(synced, PROMPTS, *SAMPLINGS))
        assert largest_gap(policy.merged, PROMPTS, answers[-1], LONG) < 1e-5
        assert synced.fingerprint() == expected(base, policy)
    ids = [[answer.ids for answer in found] for found in answers]
    assert ids[0] == ids[3] != ids[1] != ids[2]
    load(synced, base, policies[1], with_base=True)
    assert gap_to(policies[1], synced) < 1e-5


def reusing(number):
    """Return a replacement of VLLMCore._next_adapter that gives every version the same adapter."""
    return lambda self: adapter_request(number)


def test_adapter_numbers_are_never_reused(synced, base, policies, monkeypatch):
    """A failed sync uses one up too. vLLM would keep an adapter whose number it has."""
    numbers = []
    for policy in policies[1:]:
        load(synced, base, policy)
        numbers.append(synced._call(lambda core: core._adapter.lora_int_id))
        assert synced._call(lambda core: core.engine.list_loras()) == {numbers[-1]}
    with pytest.raises(WeightSyncError):
        load(synced, base, policies[0], sent={})
    load(synced, base, policies[0])
    numbers.append(synced._call(lambda core: core._adapter.lora_int_id))
    assert numbers[1] == numbers[0] + 1 and numbers[2] == numbers[1] + 2

    monkeypatch.setattr(VLLMCore, "_next_adapter", reusing(numbers[2]))
    worker = synced._call(lambda core: core.engine.model_executor.driver_worker.worker)
    monkeypatch.setattr(worker, "list_loras", lambda: ())
    with pytest.raises(WeightSyncError, match="from before the sync"):
        load(synced, base, policies[1])


def test_a_new_name_alone_keeps_versions_apart(synced, base, policies, monkeypatch):
    """Without the reset of the prefix cache, versions mix if the name is reused, and only then."""
    monkeypatch.setattr(VLLMCore, "reset_caches", lambda self: None)
    for policy in policies[1:]:
        load(synced, base, policy)
        assert gap_to(policy, synced) < 1e-5
    monkeypatch.setattr(VLLMCore, "_next_adapter", reusing(10**6))
    load(synced, base, policies[0])
    assert gap_to(policies[0], synced) < 1e-5
    load(synced, base, policies[1])
    assert gap_to(policies[1], synced) > 1e-2


def changed(adapters, change):
    return {name: change(name, tensor) for name, tensor in adapters.items()}


def swapped(adapters):
    """A under B's name and the other way round."""
    turned = {"lora_A": "lora_B", "lora_B": "lora_A"}
    return {
        name.replace(key, turned[key]): tensor
        for name, tensor in adapters.items()
        for key in turned
        if key in name
    }


FAULTS = {
    "scale lost": (lambda a: changed(a, lambda n, t: t / 1.5 if "_B" in n else t), "fingerprint"),
    "A and B swapped": (swapped, "rank 128 is greater"),
    "an adapter lost": (lambda a: dict(itertools.islice(a.items(), 2, None)), "fingerprint"),
    "one value": (
        lambda a: changed(a, lambda n, t: t * (1 + 1e-6) if "1.mlp.down_proj" in n else t),
        "fingerprint",
    ),
    "unknown layer": (
        lambda a: a | {"model.layers.0.nobody.lora_A.weight": torch.ones(RANK, 128)},
        "nobody",
    ),
    "no adapters": (lambda a: {}, "has no adapters"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_adapters_are_refused(synced, base, policies, fault):
    damage, message = FAULTS[fault]
    version = synced.version
    with pytest.raises(WeightSyncError, match=message):
        load(synced, base, policies[1], sent=damage(policies[1].adapters))
    assert synced.version == version
    with pytest.raises(EngineError, match=f"weight version {version}.*refuses.*sync again"):
        ask(synced, [[5]], LONG)
    load(synced, base, policies[1], with_base=True)
    assert gap_to(policies[1], synced) < 1e-5


def test_adapters_on_another_base_model_are_refused(synced, base, policies):
    other = [(name, tensor * (1 + 1e-6)) for name, tensor in weights_of(base)]
    named = itertools.chain(policies[1].adapters.items(), other)
    with pytest.raises(WeightSyncError, match="fingerprint"):
        synced.load_weights(named, synced.version + 1, expected(base, policies[1]))


def test_probe_reveals_adapters_in_each_others_place(synced, base, policies):
    """The fingerprint cannot: it is a sum."""
    ids = probe_ids(130, 40)
    log_probs = naive_log_probs(policies[1].merged, ids[:1], ids[1:], Sampling())
    probe = Probe(tuple(ids), tuple(log_probs), probe_limit(0.05, "float32"))
    load(synced, base, policies[1])
    assert synced.check_log_probs(probe).nats < 1e-5
    turned = {"layers.0": "layers.1", "layers.1": "layers.0"}
    exchanged = {
        name.replace(key, turned[key]): tensor
        for name, tensor in policies[1].adapters.items()
        for key in turned
        if key in name
    }
    load(synced, base, policies[1], sent=exchanged)
    with pytest.raises(WeightSyncError, match="computes other log-probs"):
        synced.check_log_probs(probe)


def test_a_model_whose_embedding_and_head_vllm_wraps(tmp_path):
    """vLLM prepares Llama's embedding and output layer for adapters too."""
    sizes = dict(hidden_size=128, vocab_size=130, initializer_range=0.05)
    base = float64_model(tiny_model(tmp_path, "llama", **sizes))
    model = ModelSpec(path=str(tmp_path), lora_rank=RANK)
    engine = build_engine("vllm", model, ROLLOUT, 160, torch.device("cpu"), seed=1)
    try:
        for seed in range(2):
            policy = adapted(base, seed)
            load(engine, base, policy, with_base=seed == 0)
            assert gap_to(policy, engine) < 1e-5
    finally:
        engine.close()


def test_workers_that_share_key_value_heads_count_them_once():
    """B of q is sharded over four workers; those of k and v over two pairs of workers."""
    q, k, v, a = (torch.randn(rows, 4) for rows in (8, 4, 4, 4))

    def layer(worker):
        q_rows = q[worker * 2 : worker * 2 + 2]
        k_rows, v_rows = (b[worker // 2 * 2 : worker // 2 * 2 + 2] for b in (k, v))
        return SimpleNamespace(
            base_layer=SimpleNamespace(num_kv_head_replicas=2),
            lora_a_stacked=(a, a, a),
            lora_b_stacked=(q_rows, k_rows, v_rows),
        )

    parts = [settle(_adapter_parts("qkv", layer(r), r, torch.float32)) for r in range(4)]
    named = {"q": q, "k": k, "v": v, "a": a, "a2": a, "a3": a}
    assert combine_shards(parts) == fingerprint(named.items())


@pytest.mark.parametrize("rank, legal", [(1, 1), (6, 8), (33, 64), (512, 512)])
def test_max_lora_rank_is_the_smallest_that_fits(rank, legal, tmp_path):
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"r": 1, "rank_pattern": {"q_proj": rank}})
    )
    for model in (ModelSpec("x", lora_rank=rank), ModelSpec("x", lora_adapter_path=str(tmp_path))):
        assert _max_lora_rank(model) == legal
    with pytest.raises(ValueError, match="up to rank 512, and these have rank 513"):
        _max_lora_rank(ModelSpec("x", lora_rank=513))
