"""What the driver keeps of asynchronous training's groups, and how it publishes weights."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from verlite.config.schema import Config
from verlite.control.flow import Flow, State
from verlite.protocol.data import DataProto, object_array
from verlite.rollout.types import Load, Sampling
from verlite.trainer.errors import StepAborted, TooFewGroups
from verlite.trainer.groups import Groups, uid_of
from verlite.trainer.metrics import Stopwatch
from verlite.trainer.stages import groups as stage
from verlite.workers.rollout import KEPT, RolloutWorker

SAMPLES = 2


def requests(number: int, temperatures=(1.0,) * SAMPLES) -> DataProto:
    rows = len(temperatures)
    columns = {
        "uid": [uid_of(number, prompts=2)] * rows,
        "prompt_ids": [[number]] * rows,
        "sampling": [Sampling(temperature) for temperature in temperatures],
    }
    return DataProto.from_dict({}, {key: object_array(one) for key, one in columns.items()})


def answers(*numbers: int, oldest: int = 1, order=(1, 0)) -> DataProto:
    """Return what an engine says of finished groups: their rows in another order."""
    rows = [(number, place) for number in numbers for place in order]
    tensors = {
        "sample_index": torch.tensor([place for _, place in rows]),
        "oldest_version": torch.tensor([oldest] * len(rows)),
        "response_length": torch.tensor([place + 1 for _, place in rows]),
        "raw_scores": torch.tensor([10.0 * number + place for number, place in rows]),
    }
    uids = object_array([uid_of(number, prompts=2) for number, _ in rows])
    return DataProto.from_dict(tensors, {"uid": uids})


@pytest.fixture
def groups() -> Groups:
    """Two steps' groups that run: 0 and 1 on engine 0, 2 and 3 on engine 1."""
    flow = Flow(groups_per_step=2, bound=1, depth=1, engines=2, swaps=True)
    flow.published()
    found = Groups(flow)
    for number in flow.draw(flow.wanted()):
        found.add(number, 100 + number, requests(number))
    assert flow.assign() == {0: [0, 1], 1: [2, 3]}
    return found


def test_a_batch_has_the_groups_and_their_samples_in_order(groups):
    groups.finish(answers(3, 1))
    groups.finish(answers(0))
    groups.in_step = groups.flow.choose()
    batch = groups.samples(groups.in_step)
    assert batch.batch["raw_scores"].tolist() == [0, 1, 10, 11]
    assert list(batch.non_tensor_batch["uid"]) == ["1-0", "1-0", "1-1", "1-1"]
    assert "sample_index" not in batch.tensors()
    assert not groups.publication_is_due
    groups.trained()
    assert groups.publication_is_due
    groups.finish(answers(0))  # reported twice
    assert sorted(groups.rows) == [2, 3] and sorted(groups.answers) == [3]
    assert groups.state_dict()["rows"] == {"2": 102, "3": 103}


def test_a_group_is_as_old_as_its_oldest_token_and_failed_rows_have_none(groups):
    groups.flow.step = 1
    groups.flow.published()
    late = answers(0, oldest=2)
    late.batch["oldest_version"][0] = -1
    groups.finish(late)
    assert groups.flow.groups[0].oldest == 2
    groups.finish(answers(1, oldest=-1))
    assert groups.flow.groups[1].oldest == 1


def test_a_dead_engine_loses_what_it_ran_and_nothing_that_was_finished(groups):
    groups.finish(answers(0, 1, 2))
    groups.in_step = groups.flow.choose()
    assert groups.in_step == [0, 1]
    groups.engines_replaced([0, 1])
    assert {number: group.state for number, group in groups.flow.groups.items()} == {
        0: State.READY,
        1: State.READY,
        2: State.READY,
        3: State.QUEUED,
    }
    assert sorted(groups.answers) == [0, 1, 2]
    groups.finish(answers(3))  # an answer for a group that does not run
    assert sorted(groups.answers) == [0, 1, 2]
    assert [n for part in groups.flow.assign().values() for n in part] == [3]


def test_the_driver_keeps_the_tokens_of_finished_samples(groups, monkeypatch):
    """References to values of an engine's process would be lost with it."""
    kept = []

    def keep(batch, names):
        kept.append(names)
        return batch.with_batch(kept=torch.ones(len(batch)))

    monkeypatch.setattr(stage, "keep", keep)
    found = [answers(0).with_meta(load=Load(1.0)), answers(2).with_meta(load=Load(2.0))]
    monkeypatch.setattr(stage, "call_engines", lambda run, method, *args: found)
    run = SimpleNamespace(groups=groups, plan=SimpleNamespace(filters_groups=False))
    run.rollout = SimpleNamespace(finished=None)
    stage.collect(run)
    assert sorted(groups.answers) == [0, 2] and kept == [KEPT, KEPT]
    assert groups.loads == {0: Load(1.0), 1: Load(2.0)}
    assert all("kept" in answer.tensors() for answer in groups.answers.values())
    assert not RolloutWorker.finished.__keep_remote__


def test_lengths_are_compared_with_all_samples_that_have_finished(groups):
    """Groups with lengths of 1 and 2 finish: two are sampled again and trained, one is left out."""
    groups.finish(answers(0, 1))
    groups.in_step = groups.flow.choose()
    groups.again()
    groups.flow.assign()
    groups.finish(answers(0, 1, 2))
    groups.leave_out(2, "too old")
    groups.finish(answers(3))
    groups.in_step = [0, 1]
    groups.trained()
    assert list(groups.window.trained) == [[1, 2, 1, 2]]
    assert list(groups.window.sampled) == [[1, 2] * 6, []]


def test_the_load_of_an_engine_is_that_of_its_process(groups):
    groups.loads = {0: Load(10.0, 1.0, 3.0), 1: Load(50.0, 5.0, 5.0)}
    assert groups.metrics(1, 4.0) == {}, "there was no report before"
    groups.loads |= {0: Load(20.0, 6.0, 23.0), 1: Load(60.0, 15.0, 35.0)}
    assert groups.metrics(1, 4.0) == {
        "fully_async/rollouter/idle_ratio": 1 - 15.0 / 20.0,
        "async/idle_slots": 1 - 50.0 / (20.0 * 4.0),
    }
    assert groups.metrics(1, 4.0) == {}, "no time has passed"
    groups.loads |= {0: Load(30.0, 16.0, 123.0)}
    assert groups.metrics(1, 4.0)["async/idle_slots"] == 0.0, "more samples than places"
    groups.engines_replaced([1])
    groups.loads |= {0: Load(40.0, 16.0, 123.0), 1: Load(3.0, 2.0, 2.0)}
    assert groups.metrics(1, 4.0)["fully_async/rollouter/idle_ratio"] == 1.0


def test_samples_that_a_service_failed_are_forgotten(groups):
    groups.finish(answers(0, 1))
    groups.in_step = groups.flow.choose()
    groups.again()
    assert not groups.answers and not groups.in_step
    assert groups.flow.counts()[State.QUEUED] == 2


# Dynamic sampling


def judging(groups: Groups, limit: int = 0) -> SimpleNamespace:
    """Return a run with filter_groups."""
    config = Config()
    config.algorithm.filter_groups.max_num_gen_batches = limit
    plan = SimpleNamespace(prompts=2, gen_prompts=2)
    return SimpleNamespace(groups=groups, config=config, plan=plan, train_data=range(64))


def judge(run: SimpleNamespace, number: int, scores, valid=(True, True)) -> None:
    """Finish a group with these scores, and decide about it."""
    rows = range(len(scores))
    answer = answers(number, order=rows).with_batch(
        raw_scores=torch.tensor(scores),
        valid=torch.tensor(valid),
        response_length=torch.ones(len(scores), dtype=torch.long),
        sampled_tokens=torch.ones(len(scores), dtype=torch.long),
    )
    parts = object_array([{} for _ in rows])
    assert run.groups.finish(answer.with_non_tensor(reward_parts=parts)) == [number]
    stage.filter_group(run, number)


def test_groups_whose_samples_do_not_differ_are_left_out(groups):
    run = judging(groups)
    judge(run, 0, [1.0, 1.0])
    judge(run, 1, [0.0, 1.0])
    assert sorted(groups.rows) == [1, 2, 3] and groups.judged == [(1.0, False), (0.5, True)]
    assert groups.flow.gone[State.FILTERED] == 1 and groups.flow.wanted() == 1
    assert groups.flow.reasons == {"samples do not differ": 1}
    judge(run, 2, [0.0, 2.0])
    groups.in_step = groups.flow.choose()
    assert groups.in_step == [1, 2]
    groups.trained()
    assert groups.judged == []


def test_the_greedy_sample_of_remax_does_not_make_a_difference(groups):
    """Nor does its score count in the mean of the group's."""
    run = judging(groups)
    for number in (0, 1):
        groups.requests[number] = requests(number, (1.0, 1.0, 0.0))
    judge(run, 0, [1.0, 1.0, 0.0], valid=[True] * 3)
    judge(run, 1, [0.0, 1.0, 1.0], valid=[True] * 3)
    assert groups.judged == [(1.0, False), (0.5, True)]
    groups.finish(answers(2))
    groups.in_step = groups.flow.choose()
    assert groups.in_step == [1, 2]
    assert groups.answers[1].batch["raw_scores"].tolist() == [0.0, 1.0, 1.0], "its baseline stays"


def test_failed_samples_are_left_to_the_step_that_counts_them(groups):
    judge(judging(groups), 0, [1.0, 1.0], valid=[True, False])
    assert sorted(groups.answers) == [0]


def test_a_step_that_cannot_be_filled_ends_the_run(groups):
    """Two generations of two prompts: two prompts may be left out."""
    run = judging(groups, limit=2)
    judge(run, 0, [1.0, 1.0])
    judge(run, 1, [0.0, 0.0])
    with pytest.raises(TooFewGroups, match="after 2 generations of 2 prompts, only 0 of .*0.667"):
        judge(run, 2, [1.0, 1.0])


# Publishing the weights of a step


def publishing(groups: Groups, monkeypatch, **does) -> tuple[SimpleNamespace, list[str]]:
    """Return a run whose first step is updated, and what it calls; `does`: what a call does."""
    groups.finish(answers(0, 1))
    groups.in_step = groups.flow.choose()
    called = []
    run = SimpleNamespace(
        groups=groups,
        version=1,
        stop=SimpleNamespace(machine=SimpleNamespace(requested=None)),
        config=SimpleNamespace(async_training=SimpleNamespace(max_age=1)),
        stopwatch=Stopwatch(),
        display=SimpleNamespace(phase=lambda name: nullcontext()),
    )
    for name in ("collect", "sync_weights", "start_groups"):

        def call(run, *wait_s, name=name):
            called.append(name)
            if name == "sync_weights":
                run.version += 1
                run.groups.flow.published()
            does.get(name, lambda run: None)(run)

        monkeypatch.setattr(stage, name, call)
    return run, called


def stop(run):
    run.stop.machine.requested = "SIGTERM"


def give_up(run):
    stop(run)
    raise StepAborted


def test_weights_go_to_engines_that_run(groups, monkeypatch):
    run, called = publishing(groups, monkeypatch, collect=lambda run: groups.finish(answers(2)))
    stage.sync_running_engines(run)
    assert called == ["collect", "sync_weights", "start_groups"]
    assert list(groups.answers) == [2], "for the step's checkpoint"
    assert run.version == groups.flow.version == 2 and groups.flow.step == 1


def test_without_swaps_the_running_samples_are_finished_first(groups, monkeypatch):
    groups.flow.swaps = False
    coming = iter(([], [answers(2)], [], [answers(3)]))

    def collect(run):
        for answer in next(coming):
            groups.finish(answer)

    run, called = publishing(groups, monkeypatch, collect=collect)
    stage.sync_running_engines(run)
    assert called == [*["collect"] * 4, "sync_weights", "start_groups"] and run.version == 2
    assert sorted(groups.answers) == [2, 3]


@pytest.mark.parametrize("request_of", [stop, give_up])
def test_a_stop_waits_for_no_sample_and_keeps_the_step(groups, monkeypatch, request_of):
    """The updates are done: leaving here would save them as the step before."""
    groups.flow.swaps = False
    run, called = publishing(groups, monkeypatch, collect=request_of)
    stage.sync_running_engines(run)
    assert called == ["collect"]
    assert groups.flow.step == 1 and run.version == 2 and sorted(groups.rows) == [2, 3]


def test_a_stop_while_groups_are_started_keeps_the_step(groups, monkeypatch):
    run, called = publishing(groups, monkeypatch, start_groups=give_up)
    stage.sync_running_engines(run)
    assert called == ["collect", "sync_weights", "start_groups"] and run.version == 2


def test_nothing_is_asked_for_if_nothing_runs(groups, monkeypatch):
    groups.finish(answers(2, 3))
    run, called = publishing(groups, monkeypatch)
    stage.sync_running_engines(run)
    assert called == ["sync_weights", "start_groups"]
