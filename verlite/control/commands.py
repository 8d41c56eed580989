"""The commands that the machine returns: what happens next."""

from dataclasses import dataclass
from enum import Enum


class Do(Enum):
    """Commands without a value."""

    # To the loop.
    END_LOOP = "no step follows"
    VALIDATE = "validate"
    SAVE = "save"
    EXPORT = "export the model"
    GIVE_UP = "end the rollout engines, which frees their device memory, and the call in progress"
    END_ENGINES = "end the rollout engines: nothing is generated any more"
    RESTART = "start the dead engines again"
    RESAMPLE = "generate the same samples again"
    # To the process.
    INTERRUPT = "leave whatever the main thread does: nothing has to be saved"
    DECIDED = "this event has decided the exit code"


@dataclass(frozen=True)
class BeginStep:
    step: int


@dataclass(frozen=True)
class Exit:
    code: int


@dataclass(frozen=True)
class Fail:
    """The error of the event ends the run. `reason`: what its message adds."""

    reason: str = ""
    may_pass: bool = True
    """Whether the same command may succeed."""


@dataclass(frozen=True)
class CheckHealth:
    """Ask the service after so many seconds."""

    after_s: float = 0.0


@dataclass(frozen=True)
class Say:
    """Print a line."""

    text: str


@dataclass(frozen=True)
class Warn:
    """Print a warning."""

    text: str


@dataclass(frozen=True)
class SayNow:
    """Print and log a line about a stop that takes long, whatever the main thread does. In the
    text, {where} is what it does, and {checkpoint} what is to be said about the last checkpoint."""

    text: str


@dataclass(frozen=True)
class WallTimeOver:
    """Tell `verlite supervise` not to start the command again."""

    key: str


@dataclass(frozen=True)
class EndProcess:
    """End the process at once."""

    code: int
    why: str
    was_decided: bool
    """Whether the exit code had been decided, and said, before."""


Command = (
    Do | BeginStep | Exit | Fail | CheckHealth | Say | Warn | SayNow | WallTimeOver | EndProcess
)
