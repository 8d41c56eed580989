"""Exceptions of the trainer, and the report of a failed run.

A failed run ends with one message, the first cause, and an exit code. torch is not imported here,
so that a refused run ends without waiting for it.
"""

from pathlib import Path

from rich.console import Console
from rich.text import Text

from verlite.controller.failures import NodeLost, StuckError, WorkerError
from verlite.controller.head import NoCluster
from verlite.controller.placement import ResourcesMissing
from verlite.data.dataset import DataError
from verlite.files import FULL
from verlite.rewards.process import FunctionError
from verlite.rewards.routing import UnknownDataSource
from verlite.trainer.checkpoints import CheckpointError, ResumeRefused


class RunRefused(Exception):
    """The run cannot start. The message names the key or file, value, rule and remedy."""


class AlreadyComplete(Exception):
    """There is nothing left to train: the checkpoint to resume from is from the last step."""


class StepAborted(Exception):
    """A stop was requested, so the worker call in progress was given up. See `Run.obey_stop`."""


class RewardFailures(Exception):
    """More rewards failed than `reward.max_error_rate` allows."""


class RolloutFailures(Exception):
    """More samples failed than `actor_rollout_ref.rollout.max_error_rate` allows."""


class TooFewGroups(Exception):
    """`algorithm.filter_groups` found too few prompts whose samples differ in score."""


class LogProbGap(Exception):
    """Trainer and rollout engine disagree on log-probs of the same tokens before any update."""


REFUSED = (
    RunRefused,
    DataError,
    FunctionError,
    UnknownDataSource,
    ResourcesMissing,
    NoCluster,
    ResumeRefused,
)
"""Caused by the user's files or settings before any training. The exit code is 2."""

FAILED = (
    CheckpointError,
    RewardFailures,
    RolloutFailures,
    LogProbGap,
    TooFewGroups,
    WorkerError,
    StuckError,
    NodeLost,
)
"""Failures during training whose message is complete without a traceback. The exit code is 1."""


def failure_before(interrupt: BaseException) -> Exception | None:
    """Return the failure that was ending the run when a signal interrupted its cleanup, or None."""
    error = interrupt.__context__
    while error is not None:
        if isinstance(error, REFUSED + FAILED):
            return error
        error = error.__context__
    return None


def report_error(error: Exception, console: Console) -> int:
    """Print the error that ended the run and return the exit code.

    Any type not in REFUSED or FAILED is a bug in verlite; its traceback is printed.
    """
    if isinstance(error, REFUSED + FAILED):
        message = Text.assemble(("error: ", "bold red"), str(error))
        console.print(message, soft_wrap=True)
        return 2 if isinstance(error, REFUSED) else 1
    if isinstance(error, OSError) and error.errno in FULL:
        console.print(Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=True)
        return 1
    environment = Path(__file__).parents[2] / ".venv"
    console.print_exception(show_locals=False, suppress=[str(environment)])
    return 1
