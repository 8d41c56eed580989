"""The state of a run on the driver, which all stages of the loop share."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

from verlite.algorithms.kl import AdaptiveKLController, FixedKLController
from verlite.config.critical import code_contents, critical_settings
from verlite.config.plan import Plan
from verlite.config.schema import Config
from verlite.controller.failures import WorkerError
from verlite.controller.stop import Stop
from verlite.controller.worker_group import group
from verlite.data.dataset import PromptDataset
from verlite.data.sampler import PromptSampler
from verlite.engine.reference_wire import ModelInfo
from verlite.envs.factory import EnvFactory
from verlite.files import RetryingWriter
from verlite.protocol.data import DataProto
from verlite.protocol.fields import check_stage
from verlite.spec.roles import AdvantageSpec
from verlite.trainer.checkpoints import FailedSaves
from verlite.trainer.detectors import Detectors
from verlite.trainer.display import Display
from verlite.trainer.errors import StepAborted
from verlite.trainer.metrics import Metrics, Stopwatch
from verlite.trainer.time_limit import TimeLimit, stop_for_time
from verlite.trainer.tracking import Tracking
from verlite.workers.actor import ActorWorker
from verlite.workers.critic import CriticWorker
from verlite.workers.inference import InferenceWorker
from verlite.workers.log_probs import LogProbWorker
from verlite.workers.reference import ReferenceWorker
from verlite.workers.roles import ROLES
from verlite.workers.rollout import RolloutWorker

_Stage = TypeVar("_Stage", bound=Callable[..., Any])


@dataclass
class StepState:
    """What one training step accumulates. Every step starts with a new one."""

    number: int = 0
    """Training step, from 1. 0 before the first."""
    metrics: Metrics = field(default_factory=dict)
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    prompts_drawn: int = 0
    """Prompts sampled so far in this step. More than a batch if dynamic sampling drops groups."""
    sampler_state: dict[str, int] = field(default_factory=dict)
    """The sampler's position when the step started."""
    engine_restarts: int = 0
    """Rollout engines that were started again in this step."""
    first_death: WorkerError | None = None
    """Why the first of them died."""


@dataclass
class Run:
    """A run on the driver: its settings, data, workers, outputs and progress.

    Only `Run.steps` and `Run.undo_step` replace `current`, so that another training loop can keep
    `StepState`s in another way.
    """

    # Settings.
    config: Config
    plan: Plan
    run_dir: Path

    # Data.
    tokenizer: Any
    train_data: PromptDataset
    val_data: PromptDataset | None
    sampler: PromptSampler
    total_steps: int

    advantage: AdvantageSpec
    """From scores to advantages."""
    workers: dict[str, Any]
    """Worker group of each role of `plan.roles`."""
    kl: FixedKLController | AdaptiveKLController
    """Coefficient of the KL penalty in the reward."""

    # Outputs.
    writer: RetryingWriter
    """Writes metrics and samples, also while the disk is full."""
    tracking: Tracking
    display: Display

    stop: Stop
    """Whether a signal has requested a stop."""
    limit: TimeLimit = field(default_factory=lambda: TimeLimit(None))
    """The wall time that is left."""
    service: ModelInfo | None = None
    """Model of the reference service. None: the run computes reference log-probs, or none."""
    env_factory: EnvFactory | None = None
    """Environment of multi-turn samples. None for single-turn runs."""
    detectors: Detectors | None = None
    """Look for signs of trouble after each step."""

    # Progress.
    current: StepState = field(default_factory=StepState)
    """The step in progress, or the last finished one."""
    previous: StepState = field(default_factory=StepState)
    version: int = 0
    """Version of the policy weights: the number of weight syncs."""
    resumed_step: int = 0
    """Step of the checkpoint that this process resumed from. 0: started from the beginning."""
    finished_step: int = 0
    """The last step whose updates are done."""
    saved_step: int = 0
    """Step of the newest checkpoint in the run directory."""
    failed_saves: FailedSaves = field(default_factory=FailedSaves)
    shown_failures: set[str] = field(default_factory=set)
    """Kinds of failed rewards that the console has shown."""
    can_abort: bool = False
    """Whether a worker call may be given up when a stop is requested: before a step's first update,
    and in validation."""

    @property
    def actor(self) -> ActorWorker:
        actor: ActorWorker = self.workers["actor"]
        return actor

    @property
    def rollout(self) -> RolloutWorker:
        rollout: RolloutWorker = self.workers["rollout"]
        return rollout

    @property
    def critic(self) -> CriticWorker | None:
        return self.workers.get("critic")

    @property
    def reference(self) -> ReferenceWorker | None:
        return self.workers.get("ref")

    @property
    def inference(self) -> InferenceWorker | None:
        return self.workers.get("inference")

    @property
    def log_prob_role(self) -> str:
        """The role that computes log-probs under the policy."""
        return "actor" if self.inference is None else "inference"

    @property
    def log_prob_worker(self) -> LogProbWorker:
        return self.actor if self.inference is None else self.inference

    @property
    def saved_workers(self) -> dict[str, Any]:
        """Worker groups whose state is a part of every checkpoint, by role."""
        return {role: group for role, group in self.workers.items() if ROLES[role].saves}

    @property
    def step(self) -> int:
        """Number of the current training step, from 1."""
        return self.current.number

    @property
    def metrics(self) -> Metrics:
        """Metrics of the current step."""
        return self.current.metrics

    @property
    def stopwatch(self) -> Stopwatch:
        """Timings of the current step."""
        return self.current.stopwatch

    def steps(self) -> Iterator[int]:
        """Yield the number of each step that is left. End early if a stop is requested."""
        while self.step < self.total_steps and not self.stop.requested:
            if not self.limit.fits_step():
                self.stop_for_time()
                return
            self.previous = self.current
            self.current = StepState(number=self.step + 1, sampler_state=self.sampler.state_dict())
            self.can_abort = True
            yield self.step

    def begin_update(self) -> None:
        """From here on the step must be finished: its updates cannot be undone.

        Raises:
            StepAborted: a stop was requested before.
        """
        self.obey_stop()
        self.can_abort = False

    def obey_stop(self) -> None:
        """Give up the worker call in progress if a stop was requested and nothing is lost by it.

        The rollout workers end, which frees their device memory for the checkpoint.

        Raises:
            StepAborted: to be handled where the step or the validation began.
        """
        if not self.stop.requested and self.limit.is_over():
            self.stop_for_time()
        if self.stop.requested and self.can_abort:
            self.can_abort = False
            engines = group(self.workers["rollout"])
            engines.supervisor.stop(engines.workers)
            raise StepAborted

    def stop_for_time(self) -> None:
        """Ask the run to stop, because trainer.max_runtime is nearly over."""
        stop_for_time(self.stop, self.config.trainer.max_runtime, self.run_dir)

    def undo_step(self) -> None:
        """Return to the end of the last finished step.

        Only for a step that has updated nothing: the workers still have the weights of that step.
        """
        self.sampler.load_state_dict(self.current.sampler_state)
        self.current = self.previous

    @property
    def must_save(self) -> bool:
        """Whether a finished step has no checkpoint yet. A stop then waits for the next one."""
        return self.finished_step > max(self.saved_step, self.resumed_step)

    @property
    def where(self) -> str:
        """What the run is doing, for messages."""
        return self.display.where(self.step)

    @property
    def first_step(self) -> bool:
        """Whether this is the first step of this process, resumed or not."""
        return self.step == self.resumed_step + 1

    @property
    def last_step(self) -> bool:
        """Whether no step follows the current one."""
        return self.step >= self.total_steps

    def state(self) -> dict[str, Any]:
        """Return the driver's part of a checkpoint, as JSON values."""
        return {
            "step": self.step,
            "version": self.version,
            "sampler": self.sampler.state_dict(),
            "kl_controller": self.kl.state_dict(),
            "metrics": self.metrics,
            "critical": critical_settings(self.config),
            "code": code_contents(self.config),
            "model": dataclasses.asdict(self.config.actor_rollout_ref.model),
        }


def stage(phase: str | None = None) -> Callable[[_Stage], _Stage]:
    """Mark a function that takes the run and usually a batch as a stage of the training step.

    It is timed as `timing_s/<phase>` and displayed as the current phase, if it has one. A batch
    that it returns is checked against the table of fields (protocol.fields).
    """

    def wrap(function: _Stage) -> _Stage:
        @functools.wraps(function)
        def checked(run: Run, *args: Any) -> Any:
            with ExitStack() as stack:
                if phase is not None:
                    stack.enter_context(run.stopwatch(phase))
                    stack.enter_context(run.display.phase(phase))
                result = function(run, *args)
            if isinstance(result, DataProto):
                before = args[0] if args else DataProto()
                check_stage(function.__name__, before, result)
            return result

        return cast(_Stage, checked)

    return wrap
