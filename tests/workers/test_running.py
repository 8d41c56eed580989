"""Samples in progress are counted, written, read, and continued by another worker."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.rollout.oracle import WAIT_S, Steps
from tests.workers.test_background import requests, worker
from verlite.envs.step import Step
from verlite.protocol import fields
from verlite.protocol.data import DataProto, object_array
from verlite.rewards.result import RewardResult
from verlite.rollout.batched import build_engine
from verlite.rollout.trajectory import Request, Sample, goes_on, run_trajectory
from verlite.rollout.types import Completion, Sampling, Trajectory
from verlite.spec.roles import GenerationSpec, ModelSpec
from verlite.trainer.saved_groups import rows_of
from verlite.workers.running import Running, as_rows, of_row, oldest_version

UIDS, PROMPTS = ["a", "b", "a", "b"], [[5, 6, 7], [9], [5, 6, 7], [9]]
SAMPLINGS = [
    Sampling(max_tokens=count, seed=i, ignore_eos=True) for i, count in enumerate((20, 20, 4, 30))
]


def hf_worker(path):
    engine = build_engine(
        "hf", ModelSpec(path=path), GenerationSpec(), 64, torch.device("cpu"), 0, pretrained=True
    )
    return worker(engine)


def all_groups(rollout):
    parts = []
    while sum(map(len, parts)) < 4:
        parts.append(rollout.finished(WAIT_S).select(meta_info_keys=[]))
    rollout.close()
    found = DataProto.concat(parts)
    order = sorted(
        range(4),
        key=lambda row: (found.non_tensor_batch["uid"][row], found.batch["sample_index"][row]),
    )
    return found.select_idxs(order)


def through_a_file(rows, folder):
    rows.save_to_disk(folder)
    return fields.check(DataProto.load_from_disk(folder))


def test_samples_go_on_in_another_worker_as_if_they_had_not_been_cut(tiny_qwen2, tmp_path):
    """Also what was finished in a group that was not: it is not scored again."""
    batch = requests(UIDS, PROMPTS, samplings=SAMPLINGS)
    whole = hf_worker(tiny_qwen2)
    whole.start(batch)
    expected = all_groups(whole)

    cut = hf_worker(tiny_qwen2)
    steps, seen = Steps(cut.engine), []
    steps.before[8] = lambda: seen.append(cut.running())
    cut.start(batch)
    all_groups(cut)
    (rows,) = seen
    rows = through_a_file(rows, tmp_path / "rows")
    begun = {}
    for uid, place, row in zip(
        rows.non_tensor_batch["uid"],
        rows.batch["sample_index"].tolist(),
        rows_of(rows),
        strict=True,
    ):
        begun[uid, place] = row
    assert set(begun) == {("a", 0), ("a", 1), ("b", 0), ("b", 1)}
    assert [begun[name]["running"]["is_finished"] for name in sorted(begun)] == [
        False,
        True,
        False,
        False,
    ]
    assert {name: len(row["turn_ids"]) for name, row in begun.items()} == {
        ("a", 0): 8, ("a", 1): 0, ("b", 0): 8, ("b", 1): 8
    }  # fmt: skip
    begun["a", 1]["running"]["result"] = {"score": 17.0}  # as if it had been scored so

    other = hf_worker(tiny_qwen2)
    del begun["b", 0]
    names = [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    so_far = object_array([begun.get(name) for name in names])
    other.start(batch.with_non_tensor(so_far=so_far))
    found = all_groups(other)
    scores = expected.batch["raw_scores"].tolist()
    assert found.batch["raw_scores"].tolist() == [scores[0], 17.0, *scores[2:]]
    for name in ("prompt_ids", "response_ids", "response_mask", "text", "version_spans", "status"):
        for one, two in zip(
            found.non_tensor_batch[name], expected.non_tensor_batch[name], strict=True
        ):
            assert np.array_equal(one, two), name
    for one, two in zip(
        found.non_tensor_batch["rollout_log_probs"],
        expected.non_tensor_batch["rollout_log_probs"],
        strict=True,
    ):
        assert one == pytest.approx(two, abs=1e-5)


def test_nothing_is_told_of_groups_that_were_returned_or_have_no_token(tiny_qwen2):
    rollout = hf_worker(tiny_qwen2)
    assert len(rollout.running()) == 0
    rollout.start(requests(["a"], [[5]], samplings=SAMPLINGS[2:3]))
    assert len(rollout.finished(WAIT_S)) == 1
    assert len(rollout.running()) == 0 and not rollout._samples
    rollout.close()


def test_a_blocked_thread_holds_up_nothing(tiny_qwen2, monkeypatch):
    rollout = hf_worker(tiny_qwen2)
    monkeypatch.setattr("verlite.workers.rollout.RUNNING_S", 0.05)
    rollout.start(requests(["a"], [[5]], samplings=SAMPLINGS[2:3]))

    async def never():
        await asyncio.Event().wait()

    monkeypatch.setattr(rollout, "_look", never)
    assert len(rollout.running()) == 0
    rollout.close()


# Turns


class Script:
    """Answers turn t with the ids [10 + t, 20 + t] and ends it."""

    def __init__(self):
        self.calls = []
        self.tokenizer = None

    async def generate(self, prompt_ids, sampling, so_far=None, name=None):
        turn = len([i for i in prompt_ids if 10 <= i < 20])
        self.calls.append((turn, so_far, name, sampling.seed))
        return Completion([10 + turn, 20 + turn], [-1.0, -2.0], "stop", [(turn + 1, 2)])


class Env:
    stop = ()

    def __init__(self):
        self.steps = []

    async def step(self, text, last):
        self.steps.append(text)
        return Step("x", done=len(self.steps) == 3, reward=1.0)


class Replays(Env):
    async def resume(self, turns):
        self.steps += turns


class Words:
    def decode(self, ids, skip_special_tokens=True):
        return " ".join(map(str, ids))


def asked(env):
    return Request(
        [1], Sampling(max_tokens=5, seed=7), env, 3, 50, 9, lambda step, ids, limit: ([99], False)
    )


def finish(env, sample=None):
    engine = Script()
    engine.tokenizer = Words()
    return asyncio.run(run_trajectory(engine, asked(env), sample=sample)), engine.calls


def test_a_sample_of_several_turns_goes_on_where_it_was_cut():
    """Cut while the engine generates a turn, and while the environment answers one."""
    whole, calls = finish(Replays())
    assert whole.response_ids == [10, 20, 99, 11, 21, 99, 12, 22] and len(calls) == 3

    cut = Trajectory([1])
    cut.append_sampled(Completion([10, 20], [-1.0, -2.0], "stop", [(1, 2)]))
    in_step = replace(
        cut, **{name: list(value) for name, value in vars(cut).items() if isinstance(value, list)}
    )
    env = Env()
    found, calls = finish(env, Sample(("a", 0), in_step))
    assert found.response_ids == whole.response_ids and env.steps == ["10 20", "11 21", "12 22"]
    assert [turn for turn, *_ in calls] == [1, 2], "turn 0 is not generated again"

    cut.turn_scores, cut.infos = [1.0], [{"reward": 1.0}]
    cut.append_observation([99])
    env = Replays()
    so_far = Completion([11], [-1.0], "", [(2, 1)])
    found, calls = finish(env, Sample(("a", 0), cut, so_far))
    assert env.steps == ["10 20", "11 21", "12 22"], "it was told what it had answered"
    assert found.response_ids == whole.response_ids and found.turn_scores == [1.0] * 3
    assert found.weight_versions == whole.weight_versions == [(1, 2), (2, 2), (3, 2)]
    whole_seeds = [seed for *_, seed in finish(Replays())[1]]
    assert calls == [
        (1, so_far, (("a", 0), 1), whole_seeds[1]),
        (2, None, (("a", 0), 2), whole_seeds[2]),
    ]


def test_only_environments_that_resume_are_continued_after_their_first_answer():
    begun, answered = Trajectory([1]), Trajectory([1], turn_scores=[0.0])
    assert goes_on(asked(Env()), begun) and goes_on(asked(Replays()), begun)
    assert not goes_on(asked(Env()), answered) and goes_on(asked(Replays()), answered)
    assert goes_on(Request([1], Sampling()), begun)
    one = Running(("a", 0), answered, Completion([3], [-1.0], "", [(1, 1)]), request=asked(Env()))
    assert not one.goes_on and replace(one, is_finished=True).goes_on
    assert not Running(("a", 0), begun, request=asked(Env())).goes_on, "nothing was sampled"


def a_row(tmp_path):
    trajectory = Trajectory([1, 2])
    trajectory.append_sampled(Completion([10, 20], [-1 / 3, -2.0], "stop", [(3, 1), (4, 1)]))
    trajectory.append_observation([99])
    trajectory.turn_scores, trajectory.infos, trajectory.invalid_turns = [0.5], [{"a": 1}], 1
    trajectory.branches, trajectory.requests = [(2, 2), (1, 0)], [{"credit": 0.5}]
    turn = Completion([30], [-0.25], "", [(2, 1)])
    result = RewardResult(0.5, {"acc": 1.0, "why": "x"})
    sample = Running(("u", 1), trajectory, turn, is_finished=False, result=result)
    (row,) = rows_of(through_a_file(as_rows([sample]), tmp_path / "rows"))
    return sample, row


def test_every_number_of_a_sample_survives_the_file(tmp_path):
    sample, row = a_row(tmp_path)
    found = of_row(row, ("u", 1))
    found.trajectory.log_probs[0] = pytest.approx(sample.trajectory.log_probs[0], abs=1e-7)
    assert found.trajectory == sample.trajectory and found == sample
    assert oldest_version(found) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda row: row["running"]["trajectory"]["weight_versions"].pop(),
        lambda row: row["running"]["trajectory"]["segments"].pop(),
        lambda row: row["running"]["trajectory"].update(turns=2),
        lambda row: row["running"]["trajectory"]["branches"].pop(),
        lambda row: row["running"]["turn_versions"].append([5, 1]),
        lambda row: row["running"].update(result={"points": 1}),
        lambda row: row["running"]["trajectory"].update(other=1),
        lambda row: row.update(turn_log_probs=np.zeros(2, np.float32)),
        lambda row: row.update(response_ids=np.zeros(2, np.int32)),
    ],
)
def test_a_damaged_sample_is_refused(damage, tmp_path):
    _, row = a_row(tmp_path)
    damage(row)
    with pytest.raises((ValueError, TypeError)):
        of_row(row)
