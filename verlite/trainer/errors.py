"""How a failed run ends: one message with the first cause, and an exit code."""

from pathlib import Path

from rich.console import Console
from rich.text import Text

from verlite.controller.cluster import NoCluster
from verlite.controller.placement import ResourcesMissing
from verlite.controller.supervise import StuckError, WorkerError
from verlite.data.dataset import DataError
from verlite.rewards.child import FunctionError
from verlite.rewards.routing import UnknownDataSource
from verlite.trainer.begin import RunRefused
from verlite.trainer.checkpoints import CheckpointError, ResumeRefused
from verlite.trainer.stages import LogProbGap, RewardFailures, RolloutFailures, TooFewGroups

REFUSED = (
    RunRefused,
    DataError,
    FunctionError,
    UnknownDataSource,
    ResourcesMissing,
    NoCluster,
    ResumeRefused,
)
"""What the user's files or settings cause before anything is trained: the message says all, the exit code is 2."""
EXPLAINED = (
    CheckpointError,
    RewardFailures,
    RolloutFailures,
    LogProbGap,
    TooFewGroups,
    WorkerError,
    StuckError,
)
"""What a run can die of with a message that says all: the exit code is 1."""


def explain(error: Exception, console: Console) -> int:
    """Print what ended the run, and return the exit code. An error of another kind is a defect: its traceback is printed."""
    if isinstance(error, REFUSED + EXPLAINED):
        console.print(Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=True)
        return 2 if isinstance(error, REFUSED) else 1
    console.print_exception(show_locals=False, suppress=[str(Path(__file__).parents[2] / ".venv")])
    return 1
