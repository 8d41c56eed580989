"""What the control says to the user, and decisions that need no simulation."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest

import verlite.control
from verlite.control import events as e
from verlite.control import limits
from verlite.control.machine import Machine
from verlite.control.policy import Policy, is_due

POLICY = Policy(total_steps=5, max_restarts=1, failed_saves_key="trainer.max_failed_saves=")


def machine(*events, policy=POLICY, **begins) -> Machine:
    """Return a machine after these events, one second apart."""
    found = Machine()
    for now, event in enumerate((e.Begins(policy, **begins), *events)):
        found.handle(event, float(now))
    return found


STEP = (e.StepWanted(), e.UpdateBegins(), e.StepFinished(), e.StepMeasured(), e.StepEnds(1.0))


@pytest.mark.parametrize(
    ("events", "text"),
    [
        ((*STEP, e.StepWanted()), "step 1 is not saved yet; the run stops once it is"),
        (
            (*STEP, e.StepWanted(), e.UpdateBegins()),
            "the run finishes step 2, saves it, and stops",
        ),
    ],
)
def test_a_stop_says_what_will_happen(events, text):
    said = machine(*events).handle(e.Asked("SIGTERM"), 99.0)
    assert said == [e.Say(f"SIGTERM: {text}")]


@pytest.mark.parametrize("save_freq", [-1, 1])
def test_a_stop_in_the_last_step_of_supervised_fine_tuning_promises_no_save(save_freq):
    policy = Policy(gives_up=False, total_steps=1, save_freq=save_freq)
    one = Machine()
    for event in (e.Begins(policy, 0, 0), e.StepWanted(), e.UpdateBegins()):
        one.handle(event, 0.0)
    (said,) = one.handle(e.Asked("SIGTERM"), 1.0)
    assert said.text == "SIGTERM: the run ends with step 1, its last, as it would without a stop"


def test_an_engine_that_dies_in_an_update_that_stops_is_not_started_again():
    stopped = machine(*STEP, e.StepWanted(), e.UpdateBegins(), e.Asked("SIGTERM"))
    assert stopped.handle(e.EnginesDied(1, "rollout rank 0", "gone"), 99.0) == [
        e.Say("SIGTERM: no engine is started again; the run saves step 2 and stops"),
        e.GiveUp(),
    ]


def test_restarts_name_the_engine_and_the_limit():
    one = machine(e.StepWanted())
    died = e.EnginesDied(1, "rollout rank 0", "rollout rank 0 was killed", fails_on_samples=True)
    warn, restart = one.handle(died, 1.0)
    assert warn.text == (
        "rollout rank 0 was killed. Starting again: rollout rank 0 (1 of "
        "actor_rollout_ref.rollout.max_restarts=1 in this step)"
    )
    assert restart == e.Restart()
    one.handle(e.EnginesRestarted(), 2.0)
    (fail,) = one.handle(died, 3.0)
    assert not fail.may_pass, "the same samples have failed in two processes"
    assert fail.reason == (
        "1 rollout engines were started again in step 1, and at most 1 are started again "
        "(actor_rollout_ref.rollout.max_restarts)"
    )


@pytest.mark.parametrize(
    ("at", "name", "exit_code"),
    [(1.0, "SIGINT", 130), (1.0, "SIGHUP", 75)],
)
def test_the_first_cause_decides_the_exit_code(at, name, exit_code):
    one = machine(e.StepWanted())
    assert one.handle(e.Asked(name), at) == [e.Interrupt()]
    assert one.handle(e.Ended(None), at) == [e.Decided()]
    assert one.handle(e.Ended(1), at) == []
    assert one.exit_code == exit_code
    assert one.handle(e.Watched(), at + limits.END_S) == []
    (end,) = one.handle(e.Watched(), at + limits.END_S + 0.1)
    why = "cleaning up took longer than 8 s, so the process was ended"
    assert end == e.EndProcess(exit_code, why, was_decided=True)


def test_a_run_stops_while_there_is_time_to_save():
    keeps = limits.LEAVE_S + limits.SPARE_S
    policy = replace(POLICY, deadline=1000.0, max_runtime="1h")
    for save_s, needed in ((0.0, 1.5 * limits.UNKNOWN_SAVE_S), (200.0, 300.0)):
        for late in (-0.1, 0.1):
            one = machine(*STEP, e.StepWanted(), policy=policy, step_s=100.0, save_s=save_s)
            commands = one.handle(e.Polled(), 1000.0 - keeps - needed + late)
            assert (e.GiveUp() in commands) == (late > 0)
            assert (e.WallTimeOver("trainer.max_runtime=1h") in commands) == (late > 0)
            one = machine(*STEP, policy=policy, step_s=100.0, save_s=save_s)
            commands = one.handle(e.StepWanted(), 1000.0 - keeps - needed - 150.0 + late)
            assert (commands[-1] == e.EndLoop()) == (late > 0)


@pytest.mark.parametrize(("late", "following"), [(0.0, e.BeginStep(3)), (0.1, e.EndLoop())])
def test_longest_durations_count(late, following):
    one = machine(policy=replace(POLICY, deadline=1000.0))
    for step_s, save_s in ((100.0, 20.0), (40.0, 0.0)):
        one.handle(e.StepWanted(), 1.0)
        one.handle(e.StepFinished(), 1.0)
        one.handle(e.StepEnds(step_s, save_s), 1.0)
    needed = 1.5 * (100.0 + 20.0) + limits.LEAVE_S + limits.SPARE_S
    assert one.handle(e.StepWanted(), 1000.0 - needed + late)[-1] == following


def test_frequencies():
    assert [step for step in range(1, 8) if is_due(3, step, 7)] == [3, 6, 7]
    assert not any(is_due(frequency, step, 7) for frequency in (0, -1) for step in range(1, 8))


def test_every_time_is_in_the_table_of_limits():
    """A number with a meaning in seconds has a name there. Lengths of records are none."""
    folder = Path(verlite.control.__path__[0])
    for path in folder.glob("*.py"):
        if path.name in ("limits.py", "exit_codes.py", "policy.py"):
            continue
        nodes = list(ast.walk(ast.parse(path.read_text())))
        compared = [node for node in nodes if isinstance(node, ast.Compare)]
        lengths = [one for node in compared if ast.unparse(node.left).startswith("len(")
                   for one in node.comparators]  # fmt: skip
        numbers = {
            repr(node.value)
            for node in nodes
            if isinstance(node, ast.Constant)
            and type(node.value) in (int, float)
            and node not in lengths
        }
        assert numbers <= {"0", "1", "2", "0.0"}, f"{path.name}: {numbers}"
