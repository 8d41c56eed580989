"""Whether `verlite supervise` starts a command again: cases by hand. Any sequence of attempts:
`tests.control.rules.RestartRules`, in test_simulation.py."""

from dataclasses import replace

import pytest

from verlite.control import exit_codes, limits
from verlite.control.restarts import Again, Attempt, Frozen, Leave, Restarts

LOST = Attempt(exit_codes.LOST, "run", "lost", 5, 4)
MISSING = Attempt(2, "run", "away", 5, 4, error_type="ResourcesMissing")
KILLED = Attempt(137, "run", "", 5, 4, signal="SIGKILL")


@pytest.mark.parametrize(
    "attempt, again",
    [
        (Attempt(0), False),
        (Attempt(2), False),
        (MISSING, False),
        (Attempt(130), False),
        (Attempt(1, "run", "a bug"), False),
        (Attempt(1, "run"), True),  # native code ended the process
        (Attempt(1), False),
        (Attempt(75), True),
        (LOST, True),
        (KILLED, True),
        (Attempt(139, signal="SIGSEGV"), True),
        (Attempt(143, signal="SIGTERM"), True),
        (Attempt(143), False),  # a script's own code
        (Attempt(141, signal="SIGPIPE"), False),
        (Attempt(75, no_restart="trainer.max_runtime=1h is over"), False),
    ],
)
def test_which_endings_lead_to_a_restart(attempt, again):
    following = Restarts(9, 3).ended(attempt)
    if again:
        assert isinstance(following, Again)
    else:
        why = attempt.no_restart and "no restart: trainer.max_runtime=1h is over"
        assert following == Leave(attempt.code, why)


@pytest.mark.parametrize(
    "attempts, code",
    [
        ([LOST, MISSING, MISSING, Attempt(0)], 0),
        ([LOST, MISSING, Attempt(75, "run", "", 5, 4), MISSING, Attempt(0)], 0),
        ([LOST, KILLED, MISSING, Attempt(0)], 0),
        ([LOST, replace(KILLED, step=7, saved=6), replace(MISSING, step=7, saved=6)], 2),
        ([LOST, Attempt(1, "run", "a bug", 5, 4)], 1),
        ([LOST, Attempt(2, "run", "no key", 5, 4, error_type="RunRefused")], 2),
        ([LOST, Attempt(130)], 130),
    ],
)
def test_a_lost_node_is_awaited_until_the_run_makes_progress(attempts, code):
    restarts = Restarts(9, 5)
    *before, last = [restarts.ended(attempt) for attempt in attempts]
    assert all(isinstance(one, Again) for one in before) and last == Leave(code)


def ends(restarts, *attempts):
    """Return what is said at the end of the last attempt, after "No restart: "."""
    *before, last = [restarts.ended(attempt) for attempt in attempts]
    assert all(isinstance(one, Again) for one in before)
    assert isinstance(last, Leave) and last.code == exit_codes.FAILED
    return last.why


def test_failures_at_one_step_are_a_crash_loop():
    assert ends(Restarts(10, 3), LOST, LOST, LOST) == (
        "the command ended with exit code 76 (lost). No restart: 3 attempts in a row failed after "
        "step 5"
    )


def test_a_new_checkpoint_renews_the_budget_and_another_step_alone_does_not():
    steps = [(5, 4), (7, 4), (5, 4), (8, 8), (9, 8), (10, 8), (9, 8)]
    why = ends(Restarts(3, 3), *(replace(KILLED, step=step, saved=saved) for step, saved in steps))
    assert why == (
        "the command was ended by SIGKILL. No restart: 3 restarts brought no new checkpoint; the "
        "last ended after step 9"
    )


def test_without_checkpoints_a_later_step_renews_the_budget():
    steps = [replace(LOST, step=step, saved=None) for step in (1, 2, 3, 2)]
    assert ends(Restarts(1, 3), *steps)


def test_a_missing_cluster_is_a_failure_but_no_crash_at_a_step():
    restarts = Restarts(4, 2)
    *_, last = [restarts.ended(one) for one in (LOST, MISSING, MISSING, MISSING)]
    assert last == Again(
        40.0,
        "the command ended with exit code 2 (away); restart 4 of 4 without a new checkpoint, in "
        "40 s",
    )
    assert ends(restarts, MISSING).endswith(
        "4 restarts brought no new checkpoint; the last ended after step 5"
    )


def test_pauses_grow_with_failures_and_stops_cost_none():
    restarts = Restarts(99, 0)
    found = [restarts.ended(one).after_s for one in (Attempt(75), *[Attempt(76)] * 8)]
    assert found == [limits.AFTER_STOP_S, 5, 10, 20, 40, 80, 160, 300, 300]


def test_what_is_said_of_progress():
    restarts = Restarts(9, 0)
    said = [restarts.ended(one).why.split(", in")[0] for one in (LOST, LOST, Attempt(75, step=9))]
    assert [text.split("; ")[1] for text in said] == [
        "restart 1 of 9 since checkpoint 4",
        "restart 2 of 9 without a new checkpoint",
        "restart 1 of 9",
    ]


@pytest.mark.parametrize(
    "attempt, asked, code",
    [
        (LOST, "SIGTERM", 75),
        (Attempt(75), "SIGUSR1", 75),
        (Attempt(75, no_restart="the time is over"), "SIGTERM", 75),
        (Attempt(1, "run", "a bug"), "SIGTERM", 1),
        (KILLED, "SIGHUP", 75),
        (Attempt(141, signal="SIGPIPE"), "SIGTERM", 141),
        (Attempt(0), "SIGINT", 0),
        (Attempt(1, "run"), "SIGINT", 1),
        (Attempt(75), "SIGINT", 130),
        (KILLED, "SIGINT", 130),
    ],
)
def test_a_signal_to_the_supervisor_ends_the_restarts(attempt, asked, code):
    assert Restarts(9, 3).ended(attempt, asked) == Leave(code)
    restarts = Restarts(9, 3)
    restarts.ended(attempt)
    assert restarts.code_when_asked(attempt, asked) == code, "in the pause"


def test_a_command_that_stays_frozen_is_named_once_and_killed():
    frozen = Frozen()
    said = [frozen.look(looks != 80) for looks in range(480)]
    times = [number * limits.LOOK_S for number, one in enumerate(said) if one == "say"]
    assert times == pytest.approx([15.0, 16.2 + 15.0], abs=0.3)
    killed = said.index("kill")
    assert (killed - 80) * limits.LOOK_S == pytest.approx(60.0, abs=0.3)
    assert set(said[killed:]) == {"kill"}
