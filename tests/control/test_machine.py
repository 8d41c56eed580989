"""What the control says to the user, and decisions that need no simulation."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest

import verlite.control
from verlite.control import limits
from verlite.control.commands import BeginStep, Do, EndProcess, Say, WallTimeOver
from verlite.control.machine import Machine
from verlite.control.policy import Policy, is_due

POLICY = Policy(total_steps=5, max_restarts=1, failed_saves_key="trainer.max_failed_saves=")


def machine(*events, policy=POLICY, **begins) -> Machine:
    """Return a machine after these events, one second apart."""
    found = Machine()
    found.begins(0.0, policy, **begins)
    for now, event in enumerate(events, start=1):
        name, *values = (event,) if isinstance(event, str) else event
        getattr(found, name)(float(now), *values)
    return found


STEP = ("step_wanted", "update_begins", "step_finished", "step_measured", ("step_ends", 1.0))


@pytest.mark.parametrize(
    ("events", "text"),
    [
        ((*STEP, "step_wanted"), "step 1 is not saved yet; the run stops once it is"),
        ((*STEP, "step_wanted", "update_begins"), "the run finishes step 2, saves it, and stops"),
    ],
)
def test_a_stop_says_what_will_happen(events, text):
    said = machine(*events).asked(99.0, "SIGTERM")
    assert said == [Say(f"SIGTERM: {text}")]


@pytest.mark.parametrize("save_freq", [-1, 1])
def test_a_stop_in_the_last_step_of_supervised_fine_tuning_promises_no_save(save_freq):
    policy = Policy(gives_up=False, total_steps=1, save_freq=save_freq)
    (said,) = machine("step_wanted", "update_begins", policy=policy).asked(9.0, "SIGTERM")
    assert said.text == "SIGTERM: the run ends with step 1, its last, as it would without a stop"


def test_an_engine_that_dies_in_an_update_that_stops_is_not_started_again():
    stopped = machine(*STEP, "step_wanted", "update_begins", ("asked", "SIGTERM"))
    assert stopped.engines_died(99.0, 1, "rollout rank 0", "gone") == [
        Say("SIGTERM: no engine is started again; the run saves step 2 and stops"),
        Do.GIVE_UP,
    ]


def test_restarts_name_the_engine_and_the_limit():
    one = machine("step_wanted")
    died = (1, "rollout rank 0", "rollout rank 0 was killed", True)
    warn, restart = one.engines_died(1.0, *died)
    assert warn.text == (
        "rollout rank 0 was killed. Starting again: rollout rank 0 (1 of "
        "actor_rollout_ref.rollout.max_restarts=1 in this step)"
    )
    assert restart == Do.RESTART
    one.engines_restarted(2.0)
    (fail,) = one.engines_died(3.0, *died)
    assert not fail.may_pass, "the same samples have failed in two processes"
    assert fail.reason == (
        "1 rollout engines were started again in step 1, and at most 1 are started again "
        "(actor_rollout_ref.rollout.max_restarts)"
    )


SAVES = (*STEP, "step_wanted")  # step 1 is not saved
NOT_SAVED = (
    "SIGTERM: not saved within trainer.stop_grace_s=30, {where}. The run still saves and then ends"
)
AT_ONCE = "ended the process at once"


@pytest.mark.parametrize(
    ("before", "signals", "late", "says"),
    [
        (SAVES, ["SIGTERM"], 30.1, NOT_SAVED + "; another signal gives it 30 s more. {checkpoint}"),
        (SAVES, ["SIGTERM", "SIGINT"], 0.0, "a second signal: the save has 30 s"),
        (SAVES, ["SIGTERM"] * 2, 30.1, "not saved within 30 s of the second signal"),
        (SAVES, ["SIGTERM"] * 3, 0.0, f"a third signal, SIGTERM, {AT_ONCE}"),
        ((), ["SIGTERM"] * 2, 0.0, f"a second signal, SIGTERM, {AT_ONCE}"),
        (
            (),
            ["SIGTERM"],
            limits.END_S + 0.1,
            "it did not end within 8 s, so it was ended without cleaning up",
        ),
    ],
)
def test_what_is_said_of_a_stop_that_takes_long(before, signals, late, says):
    one, now, commands = machine(*before), 100.0, []
    for signal in signals:
        now += 5.0
        commands = one.signal(now, signal)
    if late:
        commands = one.watched(now + late)
    (command,) = commands
    assert says == (command.why if isinstance(command, EndProcess) else command.text)


@pytest.mark.parametrize(("at", "name", "exit_code"), [(1.0, "SIGINT", 130), (1.0, "SIGHUP", 75)])
def test_the_first_cause_decides_the_exit_code(at, name, exit_code):
    one = machine("step_wanted")
    assert one.asked(at, name) == [Do.INTERRUPT]
    assert one.ended(at, None) == [Do.DECIDED]
    assert one.ended(at, 1) == []
    assert one.exit_code == exit_code
    assert one.watched(at + limits.END_S) == []
    (end,) = one.watched(at + limits.END_S + 0.1)
    why = "cleaning up took longer than 8 s, so the process was ended"
    assert end == EndProcess(exit_code, why, was_decided=True)


def test_a_signal_that_comes_late_does_not_end_the_save_before_the_wall_time_is_over():
    """Ctrl-C reaches the process while the main thread is in C code. Before that learns of it, the
    time to save has come."""
    one = machine(*STEP, "step_wanted", policy=replace(POLICY, deadline=1000.0))
    one.update_begins(99.0)
    assert one.signal(940.0, "SIGINT") == []
    assert Do.GIVE_UP not in one.polled(941.0)
    assert one.asked(942.0, "SIGINT") == []
    assert one.watched(942.0 + limits.END_S) == []


def test_a_run_stops_while_there_is_time_to_save():
    keeps = limits.LEAVE_S + limits.SPARE_S
    policy = replace(POLICY, deadline=1000.0, max_runtime="1h")
    for save_s, needed in ((0.0, 1.5 * limits.UNKNOWN_SAVE_S), (200.0, 300.0)):
        for late in (-0.1, 0.1):
            one = machine(*STEP, "step_wanted", policy=policy, longest=(100.0, save_s))
            commands = one.polled(1000.0 - keeps - needed + late)
            assert (Do.GIVE_UP in commands) == (late > 0)
            assert (WallTimeOver("trainer.max_runtime=1h") in commands) == (late > 0)
            one = machine(*STEP, policy=policy, longest=(100.0, save_s))
            commands = one.step_wanted(1000.0 - keeps - needed - 150.0 + late)
            assert (commands[-1] == Do.END_LOOP) == (late > 0)


@pytest.mark.parametrize(("late", "following"), [(0.0, BeginStep(3)), (0.1, Do.END_LOOP)])
def test_longest_durations_count(late, following):
    one = machine(policy=replace(POLICY, deadline=1000.0))
    for step_s, save_s in ((100.0, 20.0), (40.0, 0.0)):
        one.step_wanted(1.0)
        one.step_finished(1.0)
        one.step_ends(1.0, step_s, save_s)
    needed = 1.5 * (100.0 + 20.0) + limits.LEAVE_S + limits.SPARE_S
    assert one.step_wanted(1000.0 - needed + late)[-1] == following


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
