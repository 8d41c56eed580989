"""The hf engine: log-probs, tokens, finish reasons and weights."""

import dataclasses
import json
import random
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.models import tiny_model
from tests.rollout.oracle import (
    ask,
    float64_model,
    largest_gap,
    load,
    moved,
    naive_greedy,
    weights_of,
)
from verlite.rollout.batched import BatchedEngine, build_engine
from verlite.rollout.engines import hf
from verlite.rollout.engines.hf import HFCore
from verlite.rollout.types import EngineError, EngineOptions, Sampling, WeightSyncError
from verlite.spec.roles import GenerationSpec, ModelSpec
from verlite.weights.fingerprint import fingerprint

LONG = Sampling(max_tokens=24, ignore_eos=True)


def start(path: str, max_model_len: int = 128, pretrained: bool = True, **rollout) -> BatchedEngine:
    return build_engine(
        "hf",
        ModelSpec(path=path),
        GenerationSpec(**rollout),
        max_model_len,
        torch.device("cpu"),
        seed=1,
        pretrained=pretrained,
    )


def options(path: str, max_num_seqs: int = 4, max_model_len: int = 64) -> EngineOptions:
    """Return options of a Core with the checkpoint's weights."""
    return EngineOptions(
        ModelSpec(path=path),
        GenerationSpec(max_num_seqs=max_num_seqs),
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_model_len=max_model_len,
        seed=0,
        pretrained=True,
    )


def some_prompts(count: int, seed: int = 0, longest: int = 30) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(4, 128) for _ in range(rng.randrange(1, longest))] for _ in range(count)]


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return tiny_model(tmp_path_factory.mktemp("hf") / "qwen2", "qwen2", initializer_range=0.1)


@pytest.fixture(scope="module")
def model(path: str) -> PreTrainedModel:
    return float64_model(path)


@pytest.fixture(scope="module")
def engine(path: str):
    engine = start(path, max_num_seqs=64)
    yield engine
    engine.close()


ARCHITECTURES = {
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "one key-value head": ("qwen2", {"num_key_value_heads": 1}),
    "sliding window": ("mistral", {"sliding_window": 7}),
    "query norm": ("qwen3", {"head_dim": 8}),
    "fused experts": (
        "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
    ),
    "no key-value groups, learned positions": (
        "gpt2",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    ),
    "a window that only the mask has": (
        "qwen2_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "sliding_window": 7,
            "use_sliding_window": True,
            "max_window_layers": 1,
        },
    ),
    "soft caps and mixed windows, not cacheable here": (
        "gemma2",
        {"head_dim": 8, "sliding_window": 7, "query_pre_attn_scalar": 8},
    ),
    "state space, not cacheable here": ("mamba", {"state_size": 4, "num_hidden_layers": 2}),
}


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(0.7),
        Sampling(1.0),
        Sampling(1.3),
        Sampling(0.0),
        Sampling(0.8, top_p=0.7),
        Sampling(1.2, top_k=5),
        Sampling(1.0, 0.8, 9),
    ],
    ids=str,
)
def test_log_probs_equal_naive(engine, model, sampling):
    prompts = some_prompts(24)
    sampling = dataclasses.replace(sampling, max_tokens=20, ignore_eos=True, seed=5)
    answers = ask(engine, prompts, *(dataclasses.replace(sampling, seed=i) for i in range(24)))
    assert largest_gap(model, prompts, answers, sampling) < 1e-5


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_other_architectures(tmp_path, name, caplog):
    arch, overrides = ARCHITECTURES[name]
    path = tiny_model(tmp_path / arch, arch, **overrides)
    engine = start(path)
    cached = engine._call(lambda core: core._is_caching)
    try:
        prompts = some_prompts(8)
        answers = ask(engine, prompts, *(dataclasses.replace(LONG, seed=i) for i in range(8)))
        assert largest_gap(float64_model(path), prompts, answers, LONG) < 1e-4
        load(
            engine,
            moved(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), 0.01),
            version=1,
        )
    finally:
        engine.close()
    assert cached == ("not cacheable" not in name) == ("cannot cache" not in caplog.text)


def test_rotary_embedding_that_depends_on_other_rows_limits_the_length(tmp_path):
    """Beyond the limit, a row's keys in the cache would need another embedding."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    path = tiny_model(tmp_path, "llama", rope_parameters=rope, max_position_embeddings=64)
    HFCore(options(path, max_model_len=64))
    with pytest.raises(ValueError, match="rope_type=dynamic.*at most 64 tokens"):
        HFCore(options(path, max_model_len=65))


def _late(original, self, positions):
    """Each token is written one slot too late."""
    original(self, positions + 1)


def _future(original, self, window, dtype):
    """A token may look at slots after its own, of a longer row."""
    return torch.zeros_like(original(self, window, dtype))


def _no_window(original, self, window, dtype):
    return original(self, None, dtype)


HALF = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
@pytest.mark.parametrize("name", ["llama, tied", "sliding window", "fused experts"])
def test_rounding_does_not_disable_the_cache(tmp_path, name, dtype):
    """Exact weights come back after the check in float32."""
    arch, overrides = ARCHITECTURES[name]
    path = tiny_model(tmp_path / arch, arch, **overrides)
    core = HFCore(dataclasses.replace(options(path), dtype=dtype))
    assert core._is_caching
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    weights = core.model.state_dict()
    assert {tensor.dtype for tensor in weights.values()} == {dtype}
    assert all(torch.equal(weights[k], v) for k, v in plain.state_dict().items())


@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
@pytest.mark.parametrize(
    ("method", "bug"), [("begin_decode", _late), ("_mask", _future), ("_mask", _no_window)]
)
def test_wrong_cache_is_noticed_in_every_dtype(tmp_path, monkeypatch, method, bug, dtype):
    """With weights so small that attention matters little, as in a model that is built at random.

    Rounding to bfloat16 would hide these bugs.
    """
    path = tiny_model(tmp_path / "m", "mistral", sliding_window=5, initializer_range=0.08)
    original = getattr(hf.KVCache, method)
    monkeypatch.setattr(hf.KVCache, method, lambda *args: bug(original, *args))
    assert not HFCore(dataclasses.replace(options(path), dtype=dtype))._is_caching


@pytest.mark.parametrize("fails", [True, False])
def test_cache_must_also_run_in_the_engines_dtype(path, monkeypatch, caplog, fails):
    """For example, a kernel that a GPU has only for float32."""
    original = hf.KVCache.attend

    def attend(self, layer, query, *args):
        if query.dtype != torch.bfloat16:
            return original(self, layer, query, *args)
        if fails:
            raise RuntimeError("no kernel is available")
        return original(self, layer, query, *args) * torch.nan

    monkeypatch.setattr(hf.KVCache, "attend", attend)
    assert not HFCore(dataclasses.replace(options(path), dtype=torch.bfloat16))._is_caching
    assert ("no kernel is available" if fails else "bfloat16 are not finite") in caplog.text


def test_an_engine_short_of_memory_does_not_start(path, monkeypatch):
    """It would otherwise recompute whole sequences, which is slow, for the whole run."""

    def attend(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(hf.KVCache, "attend", attend)
    with pytest.raises(torch.OutOfMemoryError):
        HFCore(options(path))


def test_cached_bfloat16_is_as_exact_as_whole_sequences(path, monkeypatch):
    """Both against float64 with the same rounded weights."""
    oracle = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).double().eval()
    prompts = some_prompts(16)
    gaps = []
    for is_caching in (True, False):
        if not is_caching:
            monkeypatch.setattr(HFCore, "_check_copy", lambda core: "it is compared here")
        engine = start(path, dtype="bfloat16")
        try:
            assert engine._call(lambda core: core._is_caching) == is_caching
            samplings = (dataclasses.replace(LONG, seed=i) for i in range(16))
            gaps.append(largest_gap(oracle, prompts, ask(engine, prompts, *samplings), LONG))
        finally:
            engine.close()
    assert 0 < gaps[0] < 1.5 * gaps[1]


def test_fused_weights_load_by_checkpoint_names(tmp_path):
    """Trainers export experts one by one, like checkpoints; transformers fuses them in memory."""
    from safetensors.torch import load_file

    arch, overrides = ARCHITECTURES["fused experts"]
    checkpoint = load_file(
        Path(tiny_model(tmp_path / "moe", arch, **overrides)) / "model.safetensors"
    )
    assert any(".experts.3." in name for name in checkpoint)
    engine = start(str(tmp_path / "moe"), pretrained=False)
    try:
        engine.load_weights(checkpoint.items(), 1, fingerprint(checkpoint.items()))
        answers = ask(engine, [[5, 6, 7]], LONG)
        assert largest_gap(float64_model(str(tmp_path / "moe")), [[5, 6, 7]], answers, LONG) < 1e-4
        checkpoint["nobody.weight"] = torch.zeros(16, 32)
        with pytest.raises(WeightSyncError, match="nobody"):
            engine.load_weights(checkpoint.items(), 2, 0)
    finally:
        engine.close()


def test_greedy_equals_transformers_generate(engine, path):
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    prompts = some_prompts(12, seed=3)
    answers = ask(engine, prompts, Sampling(0.0, max_tokens=20))
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = reference.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=20, pad_token_id=0
        )
        assert answer.ids == expected[0, len(prompt) :].tolist()


def test_sampled_frequencies_match_the_model(engine, model):
    """Seeds 0, 1, 2, ... give independent draws from the model's distribution."""
    prompt = [40, 50, 60]
    answers = ask(
        engine, [prompt] * 4000, *(Sampling(1.0, max_tokens=1, seed=i) for i in range(4000))
    )
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0, -1].softmax(-1)
    counts = torch.bincount(torch.tensor([a.ids[0] for a in answers]), minlength=128)
    deviation = (counts - 4000 * expected) / (4000 * expected * (1 - expected)).sqrt()
    assert deviation.abs().max() < 5 and abs(deviation.square().mean() - 1) < 0.5


def test_positions_draw_independent_numbers(path, model):
    """Without output weights all tokens are equally likely at every position."""
    blank = moved(model, 0.0)
    torch.nn.init.zeros_(blank.lm_head.weight)
    engine = start(path, pretrained=False)
    try:
        load(engine, blank, 1)
        answers = ask(
            engine,
            [[5]] * 40,
            *(Sampling(max_tokens=100, seed=i, ignore_eos=True) for i in range(40)),
        )
    finally:
        engine.close()
    ids = torch.tensor([answer.ids for answer in answers])
    assert min(len(set(row)) for row in ids.tolist()) > 50
    assert (
        (torch.bincount(ids.flatten(), minlength=128) - 4000 / 128) / (4000 / 128) ** 0.5
    ).abs().max() < 5
    assert (ids[:, 1:] == ids[:, :-1]).float().mean() < 0.03


def test_tokens_do_not_depend_on_other_requests(engine, path):
    """A request alone, among others, in reverse order, with two rows, and with early ends."""
    prompts = some_prompts(30, seed=4)
    samplings = [
        Sampling(1.0, max_tokens=5 + 7 * (i % 4), seed=i, ignore_eos=i % 2 == 0) for i in range(30)
    ]
    together = ask(engine, prompts, *samplings)
    assert [a.ids for a in together[::-1]] == [
        a.ids for a in ask(engine, prompts[::-1], *samplings[::-1])
    ]
    assert [a.ids for a in together[:6]] == [
        ask(engine, [p], s)[0].ids for p, s in zip(prompts[:6], samplings[:6], strict=True)
    ]
    narrow = start(path, max_num_seqs=2)
    try:
        assert [a.ids for a in ask(narrow, prompts, *samplings)] == [a.ids for a in together]
    finally:
        narrow.close()


def test_moved_rows_keep_their_state(engine, model):
    """Rows with different sampling parameters end at different times, so rows change slots."""
    kinds = [Sampling(0.7), Sampling(1.0, top_k=5), Sampling(1.0, top_p=0.7), Sampling(1.3)]
    samplings = [
        dataclasses.replace(kinds[i % 4], max_tokens=3 + 5 * (i % 3), seed=i, ignore_eos=True)
        for i in range(24)
    ]
    prompts = some_prompts(24, seed=5)
    for prompt, sampling, answer in zip(
        prompts, samplings, ask(engine, prompts, *samplings), strict=True
    ):
        assert largest_gap(model, [prompt], [answer], sampling) < 1e-5
        assert ask(engine, [prompt], sampling)[0].ids == answer.ids


def test_moved_rows_keep_their_limits(tmp_path):
    """A quarter of all tokens end a sequence. Each third request continues to its limit."""
    path = tiny_model(tmp_path / "eos", "qwen2", initializer_range=0.1)
    ends = list(range(1, 33))
    (Path(path) / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    samplings = [
        Sampling(max_tokens=6 + 4 * (i % 5), seed=i, ignore_eos=i % 3 == 0) for i in range(30)
    ]
    engine = start(path)
    try:
        for sampling, answer in zip(
            samplings, ask(engine, some_prompts(30, seed=7), *samplings), strict=True
        ):
            ended = [i for i, token in enumerate(answer.ids) if token in ends]
            if sampling.ignore_eos or not ended:
                assert len(answer.ids) == sampling.max_tokens
            else:
                assert ended == [len(answer.ids) - 1]
    finally:
        engine.close()


def test_joining_request_does_not_change_running_ones(path):
    """Tables and cache grow under a running row, in rows and in slots."""
    prompts = [[7, 8, 9], *some_prompts(5, seed=8, longest=60)]
    samplings = [
        Sampling(max_tokens=60, seed=3, ignore_eos=True),
        *(Sampling(max_tokens=50, seed=i, ignore_eos=True) for i in range(5)),
    ]
    expected = []
    for prompt, sampling in zip(prompts, samplings, strict=True):
        alone = start(path)
        expected += ask(alone, [prompt], sampling)
        alone.close()
    core = HFCore(options(path, max_num_seqs=8, max_model_len=128))
    answers = {}
    core.add(0, prompts[0], samplings[0])
    for i in range(1, 6):
        for _ in range(4):
            answers |= {done.request_id: done for done in core.step()}
        core.add(i, prompts[i], samplings[i])
    while core.pending():
        answers |= {done.request_id: done for done in core.step()}
    assert core._cache.rows >= 4 and core._cache.slots > 64
    for i, answer in enumerate(expected):
        assert answers[i].ids == answer.ids
        assert answers[i].log_probs == pytest.approx(answer.log_probs, abs=1e-5)


@pytest.mark.parametrize(("fitting", "most"), [(0, 1), (1, 1), (2.5, 2), (100, 6)])
def test_memory_of_the_cache_limits_the_rows_and_changes_no_token(path, monkeypatch, fitting, most):
    """One row runs, however little memory there is. A longer request that joins later gets longer
    rows, so there are fewer of them."""
    token = 2 * 2 * 2 * 8 * 4  # key and value, 2 layers, 2 heads of size 8, float32
    limit = int(fitting * 64 * token)
    samplings = [Sampling(max_tokens=5 + i, seed=i, ignore_eos=True) for i in range(12)]
    samplings[7] = dataclasses.replace(samplings[7], max_tokens=100)
    prompts = some_prompts(12, seed=2)

    def run(limit: int) -> tuple[dict[int, list[int]], list[tuple[int, int]]]:
        monkeypatch.setattr(hf, "_cache_limit", lambda device, utilization: limit)
        core = HFCore(options(path, max_num_seqs=6, max_model_len=128))
        assert core._slot_bytes == token
        for i, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
            core.add(i, prompt, sampling)
        ids, sizes = {}, []
        while core.pending():
            ids |= {done.request_id: done.ids for done in core.step()}
            sizes.append((core._cache.rows, core._cache.slots))
        return ids, sizes

    expected, unlimited = run(sys.maxsize)
    found, sizes = run(limit)
    assert found == expected
    assert max(unlimited) == (6, 128)
    assert max(rows for rows, _ in sizes) == most
    assert all(rows * slots * token <= limit or rows == 1 for rows, slots in sizes)


def test_the_cache_gets_a_share_of_the_free_memory_of_a_gpu(monkeypatch):
    """Memory that torch holds but does not use is free."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 5000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 300)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
    assert hf._cache_limit(torch.device("cuda"), 0.5) == 600
    assert hf._cache_limit(torch.device("cpu"), 0.5) == sys.maxsize


def test_many_prompts_are_prefilled_in_several_passes(engine, model, monkeypatch):
    monkeypatch.setattr(hf, "_PREFILL_TOKENS", 60)
    prompts = some_prompts(16, seed=9)
    assert largest_gap(model, prompts, ask(engine, prompts, LONG), LONG) < 1e-5


def test_seeds_decide_the_samples(engine):
    answers = ask(
        engine, [[9, 8, 7]] * 4, *(dataclasses.replace(LONG, seed=s) for s in (1, 2, 1, None))
    )
    ids = [a.ids for a in answers]
    assert ids[0] == ids[2] and ids[0] != ids[1] and ids[3] not in ids[:3]


def test_finish_reasons_and_lengths(engine, path):
    greedy = Sampling(0.0, max_tokens=30, ignore_eos=True)
    (free,) = ask(engine, [[20, 21]], greedy)
    assert (
        len(free.ids) == 30
        and free.finish_reason == "length"
        and free.weight_versions == [(engine.version, 30)]
    )
    (short,) = ask(engine, [[20, 21]], dataclasses.replace(greedy, max_tokens=1))
    assert short.ids == free.ids[:1] and short.finish_reason == "length"
    small = start(path, max_model_len=12)
    try:
        (bounded,) = ask(small, [[20, 21]], greedy)
        assert bounded.ids == free.ids[:10] and bounded.finish_reason == "length"
    finally:
        small.close()


def test_every_eos_id_stops_and_is_kept(tmp_path):
    """EOS ids of generation_config.json and of the tokenizer both end a sequence.

    The engine receives its weights through a sync, as in training.
    """
    path = tiny_model(tmp_path / "eos", "qwen2", initializer_range=0.1)
    ids = naive_greedy(float64_model(path), [30, 31], 12)
    third = next(i for i in range(2, 12) if ids[i] not in ids[:i])
    weights = weights_of(float64_model(path).float())

    def started(eos: list[int]) -> BatchedEngine:
        (Path(path) / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
        engine = start(path, pretrained=False)
        engine.load_weights(weights, 1, fingerprint(weights))
        return engine

    engine = started([1, 3])
    assert ask(engine, [[30, 31]], Sampling(0.0, max_tokens=12))[0].ids == ids
    engine.close()
    engine = started([3, ids[third]])
    try:
        (answer,) = ask(engine, [[30, 31]], Sampling(0.0, max_tokens=12))
        assert answer.ids == ids[: third + 1] and answer.finish_reason == "stop"
        (answer,) = ask(engine, [[30, 31]], Sampling(0.0, max_tokens=12, ignore_eos=True))
        assert answer.ids == ids and answer.finish_reason == "length"
        assert engine._call(lambda core: core._eos.tolist()) == sorted({1, 3, ids[third]})
    finally:
        engine.close()


def test_stop_strings_end_generation_and_are_kept(engine):
    prompt = [33, 44, 55]
    (free,) = ask(engine, [prompt], Sampling(0.0, max_tokens=24, ignore_eos=True))
    text = engine.tokenizer.decode(free.ids)
    stop = text[6:9]
    end = text.index(stop) + 3
    (answer,) = ask(
        engine, [prompt], Sampling(0.0, max_tokens=24, ignore_eos=True, stop=("never seen", stop))
    )
    assert answer.finish_reason == "stop" and engine.tokenizer.decode(answer.ids) == text[:end]
    (other,) = ask(
        engine, [prompt], Sampling(0.0, max_tokens=24, ignore_eos=True, stop=("never seen",))
    )
    assert other.ids == free.ids


def test_stop_string_in_the_prompt_is_ignored(engine):
    prompt = engine.tokenizer.encode("Zq")
    answers = ask(
        engine,
        [prompt] * 128,
        *(Sampling(max_tokens=14, seed=i, ignore_eos=True, stop=("Zq",)) for i in range(128)),
    )
    texts = [engine.tokenizer.decode(answer.ids) for answer in answers]
    assert any("q" in text for text in texts)
    assert [answer.finish_reason == "stop" for answer in answers] == [
        "Zq" in text for text in texts
    ]


@pytest.mark.parametrize(
    "prompt, message",
    [([], "empty"), ([5] * 128, "128 tokens"), ([5, 128], "token 128"), ([-1], "token -1")],
)
def test_invalid_prompt_fails_only_its_request(engine, prompt, message):
    with pytest.raises(ValueError, match=message):
        ask(engine, [prompt], LONG)
    assert len(ask(engine, [[5]], LONG)[0].ids) == 24


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": 0},
        {"max_tokens": 0},
        {"stop": ("",)},
    ],
)
def test_invalid_sampling_parameters_raise(wrong):
    with pytest.raises(ValueError, match="sampling needs"):
        Sampling(**wrong)


# Weights


@pytest.fixture(scope="module")
def untrained(path: str):
    """An engine without weights."""
    engine = start(path, pretrained=False)
    yield engine
    engine.close()


def test_no_generation_before_the_first_sync(path, model):
    engine = start(path, pretrained=False)
    try:
        assert engine.version == -1
        with pytest.raises(EngineError, match="no weights yet"):
            ask(engine, [[5]], LONG)
        load(engine, model, version=3)
        answers = ask(engine, [[5, 6]], LONG)
        assert engine.version == 3 and answers[0].weight_versions == [(3, 24)]
        assert largest_gap(model, [[5, 6]], answers, LONG) < 1e-5
        assert engine.fingerprint() == fingerprint(weights_of(model))
    finally:
        engine.close()


def test_generation_after_sync_equals_a_new_engine(engine, path, model, tmp_path):
    """No key or value of the old weights survives."""
    other = moved(model, 0.3)
    prompts = some_prompts(10, seed=6)
    samplings = [dataclasses.replace(LONG, seed=i) for i in range(10)]
    before = ask(engine, prompts, *samplings)
    other.float().save_pretrained(tmp_path / "other")
    engine.tokenizer.save_pretrained(tmp_path / "other")
    cold = start(str(tmp_path / "other"))
    load(engine, other, engine.version + 1)
    try:
        after = ask(engine, prompts, *samplings)
        expected = ask(cold, prompts, *samplings)
        assert [a.ids for a in after] == [a.ids for a in expected] != [a.ids for a in before]
        assert [a.log_probs for a in after] == [a.log_probs for a in expected]
    finally:
        cold.close()
        load(engine, model, engine.version + 1)


class DeafCore(HFCore):
    """A faulty core that ignores new weights."""

    def load(self, named):
        list(named)


@pytest.mark.parametrize("size", [1e-6, 1.0])
def test_sync_without_effect_is_detected(path, model, size):
    engine = BatchedEngine(lambda: DeafCore(options(path)), has_weights=True)
    try:
        load(engine, model, 1)  # the same weights: nothing to notice
        with pytest.raises(WeightSyncError, match="from before the sync"):
            load(engine, moved(model, size), 2)
        assert engine.version == 1
        with pytest.raises(EngineError, match="not the trainer's"):
            ask(engine, [[5]], LONG)
    finally:
        engine.close()


def truncated(pairs):
    yield from pairs[:5]
    raise OSError("connection lost")


BROKEN_SYNCS = {
    "breaks half-way": (truncated, "connection lost"),
    "misses a weight": (lambda pairs: pairs[:-1], "are missing"),
    "has an unknown weight": (
        lambda pairs: [("nobody.weight", pairs[0][1]), *pairs],
        "nobody.weight",
    ),
    "has a wrong shape": (lambda pairs: [(pairs[0][0], pairs[0][1][:-1]), *pairs[1:]], "shape"),
    "has a wrong value": (
        lambda pairs: [(pairs[0][0], pairs[0][1] + 1e-3), *pairs[1:]],
        "fingerprint",
    ),
}


@pytest.mark.parametrize("fault", BROKEN_SYNCS)
def test_failed_sync_keeps_version_and_refuses_to_generate(engine, model, fault):
    damage, message = BROKEN_SYNCS[fault]
    version = engine.version
    other = moved(model, 0.1)
    with pytest.raises(WeightSyncError, match=message):
        engine.load_weights(damage(weights_of(other)), version + 1, fingerprint(weights_of(other)))
    assert engine.version == version
    with pytest.raises(EngineError, match=f"weight version {version}.*refuses.*sync again"):
        ask(engine, [[5]], LONG)
    load(engine, model, version + 1)
    answers = ask(engine, [[5, 6]], LONG)
    assert largest_gap(model, [[5, 6]], answers, LONG) < 1e-5


def test_bfloat16_engine_has_the_rounded_weights(path, model):
    engine = start(path, pretrained=False, dtype="bfloat16")
    try:
        engine.load_weights(weights_of(model), 1, fingerprint(weights_of(model), torch.bfloat16))
        answers = ask(engine, [[5, 6]], LONG)
        assert largest_gap(model, [[5, 6]], answers, LONG) < 0.2
    finally:
        engine.close()


def test_generation_continues_after_sleep(engine):
    (before,) = ask(engine, [[5, 6]], dataclasses.replace(LONG, seed=1))
    engine.sleep()
    engine.wake("weights")
    engine.wake("kv_cache")
    assert ask(engine, [[5, 6]], dataclasses.replace(LONG, seed=1))[0] == before
    with pytest.raises(ValueError, match="wake"):
        engine.wake("lunch")


@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_freed_in_sleep_on_a_gpu(tmp_path, monkeypatch, tied):
    """A CPU's storages are freed the same way."""
    path = tiny_model(tmp_path / "m", "llama", tie_word_embeddings=tied)
    policy = float64_model(path).float()
    monkeypatch.setattr(hf, "_frees_weights", lambda options: True)
    engine = start(path, pretrained=False)
    freed = lambda core: sum(p.untyped_storage().nbytes() for p in core.model.parameters())  # noqa: E731
    try:
        load(engine, policy, 1)
        (before,) = ask(engine, [[5, 6]], dataclasses.replace(LONG, seed=1))
        assert engine._call(freed) > 50_000
        engine.sleep()
        engine.sleep()
        assert engine._call(freed) == 0
        with pytest.raises(WeightSyncError, match=r'wake\("weights"\)'):
            load(engine, policy, 2)
        engine.wake("weights")
        with pytest.raises(EngineError, match="freed its weights"):
            ask(engine, [[5]], LONG)
        load(engine, policy, 2)
        engine.wake("kv_cache")
        (after,) = ask(engine, [[5, 6]], dataclasses.replace(LONG, seed=1))
        assert (after.ids, after.log_probs) == (before.ids, before.log_probs)
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("device", "free_cache_engine", "frees"),
    [("cuda", True, True), ("cuda", False, False), ("cpu", True, False)],
)
def test_only_gpus_free_weights(path, device, free_cache_engine, frees):
    rollout = GenerationSpec(free_cache_engine=free_cache_engine)
    given = dataclasses.replace(options(path), device=torch.device(device), rollout=rollout)
    assert hf._frees_weights(given) == frees


def test_unknown_engine_and_dtype_raise(path):
    with pytest.raises(ValueError, match="unknown rollout.name 'sglang'"):
        build_engine("sglang", ModelSpec(path=path), GenerationSpec(), 64, torch.device("cpu"), 0)
    with pytest.raises(ValueError, match="rollout.dtype='int3'"):
        start(path, dtype="int3")
    with pytest.raises(ValueError, match="rollout.engine_kwargs.hf.fast"):
        start(path, engine_kwargs={"hf": {"fast": True}})


def test_random_weights_are_drawn_on_the_device(tiny_qwen2):
    """On the CPU this takes minutes for a large model."""
    built = hf._build_model(ModelSpec(path=tiny_qwen2), torch.float32, False, torch.device("meta"))
    assert all(parameter.is_meta for parameter in built.parameters())
