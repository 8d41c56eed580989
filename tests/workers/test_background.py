"""Groups sampled in the background while the rollout worker does other things."""

import asyncio
import threading
from concurrent.futures import Future
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.models import tiny_tokenizer
from tests.rollout.oracle import WAIT_S, until
from verlite.envs.factory import EnvFactory
from verlite.protocol import fields
from verlite.protocol.data import DataProto, object_array
from verlite.rewards.process import FunctionError
from verlite.rewards.result import RewardResult
from verlite.rewards.scorer import Stream
from verlite.rollout.batched import build_engine
from verlite.rollout.types import Completion, EngineDied, EngineError, Load, Sampling
from verlite.spec.roles import GenerationSpec, ModelSpec
from verlite.workers import background
from verlite.workers.background import Background, SamplesStuck
from verlite.workers.rollout import RolloutWorker


class Engine:
    """Responds with the prompt, once `may_finish` has its first id. Prompt [0] is refused, and [1]
    reveals that the engine is dead."""

    def __init__(self, *may_finish):
        self.tokenizer = tiny_tokenizer()
        self.may_finish = set(may_finish)
        self.asked, self.cancelled = [], []
        self.last_step = 0.0

    def load(self):
        return Load(0.0)

    async def generate(self, prompt_ids, sampling, so_far=None, name=None):
        self.asked.append(prompt_ids)
        try:
            while prompt_ids[0] not in self.may_finish:
                await asyncio.sleep(0.002)
        except asyncio.CancelledError:
            self.cancelled.append(prompt_ids)
            raise
        if prompt_ids == [0]:
            raise ValueError("refused")
        if prompt_ids == [1]:
            raise EngineError("dead")
        return Completion(
            list(prompt_ids), [-0.5] * len(prompt_ids), "stop", [(3, len(prompt_ids))]
        )


class Scores:
    """A scorer whose score is the row's ground truth. It scores while `may` is set."""

    needs_prompts = False

    def __init__(self):
        self.may, self.waiting = threading.Event(), False
        self.may.set()

    def score(self, items, limit_s=None):
        self.waiting = not self.may.is_set()
        assert self.may.wait(WAIT_S)
        if any(item.ground_truth == "broken" for item in items):
            raise FunctionError("cannot be loaded")
        return [RewardResult(float(item.ground_truth)) for item in items]

    def stream(self):
        return Stream(self, timeout_s=60)

    def close(self):
        pass


def worker(engine):
    rollout = RolloutWorker.__new__(RolloutWorker)
    rollout.engine, rollout.env_factory = engine, EnvFactory()
    rollout.spec, rollout.scorer = (
        SimpleNamespace(agent=None, max_turns=0, phase_timeout_s=WAIT_S),
        Scores(),
    )
    return rollout


@pytest.fixture
def rollout():
    rollout = worker(Engine())
    yield rollout
    rollout.scorer.may.set()
    rollout.abandon()
    assert not any(thread.name == "verlite-background" for thread in threading.enumerate())


def requests(uids, prompts, truths=None, samplings=None):
    columns = {
        "uid": uids,
        "prompt_ids": prompts,
        "sampling": samplings or [Sampling()] * len(uids),
        "data_source": ["s"] * len(uids),
        "ground_truth": truths or list(range(len(uids))),
        "extra_info": [{"row": row} for row in range(len(uids))],
    }
    return DataProto.from_dict({}, {name: object_array(c) for name, c in columns.items()})


def summary(batch):
    """Return (uid, place in the group, response, score) per row."""
    columns = batch.non_tensor_batch
    return [
        (uid, place, ids.tolist(), score)
        for uid, place, ids, score in zip(
            columns["uid"],
            batch.batch["sample_index"].tolist(),
            columns["response_ids"],
            batch.batch["raw_scores"].tolist(),
            strict=True,
        )
    ]


def test_groups_are_returned_once_when_all_their_samples_are_scored(rollout):
    engine = rollout.engine
    rollout.start(requests(["a", "b", "a", "b"], [[5], [6], [7], [6, 6]]))
    rollout.start(requests(["c"], [[8]]))
    engine.may_finish |= {5, 6}
    first = rollout.finished(WAIT_S)
    assert summary(first) == [("b", 0, [6], 1.0), ("b", 1, [6, 6], 3.0)]
    nothing = rollout.finished(0.0)
    assert len(nothing) == 0
    engine.may_finish.add(7)
    rest = summary(rollout.finished(WAIT_S))
    assert rest == [("a", 0, [5], 0.0), ("a", 1, [7], 2.0)]
    engine.may_finish.add(8)
    last = rollout.finished(WAIT_S)
    assert summary(DataProto.concat([nothing, last])) == [("c", 0, [8], 0.0)]
    for batch in (first, nothing):
        fields.check(batch)
        assert fields.columns(batch) == fields.columns(last)


def test_a_group_waits_for_its_rewards(rollout):
    rollout.engine.may_finish.add(5)
    rollout.scorer.may.clear()
    rollout.start(requests(["a", "a"], [[5], [5]]))
    assert len(rollout.finished(0.2)) == 0
    rollout.scorer.may.set()
    batch = rollout.finished(WAIT_S)
    assert [score for *_, score in summary(batch)] == [0.0, 1.0]
    waited = batch.batch["reward_seconds"].tolist()
    assert waited[0] == waited[1] and 0.15 < waited[0] < 30


def test_a_failed_sample_affects_its_row_only(rollout):
    rollout.engine.may_finish |= {0, 5}
    rollout.start(requests(["a", "a"], [[0], [5]]))
    batch = rollout.finished(WAIT_S)
    assert batch.non_tensor_batch["error"].tolist() == ["ValueError: refused", None]
    assert batch.batch["valid"].tolist() == [False, True]


def test_validation_works_meanwhile(rollout):
    rollout.start(requests(["a"], [[5]]))
    rollout.engine.may_finish.add(6)
    loads = iter([Load(10.0, 1.0, 2.0), Load(14.0, 4.0, 9.0), Load(20.0, 5.0, 12.0)])
    rollout.engine.load = lambda: next(loads)
    found = rollout.generate(requests(["v"], [[6]], [0.25]), sleep_after=False)
    assert found.batch["raw_scores"].tolist() == [0.25] and "uid" not in found.non_tensor_batch
    rollout.engine.may_finish.add(5)
    answer = rollout.finished(WAIT_S)
    assert summary(answer) == [("a", 0, [5], 0.0)]
    assert answer.meta_info["load"] == Load(16.0, 2.0, 5.0), "without the validation's 4 s"


def test_a_dead_engine_is_raised_after_the_groups_that_had_finished(rollout):
    engine = rollout.engine
    engine.may_finish |= {5}
    rollout.start(requests(["a", "b", "b", "c"], [[5], [1], [6], [7]]))
    until(lambda: not rollout._background._results.empty())
    engine.may_finish.add(1)
    rollout._background._thread.join(WAIT_S)
    assert sorted(engine.cancelled) == [[6], [7]]
    assert summary(rollout.finished(WAIT_S)) == [("a", 0, [5], 0.0)]
    for call in (lambda: rollout.finished(WAIT_S), lambda: rollout.start(requests(["d"], [[5]]))):
        with pytest.raises(EngineError, match="^dead$"):
            call()
    rollout.abandon()
    rollout.start(requests(["e"], [[5]]))
    assert summary(rollout.finished(WAIT_S)) == [("e", 0, [5], 0.0)]


def test_an_unusable_reward_function_is_raised(rollout):
    rollout.engine.may_finish.add(5)
    rollout.start(requests(["a"], [[5]], ["broken"]))
    with pytest.raises(FunctionError, match="cannot be loaded"):
        rollout.finished(WAIT_S)


@pytest.mark.parametrize("where", ["environment", "reward"])
def test_a_cancellation_that_nobody_requested_is_raised(rollout, monkeypatch, where):
    """A task group takes CancelledError of a job for its own, so the job would be lost."""
    if where == "environment":

        async def generate(prompt_ids, sampling, so_far=None, name=None):
            raise asyncio.CancelledError

        monkeypatch.setattr(rollout.engine, "generate", generate)
    else:
        rollout.engine.may_finish.add(5)
        monkeypatch.setattr(Stream, "score", lambda stream, item: cancelled())
    rollout.start(requests(["a", "a"], [[5], [5]]))
    with pytest.raises(RuntimeError, match="raised CancelledError, which nobody had requested"):
        rollout.finished(WAIT_S)


def cancelled():
    future = Future()
    future.cancel()
    return future


def test_a_job_that_blocks_the_thread_is_left_behind(monkeypatch, caplog):
    monkeypatch.setattr(background, "CLOSE_S", 0.1)
    blocks, release = threading.Event(), threading.Event()

    async def job():
        blocks.set()
        assert release.wait(WAIT_S)

    jobs = Background(nullcontext())
    jobs.start([job])
    assert blocks.wait(WAIT_S)
    closing = threading.Thread(target=jobs.close, daemon=True)
    closing.start()
    closing.join(WAIT_S / 4)
    ended = not closing.is_alive()
    release.set()
    jobs._thread.join(WAIT_S)
    assert ended and "did not end within 0.1 s" in caplog.text


def test_abandoned_samples_are_cancelled_and_dropped(rollout):
    rollout.engine.may_finish |= {5, 6}
    rollout.start(requests(["a"], [[5]]))
    assert rollout._background._results.get(timeout=WAIT_S) is not None
    rollout.scorer.may.clear()
    rollout.start(requests(["b", "c"], [[6], [7]]))
    rewards = rollout._rewards
    until(lambda: rollout.scorer.waiting and [7] in rollout.engine.asked)
    rollout.abandon()
    assert rollout.engine.cancelled == [[7]]
    rollout.scorer.may.set()
    assert rewards._scored.exception(WAIT_S) is None, "the reward of b arrives after its end"
    assert len(rollout.finished(0.0)) == 0
    rollout.engine.may_finish.add(7)
    rollout.start(requests(["c"], [[7]]))
    assert summary(rollout.finished(WAIT_S)) == [("c", 0, [7], 0.0)]


def test_a_group_equals_the_rows_of_generate(tiny_qwen2):
    """Every number that does not measure time, to the last bit."""
    engine = build_engine(
        "hf", ModelSpec(path=tiny_qwen2), GenerationSpec(), 64, torch.device("cpu"), 0,
        pretrained=True,
    )  # fmt: skip
    rollout = worker(engine)
    samplings = [Sampling(max_tokens=20 + i % 5, seed=i) for i in range(8)]
    prompts = [[5, 6, 7], [9]] * 4
    batch = requests(["a", "b"] * 4, prompts, samplings=samplings)
    expected = rollout.generate(batch, sleep_after=False)
    rollout.start(batch)
    parts = []
    while sum(map(len, parts)) < 8:
        parts.append(rollout.finished(WAIT_S).select(meta_info_keys=[]))
    rollout.close()
    found = DataProto.concat(parts)
    places = {"a": [0, 2, 4, 6], "b": [1, 3, 5, 7]}
    order = [places[uid][place] for uid, place, *_ in summary(found)]
    assert sorted(order) == list(range(8))
    expected = expected.select_idxs(order)
    for name, column in expected.non_tensor_batch.items():
        for one, other in zip(found.non_tensor_batch[name], column, strict=True):
            assert np.array_equal(one, other), name
    for name, tensor in expected.tensors().items():
        assert name == "reward_seconds" or torch.equal(found.batch[name], tensor), name


class Rooms(EnvFactory):
    """Counts how often it is open, and in how many event loops."""

    made: list["Rooms"] = []

    def __init__(self):
        self.open, self.loops = 0, set()
        self.made.append(self)

    def env(self, extra_info):
        return SimpleNamespace(stop=(), step=self.step)

    async def step(self, text, last):
        assert self.open == 1 and self.loops == {asyncio.get_running_loop()}
        return SimpleNamespace(reward=0.0, info={}, valid=True, done=True)

    async def __aenter__(self):
        self.open += 1
        self.loops.add(asyncio.get_running_loop())

    async def __aexit__(self, *error):
        self.open -= 1


def with_turns(rollout):
    rollout.spec.max_turns, rollout.spec.env = 1, "x"
    rollout.spec.longest_sequence, rollout.spec.max_obs_length = 9, 4
    rollout.encode = None


def test_background_samples_have_their_own_open_environments(rollout, monkeypatch):
    """Connections of an environment belong to one event loop."""
    monkeypatch.setattr("verlite.workers.rollout.build_env_factory", lambda env: Rooms())
    monkeypatch.setattr(Rooms, "made", [])
    rollout.env_factory = Rooms()
    with_turns(rollout)
    rollout.start(requests(["a", "b"], [[5], [6]]))
    rollout.engine.may_finish |= {6, 7}
    rollout.generate(requests(["v"], [[7]]), sleep_after=False)
    assert summary(rollout.finished(WAIT_S)) == [("b", 0, [6], 1.0)]
    rollout.engine.may_finish.add(5)
    batch = rollout.finished(WAIT_S)
    assert batch.non_tensor_batch["segments"].tolist() == [[("model", 1)]]
    rollout.abandon()
    validation, background = Rooms.made
    assert [len(rooms.loops) for rooms in Rooms.made] == [1, 1]
    assert validation.loops != background.loops
    assert validation.open == background.open == 0


@pytest.fixture
def clock(monkeypatch):
    """The time of the watch, in seconds."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(background, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_an_engine_without_a_step_within_the_limit_has_died(rollout, clock):
    rollout.spec.phase_timeout_s = 100.0
    rollout.start(requests(["a", "a", "b"], [[5], [6], [7]]))
    until(lambda: len(rollout.engine.asked) == 3)
    clock.now += 100.0
    assert len(rollout.finished(0.0)) == 0
    rollout.engine.last_step = 1050.0
    clock.now += 50.0
    assert len(rollout.finished(0.0)) == 0, "the last step is 100 s ago"
    clock.now += 1.0
    with pytest.raises(
        EngineDied, match=r"completed for 101.0 s .trainer.phase_timeout_s=100.: 3 wait for the eng"
    ):
        rollout.finished(0.0)


def test_finished_samples_are_not_waited_for(rollout, clock):
    rollout.spec.phase_timeout_s = 100.0
    rollout.engine.may_finish |= {0, 5}
    rollout.start(requests(["a", "a"], [[5], [0]]))
    assert len(rollout.finished(WAIT_S)) == 2
    clock.now += 1000.0
    assert len(rollout.finished(0.0)) == 0
    rollout.start(requests(["a"], [[6]]))
    assert len(rollout.finished(0.0)) == 0, "it has just begun"


def test_a_reward_that_does_not_end_is_named(rollout, clock):
    rollout.spec.phase_timeout_s = 100.0
    rollout.engine.may_finish.add(5)
    rollout.scorer.may.clear()
    rollout.start(requests(["a", "a"], [[5], [6]]))
    until(lambda: rollout.scorer.waiting and len(rollout.engine.asked) == 2)
    clock.now += 101.0
    with pytest.raises(
        SamplesStuck, match=r": 1 wait for (its reward|the engine), 1 wait for "
    ) as e:
        rollout.finished(0.0)
    assert "its reward" in str(e.value) and "the engine" in str(e.value)


@pytest.mark.parametrize("blocks", [False, True])
def test_a_step_of_an_environment_that_does_not_return_is_named(
    rollout, monkeypatch, clock, blocks
):
    reached, release = threading.Event(), threading.Event()

    class Hangs(EnvFactory):
        def env(self, extra_info):
            return SimpleNamespace(stop=(), step=self.step)

        async def step(self, text, last):
            reached.set()
            if blocks:
                wait_here(release)
            await asyncio.Event().wait()

    monkeypatch.setattr("verlite.workers.rollout.build_env_factory", lambda env: Hangs())
    with_turns(rollout)
    rollout.spec.phase_timeout_s = 100.0
    rollout.engine.may_finish.add(5)
    rollout.start(requests(["a"], [[5]]))
    assert reached.wait(WAIT_S)
    rollout.start(requests(["b", "b"], [[6], [6]]))
    if not blocks:
        until(lambda: rollout.engine.asked.count([6]) == 2)
    until(lambda: ("in wait_here" in rollout._background.blocked_at()) == blocks)
    until(lambda: bool(rollout._background.blocked_at()) == blocks)
    clock.now += 101.0
    with pytest.raises(SamplesStuck) as caught:
        rollout.finished(0.0)
    release.set()
    text = str(caught.value)
    assert "2 wait for " + ("its start" if blocks else "the engine") in text
    assert "1 wait for env.step" in text and "(trainer.phase_timeout_s=100)" in text
    assert ("blocks all samples" in text) == ("in wait_here" in text) == blocks


def wait_here(release):
    assert release.wait(WAIT_S)
