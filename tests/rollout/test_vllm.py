"""The vLLM engine. The module shares one engine, because starting vLLM takes 20 seconds."""

import asyncio
import dataclasses
import functools
import importlib
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from transformers import PreTrainedModel

from tests.gateway.speaker import mixed_session, session_of
from tests.rollout.oracle import (
    Steps,
    ask,
    float64_model,
    largest_gap,
    load,
    model_with_two_ends,
    moved,
    naive_greedy,
    naive_log_probs,
    naive_swapped_log_probs,
    until,
    weights_of,
)
from verlite import threads
from verlite.config.rules.models import VLLM_CPU_HEADS
from verlite.envs.step import Step
from verlite.rollout.batched import build_engine
from verlite.rollout.servers.command import ServerOptions, command, environment
from verlite.rollout.trajectory import Request, run_all
from verlite.rollout.types import Completion, EngineError, EngineOptions, Sampling, WeightSyncError
from verlite.spec.roles import GenerationSpec, ModelSpec
from verlite.weights.fingerprint import fingerprint
from verlite.weights.ipc import BucketStream, Publisher, publish_trial, read_trial
from verlite.weights.probe import Probe, probe_ids, probe_limit

pytest.importorskip("vllm", reason="vLLM is an optional dependency")

from verlite.rollout.engines.vllm import VLLMCore, engine_args
from verlite.rollout.engines.vllm_worker import WorkerExtension, combine_shards

pytestmark = pytest.mark.process

WORKER = "verlite.rollout.engines.vllm_worker"

LONG = Sampling(max_tokens=20, ignore_eos=True)
PROMPT = [33, 44, 55]


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return model_with_two_ends(tmp_path_factory.mktemp("vllm") / "qwen2", PROMPT)


@pytest.fixture(scope="module")
def model(path: str) -> PreTrainedModel:
    return float64_model(path)


@pytest.fixture(scope="module")
def engine(path: str):
    from llvmlite.binding import ffi  # as in a worker whose tools import numba

    rollout = GenerationSpec(
        enforce_eager=True,
        kv_cache_gb=0.25,
        max_num_seqs=32,
        max_num_batched_tokens=2048,
        engine_kwargs={"vllm": {"block_size": 32}},
    )
    engine = build_engine("vllm", ModelSpec(path=path), rollout, 160, torch.device("cpu"), seed=1)
    assert sys.modules[ffi.__name__] is ffi
    assert engine.version == -1
    with pytest.raises(EngineError, match="no weights yet"):
        ask(engine, [[5]], LONG)
    yield engine
    engine.close()


@pytest.fixture
def synced(engine, model):
    """The shared engine, with the model's weights loaded again."""
    load(engine, model, engine.version + 1)
    return engine


def some_prompts(count: int, seed: int = 0, longest: int = 30) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(4, 128) for _ in range(rng.randrange(1, longest))] for _ in range(count)]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(0.7),
        Sampling(1.0),
        Sampling(1.3),
        Sampling(0.0),
        Sampling(0.8, top_p=0.7),
        Sampling(1.2, top_k=5),
    ],
    ids=str,
)
def test_log_probs_equal_naive(synced, model, sampling):
    prompts = some_prompts(12)
    sampling = dataclasses.replace(sampling, max_tokens=20, ignore_eos=True)
    answers = ask(synced, prompts, *(dataclasses.replace(sampling, seed=i) for i in range(12)))
    assert largest_gap(model, prompts, answers, sampling) < 1e-5


def test_log_probs_of_mixed_sessions_through_the_gateway_equal_naive(synced, model):
    """Branches, retries and lost clients, 16 sessions at once, with prefix caching: the log-probs
    of every answer are those after its whole context."""
    sampling = Sampling(0.9, max_tokens=12)

    async def talk(seed):
        own = dataclasses.replace(sampling, seed=seed)
        async with session_of(synced, 150, own) as client:
            return await mixed_session(client, seed)

    async def talk_all():
        return await asyncio.gather(*map(talk, range(16)))

    records = asyncio.run(talk_all())
    nodes = [node for record in records for node in record.nodes if node.sampled]
    assert len(nodes) > 60 and sum(node.parent is not None for node in nodes) > 20
    for node in nodes:
        naive = naive_log_probs(model, node.prompt, node.sampled, sampling)
        assert node.log_probs == pytest.approx(naive, abs=1e-5)
    ledgers = [record.ledger() for record in records]
    assert all(one["requests"] == one["answered"] + one["aborted"] for one in ledgers)
    assert sum(one["aborted"] for one in ledgers) > 0
    assert sum(one["branches"] for one in ledgers) > len(records)


def test_greedy_beside_sampled_requests(synced, model):
    prompts = some_prompts(8, seed=1)
    samplings = [dataclasses.replace(LONG, temperature=i % 2 * 1.0, seed=i) for i in range(8)]
    for i, answer in enumerate(ask(synced, prompts, *samplings)):
        if i % 2 == 0:
            assert answer.ids == naive_greedy(model, prompts[i], 20)


def test_equal_seeds_give_equal_tokens(synced):
    prompts = some_prompts(16, seed=2)
    samplings = [dataclasses.replace(LONG, seed=i) for i in range(16)]
    first = ask(synced, prompts, *samplings)
    again = ask(synced, prompts[::-1], *samplings[::-1])[::-1]
    assert [a.ids for a in first] == [a.ids for a in again]
    other = ask(synced, prompts, *(dataclasses.replace(LONG, seed=100 + i) for i in range(16)))
    assert [a.ids for a in first] != [a.ids for a in other]


def test_finish_reasons(synced, model):
    """Every EOS id stops and is kept. Of generation_config.json only the EOS ids are used."""
    expected = naive_greedy(model, PROMPT, 20)
    eos = model.generation_config.eos_token_id[1]
    (answer,) = ask(synced, [PROMPT], Sampling(0.0, max_tokens=20))
    assert answer.ids == expected[: expected.index(eos) + 1] and answer.finish_reason == "stop"
    (answer,) = ask(synced, [PROMPT], Sampling(0.0, max_tokens=20, ignore_eos=True))
    assert answer.ids == expected and answer.finish_reason == "length"
    (answer,) = ask(synced, [[7] * 155], Sampling(max_tokens=20, ignore_eos=True))
    assert len(answer.ids) == 5 and answer.finish_reason == "length"
    with pytest.raises(ValueError, match="160 tokens"):
        ask(synced, [[7] * 160], LONG)
    with pytest.raises(ValueError, match="token 130"):
        ask(synced, [[7, 130]], LONG)


def test_ids_beyond_the_tokenizer_are_sampled(synced, model):
    """The model has two more ids than its tokenizer. They have a probability in training, so they
    must be sampled too."""
    assert len(synced.tokenizer) == 128
    prompts = [[128, 5, 129]] * 200
    answers = ask(
        synced,
        prompts,
        *(
            Sampling(1.5, max_tokens=4, seed=i, ignore_eos=True, stop=("never",))
            for i in range(200)
        ),
    )
    assert {128, 129} & {i for answer in answers for i in answer.ids}
    assert largest_gap(model, prompts[:40], answers[:40], Sampling(1.5)) < 1e-5


def test_stop_strings_end_generation_and_are_kept(synced, model):
    text = synced.tokenizer.decode(naive_greedy(model, PROMPT, 20))
    stop = text[6:9]
    (answer,) = ask(
        synced, [PROMPT], Sampling(0.0, max_tokens=20, ignore_eos=True, stop=("never", stop))
    )
    assert (
        answer.finish_reason == "stop"
        and synced.tokenizer.decode(answer.ids) == text[: text.index(stop) + 3]
    )
    assert len(answer.log_probs) == len(answer.ids)


def test_many_requests_through_the_trajectory_loop(synced):
    requests = [
        Request(p, dataclasses.replace(LONG, seed=i, max_tokens=1 + i % 20))
        for i, p in enumerate(some_prompts(100, seed=5))
    ]
    trajectories = asyncio.run(run_all(synced, requests))
    assert [len(t.response_ids) for t in trajectories] == [1 + i % 20 for i in range(100)]
    assert {v for t in trajectories for v, _ in t.weight_versions} == {synced.version}


class Echo:
    """An environment that answers every turn with its number of letters."""

    def __init__(self, *stop):
        self.stop = stop

    async def step(self, text: str, last: bool) -> Step:
        return Step(f" {len(text)} letters. ", "[", "]")


def turns_of(engine, requests):
    return asyncio.run(run_all(engine, requests))


def test_agents_agree_between_vllm_and_hf(synced, path):
    """Greedy float32 decoding gives the same ids turn by turn in both engines."""
    other = build_engine(
        "hf", ModelSpec(path=path), GenerationSpec(), 160, torch.device("cpu"), 0, pretrained=True
    )
    try:
        stops = [chr(code) for code in range(33, 127, 3)]

        def requests():
            return [
                Request(p, Sampling(0.0, max_tokens=24, ignore_eos=True), Echo(*stops), 3, 140, 40)
                for p in some_prompts(24, seed=9, longest=12)
            ]

        one = turns_of(synced, requests())
        two = turns_of(other, requests())
    finally:
        other.close()
    assert [t.response_ids for t in one] == [t.response_ids for t in two]
    assert [(t.status, t.segments) for t in one] == [(t.status, t.segments) for t in two]
    assert max(t.turns for t in one) >= 3, "no power without turns"
    gaps = [
        abs(a - b)
        for x, y in zip(one, two, strict=True)
        for a, b in zip(x.log_probs, y.log_probs, strict=True)
    ]
    assert max(gaps) < 1e-4


def test_next_turn_uses_the_prefix_cache(synced):
    """With blocks of 32 tokens, all full blocks of the previous turn are reused."""
    found = []

    def listen(core):
        step = core.engine.step

        def recorded():
            outputs = step()
            found.extend(
                (len(output.prompt_token_ids), output.num_cached_tokens)
                for output in outputs
                if output.finished
            )
            return outputs

        core.engine.step = recorded
        return step

    before = synced._call(listen)
    try:
        prompt = random.Random(77).choices(range(4, 128), k=70)
        (trajectory,) = turns_of(
            synced,
            [
                Request(
                    prompt,
                    Sampling(seed=3, max_tokens=20, ignore_eos=True),
                    Echo(*map(chr, range(97, 123))),
                    2,
                    80,
                    20,
                )
            ],
        )
    finally:
        synced._call(lambda core: setattr(core.engine, "step", before))
    assert trajectory.turns >= 2 and len(found) == trajectory.turns
    context = len(prompt)
    assert found[0] == (context, 0)
    counts = [count for _, count in trajectory.segments]
    for turn in range(1, trajectory.turns):
        seen = context + counts[2 * turn - 2]
        context = seen + counts[2 * turn - 1]
        assert found[turn][0] == context and found[turn][1] >= (seen - 1) // 32 * 32 >= 64


# Weights


def test_fingerprint_equals_the_trainers(synced, model):
    assert synced.fingerprint() == fingerprint(weights_of(model))


def test_generation_after_sync_uses_new_weights_and_no_old_cache(synced, model):
    """Long equal prompts would use cached prefixes. vLLM alone would not update the tied output
    layer."""
    prompts = [list(range(4, 110))] * 4
    samplings = [dataclasses.replace(LONG, seed=i) for i in range(4)]
    before = ask(synced, prompts, *samplings)
    other = moved(model, 0.3)
    load(synced, other, synced.version + 1)
    after = ask(synced, prompts, *samplings)
    assert largest_gap(other, prompts, after, LONG) < 1e-5
    assert [a.ids for a in before] != [a.ids for a in after]
    load(synced, model, synced.version + 1)
    assert [a.ids for a in ask(synced, prompts, *samplings)] == [a.ids for a in before]


def test_a_cache_that_is_not_reset_is_visible_in_the_log_probs(synced, model, monkeypatch):
    """Neither the fingerprint nor the probe reads cached blocks. Every step's log-prob gap does."""
    prompts = [list(range(4, 110))] * 4
    samplings = [dataclasses.replace(LONG, seed=i) for i in range(4)]
    ask(synced, prompts, *samplings)
    other = moved(model, 0.3)
    with monkeypatch.context() as patch:
        patch.setattr("verlite.rollout.engines.vllm.VLLMCore.reset_caches", lambda self: None)
        load(synced, other, synced.version + 1)
    stale = ask(synced, prompts, *samplings)
    load(synced, model, synced.version + 1)
    assert largest_gap(other, prompts, stale, LONG) > 0.05


def test_a_skipped_bucket_is_detected(synced, model):
    other = weights_of(moved(model, 0.1))
    with pytest.raises(WeightSyncError, match="fingerprint"):
        synced.load_weights(other[:-3], synced.version + 1, fingerprint(other))
    load(synced, model, synced.version + 1)


@pytest.mark.parametrize("size", [1e-6, 1.0])
def test_sync_without_effect_is_detected(synced, model, size, monkeypatch):
    monkeypatch.setattr(
        WorkerExtension, "verlite_load", lambda self, named, *others: list(named) and None
    )
    version = synced.version
    with pytest.raises(WeightSyncError, match="from before the sync"):
        load(synced, moved(model, size), version + 1)
    assert synced.version == version
    with pytest.raises(EngineError, match="not the trainer's"):
        ask(synced, [[5]], LONG)


def test_the_trial_of_ipc_is_read_in_vllms_worker(synced, monkeypatch):
    """An error there is the reason why it failed."""
    read, publisher = [], Publisher(torch.device("cpu"), timeout_s=60)
    monkeypatch.setattr(f"{WORKER}.read_trial", lambda stream: read.append(1) or read_trial(stream))
    with ThreadPoolExecutor(1) as pool:
        published = pool.submit(publish_trial, publisher)
        assert synced.read_trial(BucketStream((publisher.address,), timeout_s=60)) == ""
        assert published.result(60) == "" and read == [1]
    monkeypatch.setattr(f"{WORKER}.read_trial", lambda stream: 1 / 0)
    assert synced.read_trial(BucketStream(("",))) == "ZeroDivisionError: division by zero"


def test_one_stale_layer_is_detected(synced, model):
    """All weights arrive except one packed matrix, which changed by a millionth."""
    other = moved(model, 1e-6)
    name = "model.layers.1.mlp.down_proj.weight"
    old = dict(weights_of(model))[name]
    arrived = [(n, old if n == name else tensor) for n, tensor in weights_of(other)]
    with pytest.raises(WeightSyncError, match="fingerprint"):
        synced.load_weights(arrived, synced.version + 1, fingerprint(weights_of(other)))


def test_stale_output_layer_is_detected(synced, model, monkeypatch):
    monkeypatch.setattr(f"{WORKER}._repack_tied_heads", lambda model: None)
    with pytest.raises(
        WeightSyncError, match="computes lm_head with weights that differ from the layer"
    ):
        load(synced, moved(model, 1e-6), synced.version + 1)


def test_more_prompts_than_a_step_takes(synced, model):
    """2048 tokens. vLLM would compute a prompt in part, which fails for seeded requests on CPUs."""
    prompts = [[4 + i] * 145 for i in range(32)]
    samplings = [dataclasses.replace(LONG, seed=i, max_tokens=2) for i in range(32)]
    answers = ask(synced, prompts, *samplings)
    assert largest_gap(model, prompts, answers, LONG) < 1e-5


# Weights loaded while requests run


@pytest.fixture
def swapping(synced, model):
    """Return a function that makes the shared engine load weights while requests run, by a policy
    of keys and values. The model is version 0 then."""

    def begin(policy):
        synced._call(lambda core: setattr(core, "_kv_at_update", policy))
        synced._swaps = True
        load(synced, model, 0)
        return Steps(synced)

    yield begin
    synced._call(lambda core: setattr(core, "_kv_at_update", ""))
    synced._swaps = False
    synced.version = 9  # later syncs have other versions than these


def gaps(models, prompt, answer, keeps_cache):
    expected = naive_swapped_log_probs(models, prompt, answer, LONG, keeps_cache=keeps_cache)
    return max(abs(a - b) for a, b in zip(answer.log_probs, expected, strict=True))


@pytest.mark.parametrize("policy", ["fresh", "salted", "mixed"])
def test_log_probs_after_swaps_equal_naive(swapping, synced, model, policy):
    """32 rows run, and the prefix cache has the prompts that 3 requests in the queue share."""
    models = [model, moved(model, 0.3, seed=1), moved(model, 0.3, seed=2)]
    shared = random.Random(5).choices(range(4, 128), k=70)
    prompts = some_prompts(29, seed=8) + [shared] * 6
    samplings = [dataclasses.replace(LONG, seed=i) for i in range(35)]
    steps = swapping(policy)
    steps.before = {4: lambda: load(synced, models[1], 1), 9: lambda: load(synced, models[2], 2)}
    answers = ask(synced, prompts, *samplings)
    steps.end()
    assert steps.errors == []
    spans = [[(0, 4), (1, 5), (2, 11)]] * 32 + [[(2, 20)]] * 3
    assert [a.weight_versions for a in answers] == spans
    keeps = policy != "fresh"
    swapped = list(zip(prompts, answers, strict=True))[:32]
    assert max(gaps(models, *pair, keeps) for pair in swapped) < 1e-4
    assert min(gaps(models, *pair, not keeps) for pair in swapped) > 1e-2
    later = [gaps(models, shared, answer, False) for answer in answers[32:]]
    if policy == "mixed":  # blocks of version 0 are read
        assert min(later) > 1e-2
    else:
        assert max(later) < 1e-4


def test_equal_weights_swapped_in_change_no_token(swapping, synced, model):
    prompts = some_prompts(12, seed=6)
    samplings = [dataclasses.replace(LONG, seed=i, temperature=i % 3 / 2) for i in range(12)]
    steps = swapping("fresh")
    plain = ask(synced, prompts, *samplings)
    steps.count = 0
    steps.before = {n: functools.partial(load, synced, model, n) for n in (3, 4, 11)}
    swapped = ask(synced, prompts, *samplings)
    steps.end()
    assert steps.errors == [] and steps.count == 20
    assert [a.ids for a in plain] == [a.ids for a in swapped]
    assert swapped[0].weight_versions == [(0, 3), (3, 1), (4, 7), (11, 9)]


@pytest.mark.parametrize("policy", ["fresh", "mixed"])
def test_the_probe_loses_no_request_and_changes_none(swapping, synced, model, policy):
    """vLLM advances running requests with it: some finish in its step."""
    other = moved(model, 0.3)
    ids = probe_ids(130, 40)
    log_probs = naive_log_probs(other, ids[:1], ids[1:], Sampling())
    probe = Probe(tuple(ids), tuple(log_probs), probe_limit(0.05, "float32"))
    bad = dataclasses.replace(probe, log_probs=tuple(x - 0.5 for x in log_probs))
    prompts = some_prompts(10, seed=4)
    samplings = [dataclasses.replace(LONG, seed=i, max_tokens=5 + i % 3) for i in range(10)]
    steps = swapping(policy)
    weights = weights_of(other)
    found = []
    for is_probed in (False, True):
        load(synced, model, 0)
        steps.count = 0

        def sync(is_probed=is_probed):
            synced.load_weights(weights, 1, fingerprint(weights), is_probed)
            if is_probed:
                with pytest.raises(WeightSyncError, match="computes other log-probs"):
                    synced.check_log_probs(bad)
                assert synced.version == 0 and steps.count == 4
                synced.load_weights(weights, 2, fingerprint(weights), is_probed)
                synced.check_log_probs(probe)

        steps.before = {4: sync}
        found.append(ask(synced, prompts, *samplings))
    steps.end()
    assert steps.errors == []
    plain, probed = found
    assert [a.ids for a in plain] == [a.ids for a in probed]
    assert [a.weight_versions for a in plain] == [[(0, 4), (1, 1 + i % 3)] for i in range(10)]
    # The step of each probe samples a token, by the weights that it rejects or accepts.
    assert [a.weight_versions for a in probed] == [
        [(0, 4), (1, 1), (2, i % 3)] if i % 3 else [(0, 4), (1, 1)] for i in range(10)
    ]


def test_requests_wait_after_a_failed_load_and_others_may_be_cancelled(swapping, synced, model):
    other = moved(model, 0.3)
    steps = swapping("fresh")

    def fail():
        with pytest.raises(WeightSyncError, match="fingerprint"):
            synced.load_weights(weights_of(other)[:-3], 1, fingerprint(weights_of(other)))

    async def retry():
        kept, dropped = (
            asyncio.create_task(synced.generate(p, dataclasses.replace(LONG, seed=1)))
            for p in (PROMPT, [5])
        )
        await asyncio.to_thread(until, lambda: steps.threads)
        await asyncio.to_thread(steps.threads[0].join)
        assert steps.count == 4 and not kept.done()
        dropped.cancel()
        await asyncio.to_thread(load, synced, other, 2)
        return await kept

    steps.before = {4: fail}
    answer = asyncio.run(retry())
    steps.end()
    assert steps.errors == [] and answer.weight_versions == [(0, 4), (2, 16)]
    assert gaps([model, model, other], PROMPT, answer, False) < 1e-4


def go_on(engine, requests):
    """Generate for (prompt, sampling, tokens so far), named by their places."""

    async def all_at_once():
        return await asyncio.gather(
            *(engine.generate(*request, i) for i, request in enumerate(requests))
        )

    return asyncio.run(all_at_once())


def test_requests_go_on_after_their_tokens_so_far(swapping, synced, model):
    """They are cut, and go on, while weights are loaded. All log-probs by naive float64 passes, and
    the tokens of greedy requests by greedy decoding."""
    others = [model, moved(model, 0.3, seed=1), moved(model, 0.3, seed=2)]
    prompts = some_prompts(12, seed=8)
    samplings = [dataclasses.replace(LONG, seed=i, temperature=i % 2) for i in range(12)]
    steps = swapping("fresh")
    seen = {}
    steps.before = {
        3: functools.partial(load, synced, others[1], 1),
        7: lambda: seen.update(synced.running()),
    }
    whole = go_on(synced, [(*pair, None) for pair in zip(prompts, samplings, strict=True)])
    assert {len(one.ids) for one in seen.values()} == {7} and sorted(seen) == list(range(12))
    for i, one in seen.items():
        assert one.ids == whole[i].ids[:7] and one.log_probs == whole[i].log_probs[:7]
        assert one.weight_versions == [(0, 3), (1, 4)]
    steps.count = 0
    steps.before = {
        5: functools.partial(load, synced, others[2], 2),
        9: lambda: seen.update(again=synced.running()),
    }
    requests = [(prompts[i], samplings[i], seen[i]) for i in range(12)]
    answers = go_on(synced, requests)
    steps.end()
    assert steps.errors == [] and steps.count == 13
    assert seen["again"][3].ids == answers[3].ids[:16]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.weight_versions == [(0, 3), (1, 9), (2, 8)]
        assert gaps(others, prompt, answer, False) < 1e-4
    for i in range(0, 12, 2):
        assert answers[i].ids[:12] == whole[i].ids[:12]
    assert all(answers[i].ids[7:12] != whole[i].ids[7:12] for i in range(1, 12, 2)), "other numbers"


def test_a_stop_string_may_begin_in_the_tokens_so_far(swapping, synced):
    swapping("fresh")
    tokenizer, cut = synced.tokenizer, 6
    greedy = dataclasses.replace(LONG, temperature=0.0)
    (whole,) = ask(synced, [PROMPT], greedy)
    so_far = Completion(whole.ids[:cut], whole.log_probs[:cut], "", [(0, cut)])
    before, text = tokenizer.decode(whole.ids[:cut]), tokenizer.decode(whole.ids[: cut + 1])
    assert before and len(text) > len(before)
    text = text[len(before) - 1 :]
    (answer,) = go_on(synced, [(PROMPT, dataclasses.replace(greedy, stop=(text,)), so_far)])
    assert answer.ids == whole.ids[: cut + 1] and answer.finish_reason == "stop"
    assert not synced._call(lambda core: core._so_far)


def test_steps_that_vllm_has_begun_end_before_weights_are_loaded():
    """On a GPU vLLM schedules a step before the last one's tokens are known."""
    begun = [["first"], []]
    states = []

    def step():
        states.append(scheduler.state.name)
        return [finished(name) for name in begun.pop(0)]

    def finished(name):
        answer = SimpleNamespace(token_ids=[7], finish_reason="stop", logprobs=flat)
        return SimpleNamespace(finished=True, request_id="3", outputs=[answer])

    flat = SimpleNamespace(start_indices=[0], token_ids=[7], logprobs=[-1.0])
    scheduler = SimpleNamespace(set_pause_state=lambda state: setattr(scheduler, "state", state))
    core = VLLMCore.__new__(VLLMCore)
    core._completed, core._stance = [], "default"
    core._so_far = {3: Completion([5], [-0.5], "", [(0, 1)])}
    running = SimpleNamespace(
        external_req_id="4",
        detokenizer=SimpleNamespace(num_output_tokens=lambda: 1, output_token_ids=[7]),
        logprobs_processor=SimpleNamespace(logprobs=flat),
    )
    core.engine = SimpleNamespace(
        engine_core=SimpleNamespace(
            engine_core=SimpleNamespace(batch_queue=begun, scheduler=scheduler)
        ),
        output_processor=SimpleNamespace(request_states={"x": running}),
        step=step,
        get_num_unfinished_requests=lambda: 1,
    )
    assert core.progress() == {4: 1, 3: 2}
    assert states == ["PAUSED_ALL"] * 2 and scheduler.state.name == "UNPAUSED"
    assert core.pending() == 2
    assert [tuple(one) for one in core.so_far()] == [
        (3, [5, 7], [-0.5, -1.0], "stop"),
        (4, [7], [-1.0], ""),
    ]
    assert [done.request_id for done in core._completed] == [3] and not core._so_far


def test_adapters_are_not_swapped():
    options = EngineOptions(
        ModelSpec(path="x"), GenerationSpec(syncs_adapters=True, kv_at_update="fresh"),
        torch.float32, torch.device("cpu"), 64, 0, pretrained=False,
    )  # fmt: skip
    with pytest.raises(ValueError, match="lora_sync=adapter: a running request keeps its adapter"):
        VLLMCore(options)


def kernels(engine):
    model = engine._call(
        lambda core: core.engine.model_executor.driver_worker.worker.model_runner.get_model()
    )
    return [module for module in model.modules() if hasattr(module, "cpu_linear")]


def spoiled(column):
    """Return a function that makes one input column of a weight [in, out], or all, wrong by a
    millionth."""

    def spoil(weight):
        wrong = weight.clone()
        wrong[column] *= 1 + 1e-6
        return wrong

    return spoil


def test_mispacked_kernel_is_detected(synced, model, monkeypatch):
    """A wrongly packed weight is detected; at the first sync even a single column."""
    from vllm import _custom_ops

    pack = _custom_ops.create_onednn_mm
    spoil = spoiled(slice(None))
    monkeypatch.setattr(
        _custom_ops, "create_onednn_mm", lambda weight, size: pack(spoil(weight), size)
    )
    with pytest.raises(WeightSyncError, match="with weights that differ from those it was given"):
        load(synced, moved(model, 0.1), synced.version + 1)
    for module in kernels(synced):
        if hasattr(module, "verlite_read"):
            del module.verlite_read
    spoil = spoiled(3)  # which no probe reads
    monkeypatch.setattr(
        f"{WORKER}._column_sampler",
        SimpleNamespace(sample=lambda columns, k: [c for c in columns if c != 3][:k]),
    )
    with pytest.raises(WeightSyncError, match="with weights that differ from those it was given"):
        load(synced, moved(model, 0.1), synced.version + 1)


def test_probe_reveals_weights_that_the_fingerprint_cannot_tell_apart(synced, model):
    ids = probe_ids(130, 40)  # longer than a block of the prefix cache
    log_probs = naive_log_probs(model, ids[:1], ids[1:], Sampling())
    probe = Probe(tuple(ids), tuple(log_probs), probe_limit(0.05, "float32"))
    before = synced.version
    prompts = some_prompts(8, seed=3)
    samplings = [dataclasses.replace(LONG, seed=i) for i in range(8)]
    unprobed = ask(synced, prompts, *samplings)
    for _ in range(2):
        assert synced.check_log_probs(probe).nats < 1e-5
    assert ask(synced, prompts, *samplings) == unprobed

    layers = "model.layers.{}.mlp.down_proj.weight"
    weights = dict(weights_of(model))
    a, b = weights[layers.format(0)], weights[layers.format(1)]
    exchanged = weights | {layers.format(0): b, layers.format(1): a}
    synced.load_weights(iter(exchanged.items()), before + 1, fingerprint(weights_of(model)))
    with pytest.raises(WeightSyncError, match="computes other log-probs"):
        synced.check_log_probs(probe)
    assert synced.version == before
    with pytest.raises(EngineError, match="sync again"):
        ask(synced, [PROMPT], LONG)


def test_kernels_are_read_whole_only_at_the_first_sync(synced, model, monkeypatch):
    def unpacked(*args):
        raise RuntimeError("read whole")

    monkeypatch.setattr(f"{WORKER}._unpack", unpacked)
    load(synced, moved(model, 0.1), synced.version + 1)


def test_nonfinite_weights_are_named_in_the_error(synced, model):
    broken = moved(model, 0.1)
    with torch.no_grad():
        broken.model.layers[1].mlp.down_proj.weight[3, :] = torch.inf
    with pytest.raises(
        WeightSyncError,
        match="down_proj with weights that differ from those it was given, or those are not finite",
    ):
        load(synced, broken, synced.version + 1)


def test_replaced_kernel_is_read_whole(synced, model):
    expected = fingerprint(weights_of(model))
    layer = next(m for m in kernels(synced) if not m.weight.numel())
    real = layer.cpu_linear
    layer.cpu_linear = lambda x, weight, bias: real(x, weight, bias)
    assert synced.fingerprint() == expected
    layer.cpu_linear = lambda x, weight, bias: real(x * (1 + 1e-6), weight, bias)
    assert synced.fingerprint() != expected
    layer.cpu_linear = real
    assert synced.fingerprint() == expected


def broken_off(pairs):
    yield from pairs[:5]
    raise OSError("connection lost")


BROKEN_SYNCS = {
    "breaks half-way": (broken_off, "connection lost"),
    "misses a weight": (lambda pairs: pairs[:-1], "fingerprint"),
    "has an unknown weight": (lambda pairs: [*pairs, ("nobody.weight", pairs[0][1])], "nobody"),
    "has a wrong shape": (
        lambda pairs: [(n, t[:-1] if "q_proj.weight" in n else t) for n, t in pairs],
        "exceeds|shape|size",
    ),
    "has a wrong value": (
        lambda pairs: [(n, t + 1e-3 if "norm" in n else t) for n, t in pairs],
        "fingerprint",
    ),
}


@pytest.mark.parametrize("fault", BROKEN_SYNCS)
def test_failed_sync_keeps_version_and_refuses_to_generate(synced, model, fault):
    damage, message = BROKEN_SYNCS[fault]
    version = synced.version
    other = moved(model, 0.1)
    with pytest.raises(WeightSyncError, match=message):
        synced.load_weights(damage(weights_of(other)), version + 1, fingerprint(weights_of(other)))
    assert synced.version == version
    with pytest.raises(EngineError, match=f"weight version {version}.*refuses.*sync again"):
        ask(synced, [[5]], LONG)
    load(synced, other, version + 1)
    answers = ask(synced, [[5, 6]], LONG)
    assert largest_gap(other, [[5, 6]], answers, LONG) < 1e-5


def test_combine_shards():
    q = 11
    kv = 22
    norm = 33
    one = combine_shards([{"qkv": q + kv, "norm": norm}])
    two = combine_shards(
        [{"qkv[q]": 5, "qkv[kv 0]": kv, "norm": norm}, {"qkv[q]": 6, "qkv[kv 0]": kv, "norm": norm}]
    )
    four = combine_shards(
        [{"qkv[q]": q, "qkv[kv 0]": 10, "norm": norm}, {"qkv[q]": 0, "qkv[kv 1]": 12, "norm": norm}]
    )
    assert one == two == four == q + kv + norm


def test_unknown_vllm_argument_raises(path):
    with pytest.raises(ValueError, match="rollout.engine_kwargs.vllm.swap_spice"):
        rollout = GenerationSpec(engine_kwargs={"vllm": {"swap_spice": 8}})
        build_engine("vllm", ModelSpec(path=path), rollout, 64, torch.device("cpu"), 0)


def test_tensor_parallel_uses_vllm_processes(path):
    """By default vLLM inside a Ray actor would wait for devices in a placement group that is
    full."""
    for devices, backend in ((1, "uni"), (2, "mp")):
        rollout = GenerationSpec(tensor_model_parallel_size=devices)
        args = engine_args(
            EngineOptions(
                ModelSpec(path=path),
                rollout,
                dtype=torch.float32,
                device=torch.device("cpu"),
                max_model_len=64,
                seed=0,
                pretrained=False,
            )
        )
        assert (args.tensor_parallel_size, args.distributed_executor_backend) == (devices, backend)


def test_tensor_parallel_processes_divide_the_threads(path, monkeypatch):
    """This process has 6 threads and waits for the others."""
    monkeypatch.setenv(threads.COUNT, "6")
    monkeypatch.setenv(threads.OURS, "6")
    seen = []

    def start(args):
        seen.append(threads.mine())
        raise InterruptedError

    monkeypatch.setattr("verlite.rollout.engines.vllm.LLMEngine.from_engine_args", start)
    for devices in (1, 2, 3):
        rollout = GenerationSpec(tensor_model_parallel_size=devices)
        with pytest.raises(InterruptedError):
            build_engine("vllm", ModelSpec(path=path), rollout, 64, torch.device("cpu"), 0)
        assert threads.mine() == 6
    assert seen == [6, 3, 2]


def test_a_server_on_cpus_computes_prompts_whole():
    """Otherwise it ends with the first step that does not take all seeded prompts."""
    flag = "--no-enable-chunked-prefill"
    for kv_cache_gb, count in ((4.0, 1), (None, 0)):
        options = ServerOptions("model", kv_cache_gb=kv_cache_gb)
        assert command(options, "127.0.0.1", 8000, ["--last"]).count(flag) == count
    assert command(ServerOptions("model"), "127.0.0.1", 8000, ["--last"])[-1] == "--last"


def test_processes_of_a_server_divide_the_threads(monkeypatch):
    """On CPUs. On GPUs vLLM chooses."""
    monkeypatch.setenv(threads.COUNT, "6")
    monkeypatch.setenv(threads.OURS, "6")
    for gib, devices, expected in ((4.0, 1, "6"), (4.0, 3, "2"), (None, 3, None)):
        options = ServerOptions("model", tensor_parallel_size=devices, kv_cache_gb=gib)
        assert environment(options, [], None).get(threads.COUNT) == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM for GPUs has no kernels for CPUs")
def test_sizes_of_heads_with_a_kernel_are_those_of_the_rule():
    def has_kernel(size):
        lengths, starts = torch.tensor([4]).int(), torch.tensor([0, 4]).int()
        try:
            schedule(1, 2, 2, size, lengths, torch.float32, starts, True, -1, "vec16", True)
        except RuntimeError as error:
            assert f"head_dim={size}" in str(error)
            return False
        return True

    schedule = importlib.import_module("vllm._custom_ops").cpu_attn_get_scheduler_metadata
    assert tuple(filter(has_kernel, range(8, 1025, 8))) == VLLM_CPU_HEADS
