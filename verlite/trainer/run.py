"""The state of a run on the driver, which all stages of the loop share."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

from verlite.algorithms.kl import KLController
from verlite.config.critical import code_contents, critical_settings
from verlite.config.plan import Plan
from verlite.config.schema import Config
from verlite.control.commands import BeginStep, Command, Do
from verlite.control.machine import Machine
from verlite.control.policy import Policy
from verlite.controller.failures import WorkerError
from verlite.controller.worker_group import group
from verlite.data.dataset import PromptDataset
from verlite.data.sampler import PromptSampler
from verlite.engine.reference_wire import ModelInfo
from verlite.envs.factory import EnvFactory
from verlite.files import RetryingWriter
from verlite.protocol.data import DataProto
from verlite.protocol.fields import check_stage
from verlite.spec.roles import AdvantageSpec
from verlite.spec.weight_routes import WeightRoutes
from verlite.trainer import saving
from verlite.trainer.detectors import Detectors
from verlite.trainer.display import Display
from verlite.trainer.errors import StepAborted
from verlite.trainer.groups import Groups
from verlite.trainer.metrics import Metrics, Stopwatch
from verlite.trainer.stop import Event, P, Stop
from verlite.trainer.tracking import Tracking
from verlite.workers.actor import ActorWorker
from verlite.workers.critic import CriticWorker
from verlite.workers.inference import InferenceWorker
from verlite.workers.log_probs import LogProbWorker
from verlite.workers.reference import ReferenceWorker
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
    inferred: dict[str, DataProto] = field(default_factory=dict)
    """By phase, what was computed of the step's rows while others were sampled, in the order of the
    batch (trainer.mode=pipelined)."""
    first_death: WorkerError | None = None
    """Why the first rollout engine died that was started again in this step."""


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
    kl: KLController
    """Coefficient of the KL penalty in the reward."""

    # Outputs.
    writer: RetryingWriter
    """Writes metrics and samples, also while the disk is full."""
    tracking: Tracking
    display: Display

    stop: Stop
    """The process, whose machine decides what happens next."""
    service: ModelInfo | None = None
    """Model of the reference service. None: the run computes reference log-probs, or none."""
    teacher_service: ModelInfo | None = None
    """Likewise of the service with the teacher."""
    env_factory: EnvFactory | None = None
    """Environment of multi-turn samples. None for single-turn runs."""
    detectors: Detectors | None = None
    """Look for signs of trouble after each step."""
    groups: Groups | None = None
    """With trainer.mode=async and pipelined: the samples that are not trained yet."""

    # Progress.
    current: StepState = field(default_factory=StepState)
    """The step in progress, or the last finished one."""
    previous: StepState = field(default_factory=StepState)
    routes: WeightRoutes | None = None
    """How weights travel. None before the first sync, which decides it."""
    version: int = 0
    """Version of the policy weights: the number of weight syncs."""
    shown_failures: set[str] = field(default_factory=set)
    """Kinds of failed rewards that the console has shown."""

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
    def teacher(self) -> ReferenceWorker | None:
        return self.workers.get("teacher")

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

    def begin(self, saved: int = 0) -> None:
        """Tell the machine what the run wants, and where it begins.

        Args:
            saved: step of the newest checkpoint in the run directory, 0 without one.
        """
        trainer, plan = self.config.trainer, self.plan
        policy = Policy(
            total_steps=self.total_steps,
            test_freq=trainer.test_freq if self.val_data is not None else 0,
            save_freq=trainer.save_freq,
            validates_first=self.val_data is not None and plan.validates_first,
            val_only=trainer.val_only,
            exports=trainer.export_hf,
            max_restarts=self.config.actor_rollout_ref.rollout.max_restarts,
            max_failed_saves=trainer.max_failed_saves,
            failed_saves_key="trainer.max_failed_saves=",
            stop_grace_s=trainer.stop_grace_s,
            max_runtime=trainer.max_runtime,
        )
        saving.begin(self, policy, saved)

    def steps(self) -> Iterator[int]:
        """Yield the number of each step that is left. End early if a stop is requested."""
        while isinstance(command := self.tell(Machine.step_wanted), BeginStep):
            self.previous = self.current
            self.current = StepState(command.step, sampler_state=self.sampler.state_dict())
            yield self.step

    def tell(self, event: Event[P], *values: P.args, **named: P.kwargs) -> Command | None:
        """Tell the machine what happened, and do what it says. Return what the loop does next.

        Raises:
            StepAborted: a stop was requested, and what the run does is given up. To be handled
                where the step or the validation began.
            KeyboardInterrupt: a stop was requested, and nothing has to be saved.
        """
        return self.obey(self.stop.tell(event, *values, **named))

    def obey(self, commands: list[Command]) -> Command | None:
        """End the engines if the machine says so, which frees their device memory for the
        checkpoint, after a last look at the samples that run. Return the command that is left."""
        following = None
        for command in commands:
            if command in (Do.GIVE_UP, Do.END_ENGINES):
                if self.groups is not None:
                    self.groups.look(self.workers["rollout"])
                engines = group(self.workers["rollout"])
                engines.supervisor.stop(engines.workers)
            if command is Do.GIVE_UP:
                raise StepAborted
            following = command
        return following

    def undo_step(self) -> None:
        """Return to the end of the last finished step.

        Only for a step that has updated nothing: the workers still have the weights of that step.
        """
        if self.groups is None:
            self.sampler.load_state_dict(self.current.sampler_state)
        else:  # what was drawn is trained later
            self.groups.in_step = []
        self.current = self.previous

    @property
    def first_step(self) -> bool:
        """Whether this is the first step of this process, resumed or not."""
        return self.step == self.stop.machine.resumed_step + 1

    def state(self) -> dict[str, Any]:
        """Return the driver's part of a checkpoint, as JSON values."""
        return {
            "step": self.step,
            "version": self.version,
            "sampler": self.sampler.state_dict(),
            **({} if self.groups is None else {"groups": self.groups.state_dict()}),
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
