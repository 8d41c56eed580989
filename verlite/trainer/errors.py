"""Exceptions that end a run, and the exit code of each.

torch is not imported here, so that a refused run ends without waiting for it. `trainer.stop`
reports them.
"""

from verlite.control import exit_codes
from verlite.controller.failures import NodeLost, RayLost, StuckError, WorkerError
from verlite.controller.head import NoCluster
from verlite.controller.placement import ResourcesMissing
from verlite.data.dataset import DataError
from verlite.engine import NonFiniteError
from verlite.rewards.process import FunctionError
from verlite.rewards.routing import UnknownDataSource
from verlite.trainer.checkpoints import CheckpointError, ResumeRefused


class RunRefused(Exception):
    """The run cannot start. The message names the key or file, value, rule and remedy."""


class ServiceMissing(RunRefused):
    """A service that the run needs does not answer: generation servers, the reference service, the
    reward service, or the tools of its environment."""


class HubMissing(RunRefused):
    """A model is a name on the hub, which cannot be reached from here."""


class AlreadyComplete(Exception):
    """There is nothing left to train: the checkpoint to resume from is from the last step."""


class StepAborted(Exception):
    """A stop was requested, so the worker call in progress was given up. See `Run.poll`."""


class RewardFailures(Exception):
    """More rewards failed than `reward.max_error_rate` allows."""


class RolloutFailures(Exception):
    """More samples failed than `actor_rollout_ref.rollout.max_error_rate` allows."""


class TooFewGroups(Exception):
    """`algorithm.filter_groups` found too few prompts whose samples differ in score."""


class LogProbGap(Exception):
    """Trainer and rollout engine disagree on log-probs of the same tokens before any update."""


class FewEffectiveSamples(Exception):
    """The effective sample size of a step is below `async_training.min_eff_sample_size`."""


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
    FewEffectiveSamples,
    TooFewGroups,
    WorkerError,
    StuckError,
    NodeLost,
    RayLost,
    NonFiniteError,
)
"""Failures during training whose message is complete without a traceback."""


def exit_code(error: BaseException) -> int:
    """Return the exit code of a run that this error ends."""
    if isinstance(error, REFUSED):
        return exit_codes.REFUSED
    if isinstance(error, (NodeLost, RayLost, StuckError)):
        return exit_codes.LOST
    if isinstance(error, WorkerError) and error.may_pass:
        return exit_codes.LOST
    return exit_codes.FAILED
