"""Finished groups in a checkpoint: which a run that resumes trains as they are."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.trainer.runs import driver_state
from verlite.control import limits
from verlite.control.commands import Do
from verlite.control.flow import Flow, State
from verlite.protocol.data import DataProto, equal, object_array
from verlite.rewards.result import RewardResult
from verlite.rollout.types import Completion, Sampling, Trajectory
from verlite.trainer import checkpoints, saved_groups
from verlite.trainer.checkpoints import Checkpoint
from verlite.trainer.errors import StepAborted
from verlite.trainer.groups import Groups, uid_of
from verlite.trainer.run import Run
from verlite.trainer.stages import groups as stage
from verlite.workers.rollout import DecodedResponse, as_columns
from verlite.workers.running import Running, as_rows, of_row

PROMPTS, SAMPLES = 2, 2


def requests(number: int, temperature: float = 1.0) -> DataProto:
    own = {
        "uid": [uid_of(number, PROMPTS)] * SAMPLES,
        "prompt_ids": [[number, 7]] * SAMPLES,
        "sampling": [Sampling(temperature, seed=10 * number + place) for place in range(SAMPLES)],
    }
    return DataProto.from_dict({}, {name: object_array(column) for name, column in own.items()})


def answer(number: int, version: int, infos: Any = None, programs: bool = False) -> DataProto:
    """Return what the rollout worker says of a group: columns of `as_columns`."""
    trajectories = []
    for place in range(SAMPLES):
        one = Trajectory([place, 9] if programs else [number, 7], session={"requests": place})
        ids = [number] * (place + 1)
        one.response_ids, one.response_mask = ids, [1] * len(ids)
        one.log_probs = [-0.1 * number - 1 / 3] * len(ids)
        one.weight_versions = [(version, len(ids))]
        one.infos = [infos or {"called": True}]
        trajectories.append(one)
    results = {place: RewardResult(number + place / 4) for place in range(SAMPLES)}
    decoded = [DecodedResponse(f"text {number}", [("model", "a")])] * SAMPLES
    batch = as_columns(trajectories, decoded, results, 0.0, multi_turn=True, programs=programs)
    index, uids = torch.arange(SAMPLES), [uid_of(number, PROMPTS)] * SAMPLES
    return batch.with_batch(sample_index=index).with_non_tensor(uid=object_array(uids))


@pytest.fixture
def groups() -> Groups:
    """Step 1 is trained. 2 and 3 are finished, by version 1 and 2; 4 runs, 5 is queued."""
    flow = Flow(groups_per_step=PROMPTS, bound=2, depth=2, engines=1, swaps=True)
    flow.published()
    found = Groups(flow)
    for number in flow.draw(4):
        found.add(number, number, requests(number))
    flow.assign()
    for number in (0, 1, 2):
        found.finish(answer(number, 1))
    found.in_step = [0, 1]
    found.trained()
    flow.published()
    found.finish(answer(3, 2))
    for number in flow.draw(2):
        found.add(number, number, requests(number))
    flow.assign()
    return found


def save(groups: Groups, run_dir: Path, warn=pytest.fail) -> tuple[Checkpoint, dict[str, Any]]:
    state = driver_state(1, version=2, groups=groups.state_dict(), code={"reward": "1"})

    def parts(folder: Path) -> None:
        for name, samples in (("groups", groups.answers), ("running", groups.running)):
            saved_groups.write(folder / name, samples, groups.requests, warn)

    checkpoint = checkpoints.write(run_dir, 1, json.loads(json.dumps(state)), parts)
    assert checkpoints.defect(checkpoint.path) is None
    return checkpoint, checkpoint.state()


def open_again(
    monkeypatch, checkpoint, state, max_age=2, temperature=1.0, code=None, swaps=True
) -> tuple[Groups, list[str], list[str]]:
    """Return the groups of a run that resumes, its warnings and what it says."""
    warnings: list[str] = []
    said: list[str] = []
    settings = SimpleNamespace(max_age=max_age, depth=2, partial_rollout=swaps)
    run: Any = SimpleNamespace(
        config=SimpleNamespace(async_training=settings, trainer=SimpleNamespace(mode="async")),
        plan=SimpleNamespace(prompts=PROMPTS, engines=1),
        total_steps=9,
        display=SimpleNamespace(warn=warnings.append, info=said.append),
    )
    monkeypatch.setattr(stage, "code_contents", lambda config: code or {"reward": "1"})
    monkeypatch.setattr(
        stage, "requests_of_group", lambda run, number, row: requests(number, temperature)
    )
    return stage.open_groups(run, state, checkpoint), warnings, said


def ready(groups: Groups) -> list[int]:
    found = [n for n, group in groups.flow.groups.items() if group.state is State.READY]
    assert found == sorted(groups.answers), "each finished group has its samples, and no other"
    return found


def test_finished_groups_are_trained_as_they_are(groups, tmp_path, monkeypatch):
    again, warnings, said = open_again(monkeypatch, *save(groups, tmp_path))
    assert ready(again) == [2, 3] and not warnings
    assert said == ["2 finished prompts of the checkpoint are not sampled again"]
    assert {number: again.flow.groups[number].oldest for number in (2, 3)} == {2: 1, 3: 2}
    again.flow.published()
    assert again.flow.assign() == {0: [4, 5]}
    again.in_step = again.flow.choose()
    groups.in_step = groups.flow.choose()
    assert again.in_step == groups.in_step == [2, 3]
    mine, kept = groups.samples([2, 3]), again.samples([2, 3])
    assert equal(mine.tensors(), kept.tensors())
    for name, column in mine.non_tensor_batch.items():
        theirs = kept.non_tensor_batch[name]
        if isinstance(column[0], np.ndarray):
            assert [row.dtype for row in theirs] == [row.dtype for row in column]
        # JSON has no tuples.
        expected = json.loads(json.dumps([np.asarray(v).tolist() for v in column], default=str))
        assert (
            json.loads(json.dumps([np.asarray(v).tolist() for v in theirs], default=str))
            == expected
        ), name
    again.trained()
    assert again.flow.step == 2 and not again.answers


def test_samples_of_agent_programs_have_prompts_of_their_own(groups, tmp_path, monkeypatch):
    for number, version in ((2, 1), (3, 2)):
        own = answer(number, version, programs=True)
        groups.answers[number] = own.pop(["sample_index"], ["uid"])[1]
    resumed, warnings, _ = open_again(monkeypatch, *save(groups, tmp_path))
    assert warnings == [] and ready(resumed) == [2, 3]
    assert [row["requests"] for row in resumed.answers[2].non_tensor_batch["session"]] == [0, 1]


def test_files_of_finished_groups_are_in_the_manifest(groups, tmp_path):
    checkpoint, _ = save(groups, tmp_path)
    names = ["rest.json", "tensors.safetensors"]
    assert sorted(checkpoint.files(saved_groups.FINISHED)) == names
    for name in names:
        path = checkpoint.path / saved_groups.FINISHED / name
        content = path.read_bytes()
        path.write_bytes(content[:-1] + b"?")
        assert f"groups/{name} does not have the hash" in checkpoints.defect(checkpoint.path)
        path.write_bytes(content)


def test_a_lower_max_age_samples_the_older_ones_again(groups, tmp_path, monkeypatch):
    again, warnings, _ = open_again(monkeypatch, *save(groups, tmp_path), max_age=0)
    assert ready(again) == [3] and not warnings, "2 has age 1 in step 2"
    again.flow.published()
    assert again.flow.assign() == {0: [2]}


@pytest.mark.parametrize("changed", [{"temperature": 0.5}, {"code": {"reward": "2"}}])
def test_other_settings_sample_them_again(groups, tmp_path, monkeypatch, changed):
    again, warnings, said = open_again(monkeypatch, *save(groups, tmp_path), **changed)
    assert ready(again) == [] and not said
    assert again.flow.counts()[State.QUEUED] == 4
    if "temperature" in changed:
        assert len(warnings) == 1 and warnings[0].startswith("2 finished prompts")


def test_a_checkpoint_without_them_samples_them_again(groups, tmp_path, monkeypatch):
    groups_saved = Groups(groups.flow, groups.rows, requests=groups.requests)
    checkpoint, state = save(groups_saved, tmp_path)
    assert not (checkpoint.path / saved_groups.FINISHED).exists()
    again, warnings, said = open_again(monkeypatch, checkpoint, state)
    assert ready(again) == [] and not warnings and not said


DAMAGES = {
    "a column less": lambda batch: batch.pop(["raw_scores"])[1],
    "another column": lambda batch: batch.with_batch(values=torch.ones(len(batch), 1)),
    "another dtype": lambda batch: batch.with_batch(valid=torch.ones(len(batch))),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_unknown_contents_are_a_warning(groups, tmp_path, monkeypatch, damage):
    checkpoint, state = save(groups, tmp_path)
    folder = checkpoint.path / saved_groups.FINISHED
    damage(DataProto.load_from_disk(folder)).save_to_disk(folder)
    again, warnings, _ = open_again(monkeypatch, checkpoint, state)
    assert ready(again) == []
    assert len(warnings) == 1 and warnings[0].startswith(f"{folder} cannot be used, so")


FOREIGN = {
    "fewer rows": lambda batch: batch[1:],
    "an older token": lambda batch: batch.with_batch(
        oldest_version=torch.zeros(len(batch), dtype=torch.int64)
    ),
    "another prompt": lambda batch: batch.with_non_tensor(prompt_ids=[[9]] * len(batch)),
    "a token less": lambda batch: batch.with_non_tensor(
        response_ids=[np.zeros(0, np.int32)] * len(batch)
    ),
}


@pytest.mark.parametrize("change", FOREIGN.values(), ids=FOREIGN)
def test_a_group_that_is_not_what_the_state_says_is_sampled_again(
    groups, tmp_path, monkeypatch, change
):
    checkpoint, state = save(groups, tmp_path)
    folder = checkpoint.path / saved_groups.FINISHED
    whole = DataProto.load_from_disk(folder)
    own = whole.non_tensor_batch["uid"] == uid_of(2, PROMPTS)
    DataProto.concat([change(whole[own]), whole[~own]]).save_to_disk(folder)
    again, warnings, _ = open_again(monkeypatch, checkpoint, state)
    assert ready(again) == [3] and len(warnings) == 1


def test_values_that_json_does_not_have_cost_the_groups_and_not_the_checkpoint(
    groups, tmp_path, monkeypatch
):
    groups.answers[2] = groups.answers[2].with_non_tensor(turn_infos=[[{"a": {1}}]] * SAMPLES)
    warnings: list[str] = []
    checkpoint, state = save(groups, tmp_path, warnings.append)
    assert len(warnings) == 1 and "without 2 finished prompts" in warnings[0]
    assert not (checkpoint.path / saved_groups.FINISHED).exists()
    assert ready(open_again(monkeypatch, checkpoint, state)[0]) == []


def test_a_full_disk_is_an_error_of_the_save(groups, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        saved_groups.write(tmp_path / "file", groups.answers, groups.requests, pytest.fail)


# Running groups


def looked_at(number: int, *versions: int) -> DataProto:
    """Return what the engine says of a running group: its last sample, of which each version has
    sampled two tokens."""
    ids = [number] * 2 * len(versions)
    turn = Completion(ids, [-0.5] * len(ids), "", [(version, 2) for version in versions])
    name = (uid_of(number, PROMPTS), SAMPLES - 1)
    return as_rows([Running(name, Trajectory([number, 7]), turn)])


def begun(groups: Groups) -> dict[int, int | None]:
    """Return the oldest versions of groups that go on."""
    flow = groups.flow.groups
    found = {n: g.oldest for n, g in flow.items() if g.state is State.QUEUED and g.oldest}
    assert sorted(found) == sorted(groups.running)
    return found


def test_running_groups_go_on_at_their_age(groups, tmp_path, monkeypatch):
    groups.running = {4: looked_at(4, 2)}
    again, warnings, said = open_again(monkeypatch, *save(groups, tmp_path))
    assert ready(again) == [2, 3] and begun(again) == {4: 2} and not warnings
    assert said == [
        "2 finished prompts of the checkpoint are not sampled again",
        "1 running prompts of the checkpoint go on",
    ]
    assert again.flow.counts()[State.QUEUED] == 2
    assert again.flow.assign() == {}, "the engines have no weights"
    again.flow.published()
    assert again.flow.assign() == {0: [4, 5]}
    assert {number: again.flow.groups[number].oldest for number in (4, 5)} == {4: 2, 5: 2}
    nothing, row = again.begun(4)
    assert nothing is None and of_row(row).so_far.ids == [4, 4] and again.begun(5) == [None] * 2
    assert again.begun(4) == [None] * 2, "once"


def test_finished_samples_of_agent_programs_wait_for_their_group(groups, tmp_path, monkeypatch):
    """Their prompts are those of the program, not of the row."""
    session = {"requests": 1}
    one = Trajectory([9], [4, 4], [1, 1], [-0.5, -0.5], weight_versions=[(2, 2)], session=session)
    name = (uid_of(4, PROMPTS), SAMPLES - 1)
    groups.running = {4: as_rows([Running(name, one, is_finished=True)])}
    again, warnings, _ = open_again(monkeypatch, *save(groups, tmp_path))
    assert not warnings and begun(again) == {4: 2}


def test_a_group_that_waits_to_go_on_is_saved_again_as_one_that_runs(groups, tmp_path, monkeypatch):
    groups.running = {4: looked_at(4, 2)}
    again, *_ = open_again(monkeypatch, *save(groups, tmp_path / "a"))
    third, warnings, _ = open_again(monkeypatch, *save(again, tmp_path / "b"))
    assert begun(third) == {4: 2} and ready(third) == [2, 3] and not warnings


def test_running_groups_that_no_step_can_take_are_sampled_again(groups, tmp_path, monkeypatch):
    groups.running = {4: looked_at(4, 1, 2)}
    groups.flow.groups[4].oldest = 1
    saved = save(groups, tmp_path)
    assert begun(open_again(monkeypatch, *saved)[0]) == {4: 1}
    again, warnings, _ = open_again(monkeypatch, *saved, max_age=0)
    assert begun(again) == {} and ready(again) == [3] and not warnings


def test_a_finished_group_takes_the_last_place_before_a_running_one(groups, tmp_path, monkeypatch):
    """With max_age=1, step 2 can take two groups of version 1."""
    groups.running = {4: looked_at(4, 1), 5: looked_at(5, 1)}
    for number in (4, 5):
        groups.flow.groups[number].oldest = 1
    again, *_ = open_again(monkeypatch, *save(groups, tmp_path), max_age=1)
    assert ready(again) == [2, 3] and begun(again) == {4: 1}


def test_without_partial_rollout_no_sample_mixes_versions(groups, tmp_path, monkeypatch):
    groups.running = {4: looked_at(4, 2), 5: looked_at(5, 1)}
    groups.flow.groups[5].oldest = 1
    again, *_ = open_again(monkeypatch, *save(groups, tmp_path), swaps=False)
    assert begun(again) == {4: 2}


UNFIT = {
    "older than in the state": lambda rows: looked_at(4, 1),
    "another prompt": lambda rows: rows.with_non_tensor(prompt_ids=[np.array([9], np.int32)]),
    "another place": lambda rows: rows.with_batch(sample_index=torch.tensor([SAMPLES])),
    "twice": lambda rows: DataProto.concat([rows, rows]),
}


@pytest.mark.parametrize("change", UNFIT.values(), ids=UNFIT)
def test_a_running_group_that_is_not_what_the_state_says_is_sampled_again(
    groups, tmp_path, monkeypatch, change
):
    groups.running = {4: looked_at(4, 2)}
    checkpoint, state = save(groups, tmp_path)
    folder = checkpoint.path / saved_groups.RUNNING
    whole = DataProto.load_from_disk(folder)
    sampling = whole.non_tensor_batch["sampling"]
    changed = change(whole)
    own = {"sampling": [sampling[0]] * len(changed)}
    changed.with_non_tensor(**own).save_to_disk(folder)
    again, warnings, _ = open_again(monkeypatch, checkpoint, state)
    assert begun(again) == {} and ready(again) == [2, 3]
    assert [text.startswith("1 running prompts of") for text in warnings] == [True]


@pytest.mark.parametrize("changed", [{"temperature": 0.5}, {"code": {"reward": "2"}}])
def test_other_settings_sample_running_groups_again(groups, tmp_path, monkeypatch, changed):
    groups.running = {4: looked_at(4, 2)}
    again, *_ = open_again(monkeypatch, *save(groups, tmp_path), **changed)
    assert begun(again) == {} and again.flow.counts()[State.QUEUED] == 4


def test_damaged_running_samples_are_a_warning(groups, tmp_path, monkeypatch):
    groups.running = {4: looked_at(4, 2)}
    checkpoint, state = save(groups, tmp_path)
    folder = checkpoint.path / saved_groups.RUNNING
    batch = DataProto.load_from_disk(folder)
    batch.with_non_tensor(running=[{"trajectory": {}}]).save_to_disk(folder)
    again, warnings, _ = open_again(monkeypatch, checkpoint, state)
    assert begun(again) == {} and ready(again) == [2, 3]
    assert len(warnings) == 1 and warnings[0].startswith(f"{folder} cannot be used, so the running")


# The last look


class Supervisor:
    def __init__(self, rows: list[DataProto], calls: list[str]) -> None:
        self.workers, self.rows, self.calls = ["engine"], rows, calls

    def answers_within(self, call: str, limit_s: float) -> list[DataProto]:
        self.calls.append(call)
        assert limit_s == limits.ENGINES_LOOK_S
        return self.rows

    def stop(self, workers: list[str]) -> None:
        self.calls.append("stop")
        self.workers = []


@pytest.fixture
def engines(monkeypatch):
    """Engines that say what group 4 has; `calls` has what they were asked."""
    calls: list[str] = []
    supervisor = Supervisor([looked_at(4, 2), as_rows([])], calls)
    found = SimpleNamespace(supervisor=supervisor, workers=["engine"], running="running")
    found.calls = calls
    for name, value in (("group", lambda one: one), ("submit", lambda method: method)):
        monkeypatch.setattr(f"verlite.controller.worker_group.{name}", value)
    monkeypatch.setattr("verlite.trainer.run.group", lambda one: one)
    return found


def test_a_stop_looks_at_the_running_samples_before_the_engines_end(groups, engines):
    run: Any = object.__new__(Run)
    run.groups, run.workers = groups, {"rollout": engines}
    with pytest.raises(StepAborted):
        run.obey([Do.GIVE_UP])
    assert engines.calls == ["running", "stop"] and list(groups.running) == [4]
    groups.look(engines)  # by the save
    assert engines.calls == ["running", "stop"] and list(groups.running) == [4]


def test_a_look_replaces_what_an_engine_said_before_it(groups, engines, tmp_path, monkeypatch):
    groups.running = {4: looked_at(4, 2)}
    again, *_ = open_again(monkeypatch, *save(groups, tmp_path))
    engines.supervisor.rows = [looked_at(5, 2)]
    again.look(engines)
    assert sorted(again.running) == [4, 5], "4 has not been started yet"
    again.flow.published()
    again.flow.assign()
    again.begun(4)
    again.look(engines)
    assert sorted(again.running) == [5]
    engines.supervisor.rows = []  # no engine answers
    again.look(engines)
    assert sorted(again.running) == [5]
    again.engines_replaced([0])
    assert again.running == {}, "sampled again, without the tokens of the dead engine"


def test_a_finished_group_runs_no_more(groups, engines):
    groups.look(engines)
    groups.finish(answer(4, 2))
    assert groups.running == {}
