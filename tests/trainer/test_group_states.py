"""The groups in a checkpoint: which a run resumes from, and which are refused before it starts."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from verlite.config.schema import Config, DataConfig
from verlite.control.flow import Flow, State
from verlite.trainer import opening
from verlite.trainer.checkpoints import Checkpoint, ResumeRefused
from verlite.trainer.common_checks import position
from verlite.trainer.groups import Groups, check_state, state_at
from verlite.trainer.opening import rl_preflight
from verlite.trainer.stages.groups import open_groups

PROMPTS, SIZE, STEP = 2, 11, 1


def a_flow() -> Flow:
    flow = Flow(groups_per_step=PROMPTS, bound=1, depth=1, engines=2, swaps=True)
    return flow


def saved() -> dict[str, Any]:
    """Return the driver's state after a step with groups in all states."""
    flow = a_flow()
    flow.published()
    groups = Groups(flow)
    flow.draw(4)
    flow.assign()
    for number in (0, 1, 2):
        flow.finished(number)
    flow.trained([0, 1])
    flow.published()
    groups.rows = {number: 2 * number for number in (2, 3, 4, 5)}
    assert flow.draw(flow.wanted()) == [4, 5]
    groups.undrawn = [9]
    assert [group.state for group in flow.groups.values()] == [
        *(State.READY, State.RUNNING, State.QUEUED, State.QUEUED)
    ]
    return {"step": STEP, "version": STEP + 1, "groups": groups.state_dict()}


def check(state: dict[str, Any], is_async: bool = True) -> None:
    check_state(state, is_async, PROMPTS, SIZE)


def test_what_a_run_writes_is_accepted():
    check(saved())
    without = {"step": STEP, "version": STEP + 1}
    check(without)
    check(without, is_async=False)
    trained = without | {"groups": state_at(STEP, PROMPTS)}
    check(trained)
    check(trained, is_async=False)


def test_groups_that_were_left_out_were_drawn():
    state = saved()
    flow = state["groups"]["flow"]
    flow["gone"] |= {"filtered": 2}
    with pytest.raises(ValueError, match="groups.flow.next is 6, and must be 8"):
        check(state)
    flow["next"] += 2
    check(state)


DAMAGES: dict[str, tuple[list[Any], Any, str]] = {
    "no object": (["groups"], [], "groups is [], and must be an object"),
    "empty": (["groups"], {}, "groups.flow is None, and must be an object"),
    "undrawn": (["groups", "undrawn"], {}, "groups.undrawn is {}, and must be a list"),
    "step as text": (["groups", "flow", "step"], "1", "groups.flow.step is '1', and must be a"),
    "another step": (["groups", "flow", "step"], 99, "groups.flow.step is 99, and must be 1,"),
    "numbers again": (["groups", "flow", "next"], 4, "groups.flow.groups[2] is [4,"),
    "numbers left out": (["groups", "flow", "next"], 7, "groups.flow.next is 7, and must be 6"),
    "trained": (["groups", "flow", "groups", 0, 1], "trained", "[0] is [2, 'trained', 1]"),
    "unknown": (["groups", "flow", "groups", 0, 1], [], "groups.flow.groups[0] is [2, [], 1]"),
    "half": (["groups", "flow", "groups", 0, 0], 0.5, "groups.flow.groups[0] is [0.5,"),
    "yes": (["groups", "flow", "groups", 0, 0], True, "groups.flow.groups[0] is [True,"),
    "twice": (["groups", "flow", "groups", 0, 0], 3, "groups.flow.groups is [3, 3, 4, 5]"),
    "listed twice": (
        ["groups", "flow", "groups"],
        [[2, "ready", 1], [3, "queued", None], [2, "ready", 1]],
        "groups.flow.groups is [2, 3, 2], and must be each number once",
    ),
    "too new": (["groups", "flow", "groups", 1, 2], 3, "groups.flow.groups[1] is [3, 'running', 3"),
    "too old": (["groups", "flow", "groups", 1, 2], 0, "groups.flow.groups[1] is [3, 'running', 0"),
    "queued": (["groups", "flow", "groups", 2, 2], 1, "groups.flow.groups[2] is [4, 'queued', 1"),
    "short": (["groups", "flow", "groups", 2], [4], "groups.flow.groups[2] is [4], and must be"),
    "gone": (["groups", "flow", "gone"], {"lost": 1}, "groups.flow.gone is {'lost': 1}"),
    "reasons": (["groups", "flow", "reasons"], {"a": "b"}, "groups.flow.reasons is {'a': 'b'}"),
    "no row": (["groups", "rows"], {"2": 4}, "groups.rows is ['2'], and must be of the groups"),
    "row below": (["groups", "rows", "3"], -1, "groups.rows is -1, and must be a row of the train"),
    "row beyond": (["groups", "rows", "3"], 11, "groups.rows is 11, and must be a row of the"),
    "row as text": (["groups", "rows", "3"], "6", "groups.rows is '6', and must be a row of"),
    "undrawn row": (["groups", "undrawn", 0], 11, "groups.undrawn is 11, and must be a row of"),
    "version": (["version"], 3, "version is 3, and must be step + 1 = 2"),
}


@pytest.mark.parametrize(("place", "value", "message"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_entry_is_named_with_its_value_and_the_remedy(place, value, message):
    state = copy.deepcopy(saved())
    target = state
    for part in place[:-1]:
        target = target[part]
    target[place[-1]] = value
    with pytest.raises(ValueError) as error:
        check(state)
    assert message in str(error.value)
    assert str(error.value).endswith("start again with trainer.resume_mode=disable")


def test_synchronous_training_does_not_leave_out_prompts_that_were_drawn():
    with pytest.raises(ValueError, match="groups: 5 prompts were drawn.*trainer.mode=async"):
        check(saved(), is_async=False)
    state = saved()
    state["groups"] |= state_at(STEP, PROMPTS) | {"undrawn": [9]}
    with pytest.raises(ValueError, match="groups: 1 prompts"):
        check(state, is_async=False)


def test_a_checkpoint_without_groups_goes_on_at_its_step():
    flow = a_flow()
    flow.load_state_dict(state_at(3, PROMPTS)["flow"])
    flow.published()
    assert flow.version == 4
    assert flow.draw(flow.wanted()) == [6, 7, 8, 9], "the next numbers, and none again"
    assert flow.counts()[State.TRAINED] == 6
    flow.assign()
    assert flow.finished(6, oldest=4), "the engines' version is that of the checkpoint"


def test_a_run_opens_the_groups_of_a_checkpoint_without_any_at_its_step():
    settings = SimpleNamespace(max_age=1, depth=None, partial_rollout=True)
    config = SimpleNamespace(async_training=settings, trainer=SimpleNamespace(mode="async"))
    plan = SimpleNamespace(prompts=PROMPTS, engines=1)
    run: Any = SimpleNamespace(config=config, plan=plan, total_steps=9)
    for step in (0, 3):
        flow = open_groups(run, {"step": step}).flow
        flow.published()
        assert (flow.step, flow.version) == (step, step + 1)
        assert flow.draw(1) == [step * PROMPTS]


def test_the_preflight_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(opening, "make_plan", lambda config: None)
    config = Config(data=DataConfig(train_files="x", train_batch_size=PROMPTS))
    found = rl_preflight(config)
    found.checkpoint = Checkpoint(tmp_path / "global_step_1", 1)
    loaded: list[Any] = []
    found.sampler = SimpleNamespace(size=SIZE, load_state_dict=loaded.append)
    found.state = saved() | {"sampler": {"position": 8}}
    found.config.trainer.mode = "async"
    position(found)
    assert loaded == [{"position": 8}]
    found.config.trainer.mode = "sync"
    file = tmp_path / "global_step_1" / "state.json"
    with pytest.raises(ResumeRefused, match=f"^{file}: groups: 5 prompts were drawn"):
        position(found)
    assert len(loaded) == 1
