"""Inject one fault at one moment and watch what becomes of the run."""

import re
import time
from dataclasses import dataclass
from random import Random

from tests.chaos.driver import STARTING_RAY
from tests.chaos.faults import EXPORTING, FAULTS, GOES_ON, LOST, NoTarget
from tests.chaos.run import Run

POLL_S = 0.05
LIMIT_S = 150.0
"""How long the run may neither end nor go on after a fault."""
STEPS_AFTER = 2
"""A run goes on if it finishes as many further steps."""
NOTICE = re.compile(
    r"(?m)^(?:[-\d]+ [:\d]+ )?"
    r"(error|warning(?!: in the last)|stopped by|interrupted|SIG\w+:|it did not end)"
)
"""Lines about a fault, with or without a clock time. Warnings of the detectors ("in the last 5
steps") are none."""


@dataclass
class Outcome:
    """What a fault did, in seconds since it was injected."""

    fault: str
    phase: str
    step: int
    """Steps that were finished."""
    notice_s: float | None = None
    """Until the run printed something about it. None: it printed nothing."""
    end_s: float | None = None
    """Until the attempt ended. None: it went on."""
    code: int | None = None
    """Its exit code."""
    cause: str = ""
    """The line that the run printed."""
    resumed_at: int | None = None
    """The step that the next attempt resumed from."""
    problem: str = ""
    """What should not have happened. "": nothing."""


def wait_for_phase(run: Run, wanted: str, seconds: float) -> bool:
    """Wait until the attempt enters a phase. False: it ended, or did not enter it in time."""
    known = len(run.phases())
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if any(phase == wanted for _, _, phase in run.phases()[known:]):
            return True
        if run.code() is not None:
            return False
        time.sleep(POLL_S / 5)
    return False


def disturb(run: Run, name: str, phase: str, random: Random) -> Outcome | None:
    """Inject a fault now, and wait until the attempt has ended or gone on.

    Returns:
        What happened. None if the fault's target does not exist, or the run ended before.
    """
    fault = FAULTS[name]
    outcome = Outcome(name, phase, run.finished_steps())
    printed = len(run.text())
    time.sleep(random.uniform(0, 0.3))
    began = time.monotonic()
    if run.code() is not None:
        return None
    undo = None
    try:
        undo = fault.inject(run, random)
        watch(run, outcome, printed, began, fault.lasts_s)
    except NoTarget:
        return None
    except AssertionError as error:
        outcome.problem = str(error)
    finally:
        if undo is not None:
            undo()
    if not outcome.problem and outcome.code is None:
        enough = run.finished_steps() + STEPS_AFTER
        watch(run, outcome, printed, began, LIMIT_S, enough if GOES_ON in fault.ends else None)
        if outcome.code is None and run.finished_steps() < outcome.step + STEPS_AFTER:
            outcome.problem = f"it neither ended nor went on for {LIMIT_S:g} s"
    code = GOES_ON if outcome.code == 0 else outcome.code
    # A run may have finished before a stopped process is taken for lost.
    is_done = outcome.code == 0 and (phase in EXPORTING or name.endswith("frozen"))
    if phase == STARTING_RAY and LOST[0] in fault.ends:
        is_done = is_done or code is GOES_ON  # Ray's start is tried again
    if not outcome.problem and code not in fault.ends and not is_done:
        outcome.problem = f"exit code {code}, expected {fault.ends}"
        if code is GOES_ON:
            outcome.problem = f"it went on, expected an end with code {fault.ends}"
    return outcome


def watch(
    run: Run,
    outcome: Outcome,
    printed: int,
    began: float,
    seconds: float,
    until_step: int | None = None,
) -> None:
    """Note what the attempt prints and when it ends, for some seconds or until a step.

    Args:
        printed: length of its output before the fault.
        began: time.monotonic() of the fault.
    """
    deadline = time.monotonic() + seconds
    while outcome.code is None:
        outcome.code = run.code()
        elapsed = time.monotonic() - began
        if outcome.notice_s is None:
            found = NOTICE.search(run.text(), printed)
            if found:
                outcome.notice_s = elapsed
                outcome.cause = run.text()[found.start() :].splitlines()[0]
        if outcome.code is not None:
            outcome.end_s = elapsed
            return
        is_enough = until_step is not None and run.finished_steps() >= until_step
        if is_enough or time.monotonic() > deadline:
            return
        time.sleep(POLL_S)


def note_resumed(run: Run, outcome: Outcome | None) -> None:
    """Note at which step the attempt resumes that has just been started after a fault."""
    if outcome is None:
        return
    deadline = time.monotonic() + LIMIT_S
    while run.code() is None and time.monotonic() < deadline and outcome.resumed_at is None:
        outcome.resumed_at = run.resumed_step()
        time.sleep(POLL_S)
    lost = outcome.step - (outcome.resumed_at or 0)
    if outcome.resumed_at is not None and lost > FAULTS[outcome.fault].lost_steps:
        outcome.problem = outcome.problem or f"{lost} finished steps are lost"
