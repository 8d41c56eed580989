"""BatchedEngine: requests, weight syncs, sleep and failures on the engine's thread."""

import asyncio
import math
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from tests.rollout.oracle import ask, load, until
from verlite import progress
from verlite.envs.step import Step
from verlite.rollout import batched
from verlite.rollout.batched import BatchedEngine
from verlite.rollout.engines.hf import HFCore
from verlite.rollout.trajectory import Request, run_all
from verlite.rollout.types import (
    EngineDied,
    EngineError,
    EngineOptions,
    Load,
    Sampling,
    WeightSyncError,
)
from verlite.spec.roles import GenerationSpec, ModelSpec

SAMPLING = Sampling(max_tokens=30, seed=1, ignore_eos=True)


class FaultyCore(HFCore):
    """The embedded engine, with a fault that a test switches on."""

    def __init__(self, path: str):
        self.fault = lambda: None
        self.aborted: list[int] = []
        super().__init__(
            EngineOptions(
                ModelSpec(path=path),
                GenerationSpec(max_num_seqs=8),
                dtype=torch.float32,
                device=torch.device("cpu"),
                max_model_len=64,
                seed=0,
                pretrained=True,
            )
        )

    def step(self):
        self.fault()
        return super().step()

    def abort(self, request_id):
        self.aborted.append(request_id)
        super().abort(request_id)


class SleepyCore(FaultyCore):
    """Frees both kinds of memory, as vLLM does on a GPU."""

    def sleep(self):
        super().sleep()
        return {"weights", "kv_cache"}


class EarlierCore(FaultyCore):
    """A core of one's own, from before requests could go on after tokens that they had."""

    def add(self, request_id, prompt_ids, sampling):
        super().add(request_id, prompt_ids, sampling)


def start(path: str, kind=FaultyCore, **options) -> tuple[BatchedEngine, FaultyCore]:
    cores = []
    engine = BatchedEngine(
        lambda: cores.append(kind(path)) or cores[0], has_weights=True, **options
    )
    return engine, cores[0]


def raises(error):
    def fault():
        raise error

    return fault


def test_heartbeats_see_steps_and_loads_also_between_two_calls(tiny_qwen2):
    engine, core = start(tiny_qwen2)
    pending, before = [], progress.here.steps
    core.fault = lambda: pending.append(progress.here.pending)
    ask(engine, [[5], [6]], SAMPLING)
    until(lambda: progress.here.pending == 0)  # after the step, and before another job
    assert pending == [2] * 30
    assert progress.here.steps == before + 30
    load(engine, core.model, 1)
    assert progress.here.steps == before + 31
    engine.close()


def test_a_core_that_takes_no_tokens_so_far_samples_whole_requests(tiny_qwen2):
    engine, _ = start(tiny_qwen2, EarlierCore)
    assert [len(one.ids) for one in ask(engine, [[5], [6]], SAMPLING)] == [30, 30]
    engine.close()


def test_failed_step_fails_all_requests(tiny_qwen2):
    engine, core = start(tiny_qwen2)
    core.fault = raises(MemoryError("no room for the cache"))
    requests = [Request([5, i], SAMPLING) for i in range(20)]
    with pytest.raises(
        EngineError, match="died in a generation step: MemoryError: no room for the cache"
    ) as caught:
        asyncio.run(run_all(engine, requests))
    assert isinstance(caught.value.__cause__, MemoryError)
    for attempt in (lambda: ask(engine, [[5]], SAMPLING), engine.fingerprint, engine.sleep):
        with pytest.raises(EngineError, match="died"):
            attempt()
    engine.close()


@pytest.mark.parametrize(("slots", "at_once"), [(math.inf, 3), (2, 2)])
def test_the_load_counts_time_in_steps_and_the_samples_in_them(
    tiny_qwen2, monkeypatch, slots, at_once
):
    now = [100.0]
    monkeypatch.setattr(batched, "time", SimpleNamespace(monotonic=lambda: now[0]))
    engine, core = start(tiny_qwen2, slots=slots)
    steps = []

    def two_seconds():
        steps.append(core.pending())
        now[0] += 2.0

    core.fault = two_seconds
    now[0] += 10.0
    assert engine.load() == Load(110.0, 0.0, 0.0)
    ask(engine, [[5], [6], [7]], SAMPLING)
    load = engine.load()
    assert set(steps) == {3} and load.busy_s == 2.0 * len(steps) > 0
    assert load.sample_seconds == at_once * load.busy_s
    assert load.at == 110.0 + load.busy_s
    engine.close()


def test_failed_start_raises_in_the_constructor(tmp_path):
    with pytest.raises(OSError, match="nowhere"):
        start(str(tmp_path / "nowhere"))


def test_hanging_engine_raises_and_names_the_key(tiny_qwen2):
    engine, core = start(tiny_qwen2, request_timeout_s=0.3)
    release = threading.Event()
    core.fault = lambda: release.wait(20)
    began = time.monotonic()
    with pytest.raises(
        EngineDied, match=r"hangs: .*\(rollout.request_timeout_s=0.3\) while 2 requests waited"
    ):
        ask(engine, [[5], [6]], SAMPLING)
    assert time.monotonic() - began < 10
    core.fault = lambda: None
    engine._timeout = 60.0  # the rest must pass on a slow machine too
    release.set()
    assert len(ask(engine, [[5]], SAMPLING)[0].ids) == 30
    assert sorted(core.aborted) == [0, 1]
    engine.close()


def test_long_queue_does_not_time_out(tiny_qwen2, monkeypatch):
    """The clock advances by 30 s per step: 3600 s in all, with a timeout of 1000 s between
    steps."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(batched, "time", SimpleNamespace(monotonic=lambda: clock.now))
    engine, core = start(tiny_qwen2, request_timeout_s=1000.0)
    core.fault = lambda: setattr(clock, "now", clock.now + 30.0)
    answers = ask(engine, [[5]] * 32, SAMPLING)
    assert len(answers) == 32 and clock.now == 3600.0
    engine.close()


def test_cancelled_request_does_not_affect_others(tiny_qwen2):
    engine, core = start(tiny_qwen2)
    core.fault = lambda: time.sleep(0.01)
    (expected,) = ask(engine, [[5, 6]], SAMPLING)

    async def cancel_one():
        kept, dropped = (asyncio.create_task(engine.generate([5, i], SAMPLING)) for i in (6, 7))
        await asyncio.sleep(0.1)
        dropped.cancel()
        return await kept

    assert asyncio.run(cancel_one()).ids == expected.ids
    assert len(core.aborted) == 1 and engine._call(lambda core: core.pending()) == 0
    engine.close()


def test_requests_started_together_share_steps(tiny_qwen2):
    engine, core = start(tiny_qwen2)
    running = []
    core.fault = lambda: running.append(core.pending())

    class Slow(list):
        def __iter__(self):
            time.sleep(0.02)
            return super().__iter__()

    asyncio.run(run_all(engine, [Request(Slow([5, i]), SAMPLING) for i in range(8)]))
    assert running == [8] * 30
    engine.close()


class Again:
    """An environment that always asks for another turn."""

    stop = tuple("abcdefghijklmnopqrstuvwxyz")

    async def step(self, text, last):
        return Step("more")


def test_turns_woken_by_one_step_share_steps(tiny_qwen2):
    """Equal samples end each turn in the same step."""
    engine, core = start(tiny_qwen2)
    running = []
    core.fault = lambda: running.append(core.pending())
    request = Request(
        [5, 6], Sampling(1.2, max_tokens=40, seed=3), Again(), max_turns=3, max_response_tokens=50
    )
    for _ in range(20):
        trajectories = asyncio.run(run_all(engine, [request] * 8))
        assert [t.turns for t in trajectories] == [4] * 8
    assert set(running) == {8}
    engine.close()


def test_request_cancelled_before_it_starts_is_not_run(tiny_qwen2):
    engine, core = start(tiny_qwen2)

    async def cancel_at_once():
        dropped, kept = (asyncio.create_task(engine.generate([5, i], SAMPLING)) for i in (6, 7))
        asyncio.get_running_loop().call_soon(dropped.cancel)
        return await kept

    running = []
    core.fault = lambda: running.append(core.pending())
    assert len(asyncio.run(cancel_at_once()).ids) == 30
    assert running == [1] * 30
    engine.close()


def test_close_fails_running_and_later_requests(tiny_qwen2):
    engine, core = start(tiny_qwen2)
    core.fault = lambda: time.sleep(0.02)

    async def close_in_the_middle():
        running = asyncio.create_task(engine.generate([5], SAMPLING))
        await asyncio.sleep(0.1)
        await asyncio.to_thread(engine.close)
        return await asyncio.gather(running, engine.generate([5], SAMPLING), return_exceptions=True)

    errors = asyncio.run(close_in_the_middle())
    assert [str(error) for error in errors] == ["the engine was closed"] * 2 and all(
        isinstance(error, EngineError) for error in errors
    )
    engine.close()
    assert not engine._thread.is_alive()


def test_sync_is_rejected_while_requests_run(tiny_qwen2):
    engine, core = start(tiny_qwen2)
    core.fault = lambda: time.sleep(0.02)

    async def sync_in_the_middle():
        running = asyncio.create_task(engine.generate([5], SAMPLING))
        await asyncio.sleep(0.1)
        with pytest.raises(WeightSyncError, match="1 requests are still running"):
            await asyncio.to_thread(load, engine, core.model, 1)
        with pytest.raises(RuntimeError, match="cannot sleep"):
            await asyncio.to_thread(engine.sleep)
        return await running

    assert asyncio.run(sync_in_the_middle()).weight_versions == [(0, 30)]
    load(engine, core.model, 1)
    assert ask(engine, [[5]], SAMPLING)[0].weight_versions == [(1, 30)]
    engine.close()


def test_wake_order_after_sleep(tiny_qwen2):
    engine, core = start(tiny_qwen2, SleepyCore)
    (before,) = ask(engine, [[5]], SAMPLING)
    engine.sleep()
    with pytest.raises(EngineError, match=r"sleep\(\) freed its weights"):
        ask(engine, [[5]], SAMPLING)
    with pytest.raises(WeightSyncError, match=r'wake\("weights"\)'):
        load(engine, core.model, 7)
    engine.wake("weights")
    with pytest.raises(EngineError, match="freed its weights"):
        ask(engine, [[5]], SAMPLING)
    load(engine, core.model, 7)
    with pytest.raises(EngineError, match=r'call wake\("kv_cache"\) first'):
        ask(engine, [[5]], SAMPLING)
    engine.wake("kv_cache")
    (after,) = ask(engine, [[5]], SAMPLING)
    assert after.ids == before.ids and after.weight_versions == [(7, 30)]
    engine.close()
