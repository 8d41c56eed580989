"""Weights loaded while requests run: which weights sampled each token, and what it attends to."""

import asyncio
import threading
from functools import partial

import pytest
import torch

from tests.rollout.oracle import (
    WAIT_S,
    Steps,
    ask,
    float64_model,
    load,
    moved,
    naive_log_probs,
    naive_swapped_log_probs,
    until,
    weights_of,
)
from verlite.rollout.batched import BatchedEngine
from verlite.rollout.engines.hf import HFCore
from verlite.rollout.types import (
    EngineError,
    EngineOptions,
    Sampling,
    WeightSyncError,
    extend_spans,
)
from verlite.spec.roles import GenerationSpec, ModelSpec
from verlite.weights.fingerprint import fingerprint
from verlite.weights.probe import Probe, probe_limit


def start(path, kv_at_update="fresh", max_num_seqs=8):
    options = EngineOptions(
        ModelSpec(path=path),
        GenerationSpec(max_num_seqs=max_num_seqs, kv_at_update=kv_at_update),
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_model_len=64,
        seed=0,
        pretrained=True,
    )
    engine = BatchedEngine(lambda: HFCore(options), has_weights=True, swaps=bool(kv_at_update))
    return engine, Steps(engine)


def end(engine, steps):
    """Close the engine. Return what the actions raised."""
    steps.end()
    engine.close()
    return steps.errors


@pytest.fixture(scope="module")
def models(tmp_path_factory, request):
    """Three versions of a model."""
    path = request.getfixturevalue("tiny_qwen2")
    first = float64_model(path)
    return [first, moved(first, 0.3, seed=1), moved(first, 0.3, seed=2)]


def sampled(tokens, seed=0, temperature=1.0):
    return Sampling(temperature, max_tokens=tokens, seed=seed, ignore_eos=True)


PROMPTS = [[5, 6, 7], [9], list(range(10, 30)), [5, 6, 7], [40, 41], [3] * 17]


def test_versions_of_tokens_by_hand(tiny_qwen2, models):
    """Two rows. Steps 1 to 3: a and b. Steps 4 to 6: a and c; step 7: c. Loads after steps 2, 5."""
    engine, steps = start(tiny_qwen2, max_num_seqs=2)
    steps.before = {2: lambda: load(engine, models[1], 1), 5: lambda: load(engine, models[2], 2)}
    a, b, c = ask(engine, [[5], [6], [7]], sampled(6), sampled(3), sampled(4))
    assert end(engine, steps) == [] and steps.count == 7
    assert a.weight_versions == [(0, 2), (1, 3), (2, 1)]
    assert b.weight_versions == [(0, 2), (1, 1)]
    assert c.weight_versions == [(1, 2), (2, 2)]


@pytest.mark.parametrize("policy", ["fresh", "salted", "mixed"])
def test_log_probs_after_swaps_equal_naive(policy, tiny_qwen2, models):
    engine, steps = start(tiny_qwen2, policy, max_num_seqs=5)
    steps.before = {4: lambda: load(engine, models[1], 1), 9: lambda: load(engine, models[2], 2)}
    samplings = [sampled(20 + i, seed=i, temperature=0.7 + i % 3 / 4) for i in range(6)]
    samplings[1] = sampled(6, seed=1)  # its row goes to the sixth request, under version 1
    answers = ask(engine, PROMPTS, *samplings)
    assert end(engine, steps) == []
    assert [answer.weight_versions for answer in answers] == [
        [(0, 4), (1, 5), (2, 11)],
        [(0, 4), (1, 2)],
        [(0, 4), (1, 5), (2, 13)],
        [(0, 4), (1, 5), (2, 14)],
        [(0, 4), (1, 5), (2, 15)],
        [(1, 3), (2, 22)],
    ]
    for prompt, answer, sampling in zip(PROMPTS, answers, samplings, strict=True):
        gaps = {
            keeps_cache: max(
                abs(x - y)
                for x, y in zip(
                    answer.log_probs,
                    naive_swapped_log_probs(
                        models, prompt, answer, sampling, keeps_cache=keeps_cache
                    ),
                    strict=True,
                )
            )
            for keeps_cache in (False, True)
        }
        assert gaps[policy != "fresh"] < 1e-4
        assert gaps[policy == "fresh"] > 1e-2, "the policies differ"


def test_equal_weights_swapped_in_change_no_token(tiny_qwen2, models):
    samplings = [sampled(20 + i, seed=i) for i in range(6)]
    answers = []
    for loads in ((), (3, 4, 11)):
        engine, steps = start(tiny_qwen2, max_num_seqs=5)
        steps.before = {n: partial(load, engine, models[0], n) for n in loads}
        answers.append(ask(engine, PROMPTS, *samplings))
        assert end(engine, steps) == []
    plain, swapped = answers
    assert [a.ids for a in plain] == [a.ids for a in swapped]
    for one, other in zip(plain, swapped, strict=True):
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-5)
    assert swapped[0].weight_versions == [(0, 3), (3, 1), (4, 7), (11, 9)]


def test_only_running_requests_are_swapped_if_the_engine_was_not_built_for_it(tiny_qwen2, models):
    engine, steps = start(tiny_qwen2, kv_at_update="")
    steps.before = {2: lambda: load(engine, models[1], 1)}
    (answer,) = ask(engine, [[5]], sampled(6))
    (error,) = end(engine, steps)
    assert isinstance(error, WeightSyncError) and "1 requests are still running" in str(error)
    assert answer.weight_versions == [(0, 6)]


class Blocked:
    """Weights that arrive when `may_arrive` is set."""

    def __init__(self, model):
        self.weights = weights_of(model)
        self.began, self.may_arrive = threading.Event(), threading.Event()

    def __iter__(self):
        self.began.set()
        assert self.may_arrive.wait(WAIT_S)
        yield from self.weights


def test_requests_added_and_cancelled_while_weights_are_loaded(tiny_qwen2, models):
    engine, steps = start(tiny_qwen2)
    blocked = Blocked(models[1])
    steps.before = {3: lambda: engine.load_weights(blocked, 1, fingerprint(blocked.weights))}

    async def ask_meanwhile():
        kept, dropped = (
            asyncio.create_task(engine.generate(p, sampled(10))) for p in ([5, 6], [7])
        )
        await asyncio.to_thread(blocked.began.wait, WAIT_S)
        new = asyncio.create_task(engine.generate([5, 6], sampled(10, seed=3)))
        await asyncio.sleep(0.05)  # both jobs wait for the load
        dropped.cancel()
        await asyncio.gather(dropped, return_exceptions=True)
        blocked.may_arrive.set()
        return await asyncio.gather(kept, new)

    kept, new = asyncio.run(ask_meanwhile())
    assert end(engine, steps) == [] and steps.count == 13
    assert kept.weight_versions == [(0, 3), (1, 7)]
    assert new.weight_versions == [(1, 10)]
    for answer, seed in ((kept, 0), (new, 3)):
        expected = naive_swapped_log_probs(
            models, [5, 6], answer, sampled(10, seed), keeps_cache=False
        )
        assert answer.log_probs == pytest.approx(expected, abs=1e-4)


def half(model):
    yield from weights_of(model)[:5]
    raise OSError("the sender is gone")


def wrong(model):
    """Return weights of which one has not arrived."""
    weights = weights_of(model)
    return [*weights[:-1], (weights[-1][0], weights[-1][1] * 2)]


@pytest.mark.parametrize("failing", [half, wrong])
def test_requests_wait_after_a_failed_load_until_the_next_succeeds(failing, tiny_qwen2, models):
    engine, steps = start(tiny_qwen2)
    expected = fingerprint(weights_of(models[1]))
    steps.before = {4: lambda: engine.load_weights(failing(models[1]), 1, expected)}

    async def retry():
        running = asyncio.create_task(engine.generate([5, 6], sampled(10)))
        await asyncio.to_thread(until, lambda: steps.errors)
        assert isinstance(steps.errors.pop(), WeightSyncError)
        assert engine.version == 0
        with pytest.raises(EngineError, match="sync again"):
            await engine.generate([5], sampled(10))
        assert steps.count == 4 and not running.done()
        await asyncio.to_thread(load, engine, models[2], 2)
        return await running

    answer = asyncio.run(retry())
    assert end(engine, steps) == []
    assert answer.weight_versions == [(0, 4), (2, 6)]
    expected = naive_swapped_log_probs(models, [5, 6], answer, sampled(10), keeps_cache=False)
    assert answer.log_probs == pytest.approx(expected, abs=1e-4)


def probe_of(model, shift=0.0):
    ids = list(range(4, 24))
    found = naive_log_probs(model, ids[:1], ids[1:], Sampling())
    return Probe(tuple(ids), tuple(x + shift for x in found), probe_limit(0.05, "float32"))


def test_requests_wait_for_the_probe(tiny_qwen2, models):
    """No token is sampled before the probe succeeds, and it changes none."""
    plain = []
    for is_probed in (False, True):
        engine, steps = start(tiny_qwen2)
        named, expected = weights_of(models[1]), fingerprint(weights_of(models[1]))

        def sync(engine=engine, is_probed=is_probed, named=named, expected=expected):
            engine.load_weights(named, 1, expected, is_probed)

        steps.before = {4: sync}

        async def check(engine=engine, steps=steps, is_probed=is_probed):
            running = asyncio.create_task(engine.generate([5, 6], sampled(10)))
            await asyncio.to_thread(until, lambda: steps.threads)
            await asyncio.to_thread(steps.threads[0].join)
            if is_probed:
                added = asyncio.create_task(engine.generate([5, 6], sampled(10)))
                await asyncio.to_thread(until, lambda: len(engine._waiting) == 2)
                assert steps.count == 4 and engine.version == 1
                with pytest.raises(WeightSyncError, match="computes other log-probs"):
                    await asyncio.to_thread(engine.check_log_probs, probe_of(models[1], 0.5))
                assert steps.count == 4 and engine.version == 0
                await asyncio.to_thread(sync)
                await asyncio.to_thread(engine.check_log_probs, probe_of(models[1]))
                assert {v for v, _ in (await added).weight_versions} == {1}
            return await running

        plain.append(asyncio.run(check()))
        assert end(engine, steps) == []
    one, other = plain
    assert one.ids == other.ids and one.log_probs == pytest.approx(other.log_probs, abs=1e-5)
    assert one.weight_versions == other.weight_versions == [(0, 4), (1, 6)]


def test_engines_that_cannot_swap_refuse():
    from verlite.rollout.engines.server import ServerCore

    options = EngineOptions(
        ModelSpec(path="x"), GenerationSpec(servers=("http://x",), kv_at_update="fresh"),
        torch.float32, torch.device("cpu"), 64, 0, pretrained=False,
    )  # fmt: skip
    with pytest.raises(ValueError, match="rollout.name=server: weights cannot be loaded while"):
        ServerCore(options)


def test_spans():
    spans = []
    for version, count in ((3, 2), (3, 4), (4, 0), (5, 1), (5, 0)):
        extend_spans(spans, version, count)
    assert spans == [(3, 6), (5, 1)]
    with pytest.raises(ValueError, match="2 tokens disappeared"):
        extend_spans(spans, 5, -2)
