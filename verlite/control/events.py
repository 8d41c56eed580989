"""The events that the machine handles, and the commands that it returns."""

from dataclasses import dataclass

from verlite.control.policy import Policy

# Events of the loop, in the order of a run.


@dataclass(frozen=True)
class Begins:
    """The run is built. `step`: of the checkpoint that it resumes from, 0 without one."""

    policy: Policy
    step: int = 0
    saved: int = 0
    """The newest checkpoint in the run directory; 0 if there is none there."""
    step_s: float = 0.0
    """The longest of the last steps of earlier runs in the directory; 0 if there was none."""
    save_s: float = 0.0


@dataclass(frozen=True)
class Started:
    """The engines have their first weights. -> Validate or nothing"""


@dataclass(frozen=True)
class StepWanted:
    """Nothing of the last step is left to do. -> BeginStep or EndLoop"""


@dataclass(frozen=True)
class StoppedElsewhere:
    """The step that was to begin does not, because another rank was asked to stop."""


@dataclass(frozen=True)
class UpdateBegins:
    """An update comes next, which cannot be undone. -> nothing or GiveUp"""


@dataclass(frozen=True)
class StepFinished:
    """All updates of the step are done."""


@dataclass(frozen=True)
class StepMeasured:
    """The metrics of a finished step are computed. -> Validate, Save or nothing"""


@dataclass(frozen=True)
class Validated:
    """The validation has ended or was given up. -> Save or nothing"""


@dataclass(frozen=True)
class Saved:
    """A checkpoint of the step is complete. -> nothing; after the loop Exit"""


@dataclass(frozen=True)
class SaveFailed:
    """-> nothing or Fail"""

    error: str


@dataclass(frozen=True)
class StepEnds:
    """The step is logged. What it took, in seconds; `save_s` is 0 without a save."""

    step_s: float
    save_s: float = 0.0


@dataclass(frozen=True)
class LoopEnds:
    """-> Save, Export or Exit"""


@dataclass(frozen=True)
class Exported:
    """-> Exit"""


# Events of a generation or a weight sync.


@dataclass(frozen=True)
class EnginesDied:
    """Rollout engines died; all other calls are answered. -> Restart, GiveUp or Fail"""

    count: int
    names: str
    cause: str
    """One line, without a period."""
    fails_on_samples: bool = False
    """Whether the engine itself failed: if it fails again, the samples are the reason."""


@dataclass(frozen=True)
class EnginesRestarted:
    """The new engines run, without weights."""


@dataclass(frozen=True)
class RestartFailed:
    """-> Fail"""

    error: str


@dataclass(frozen=True)
class WeightsGiven:
    """All engines have the weights again, and the interrupted call is repeated."""


@dataclass(frozen=True)
class Outage:
    """A service failed more samples than its max_error_rate allows."""

    lost: str
    """What the samples lost, in words: "tools" or "rewards"."""
    service: str
    """What has to recover, in words."""
    failed: int
    samples: int
    example: str
    limit_s: float
    """How long to wait."""


@dataclass(frozen=True)
class Answered:
    """A generation was answered. -> nothing (use the answers) or CheckHealth"""

    outage: Outage | None = None


@dataclass(frozen=True)
class Health:
    """-> CheckHealth, Resample or nothing (use the answers)"""

    is_broken: bool


# Events of the process.


@dataclass(frozen=True)
class Polled:
    """The main thread waits for workers, and may give that up. -> nothing or GiveUp"""


@dataclass(frozen=True)
class Asked:
    """The main thread learns of a request to stop: the name of a signal, or what else asks."""

    name: str


@dataclass(frozen=True)
class Signal:
    """A signal has reached the process, whatever the main thread does."""

    name: str


@dataclass(frozen=True)
class Watched:
    """Time has passed since a stop was requested, or the exit code decided."""


@dataclass(frozen=True)
class Ended:
    """The run has ended. `code`: its exit code; None: that of the stop which ended it."""

    code: int | None = None


Event = (
    Begins | Started | StepWanted | StoppedElsewhere | UpdateBegins | StepFinished | StepMeasured
    | Validated | Saved | SaveFailed | StepEnds | LoopEnds | Exported | EnginesDied
    | EnginesRestarted | RestartFailed | WeightsGiven | Answered | Health | Polled | Asked | Signal
    | Watched | Ended
)  # fmt: skip


# Commands: what happens next.


@dataclass(frozen=True)
class BeginStep:
    step: int


@dataclass(frozen=True)
class EndLoop:
    """No step follows."""


@dataclass(frozen=True)
class Validate:
    pass


@dataclass(frozen=True)
class Save:
    pass


@dataclass(frozen=True)
class Export:
    pass


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
class GiveUp:
    """End the rollout engines, which frees their device memory, and the call in progress."""


@dataclass(frozen=True)
class EndEngines:
    """End the rollout engines: nothing is generated any more."""


@dataclass(frozen=True)
class Restart:
    """Start the dead engines again."""


@dataclass(frozen=True)
class CheckHealth:
    """Ask the service after so many seconds."""

    after_s: float = 0.0


@dataclass(frozen=True)
class Resample:
    """Generate the same samples again."""


# Commands to the process.


@dataclass(frozen=True)
class Say:
    text: str


@dataclass(frozen=True)
class Warn:
    text: str


@dataclass(frozen=True)
class Interrupt:
    """Leave whatever the main thread does: nothing has to be saved."""


@dataclass(frozen=True)
class WallTimeOver:
    """Tell `verlite supervise` not to start the command again."""

    key: str


@dataclass(frozen=True)
class NotSaved:
    """Say that the save takes longer than trainer.stop_grace_s. `another`: whether a further signal
    limits it."""

    another: bool


@dataclass(frozen=True)
class SaveLimited:
    """Say that a second signal has limited the time of the save."""


@dataclass(frozen=True)
class Decided:
    """This event has decided the exit code."""


@dataclass(frozen=True)
class EndProcess:
    """End the process at once."""

    code: int
    why: str
    was_decided: bool
    """Whether the exit code had been decided, and said, before."""


Command = (
    BeginStep | EndLoop | Validate | Save | Export | Exit | Fail | GiveUp | EndEngines | Restart
    | CheckHealth | Resample | Say | Warn | Interrupt | WallTimeOver | NotSaved | SaveLimited
    | Decided | EndProcess
)  # fmt: skip
