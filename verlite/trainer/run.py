"""A run: everything that the stages of the loop share."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verlite.algorithms.kl import AdaptiveKLController, FixedKLController
from verlite.config.critical import critical_settings
from verlite.config.plan import Plan
from verlite.config.schema import Config
from verlite.controller.supervise import StopRequest
from verlite.data.dataset import PromptDataset
from verlite.data.sampler import PromptSampler
from verlite.envs.factory import EnvFactory
from verlite.trainer.display import Display
from verlite.trainer.metrics import Metrics, Stopwatch
from verlite.trainer.tracking import Tracking
from verlite.workers.actor import ActorWorker
from verlite.workers.critic import CriticWorker
from verlite.workers.reference import ReferenceWorker
from verlite.workers.rollout import RolloutWorker


@dataclass
class Run:
    """State of a run on the driver.

    step counts finished and current training steps from 1 (0 before the first); version counts weight syncs; drawn counts the
    prompts that this step has sampled so far.
    """

    config: Config
    plan: Plan
    run_dir: Path
    tokenizer: Any
    train_data: PromptDataset
    val_data: PromptDataset | None
    sampler: PromptSampler
    total_steps: int
    actor: ActorWorker
    rollout: RolloutWorker
    critic: CriticWorker | None
    reference: ReferenceWorker | None
    kl: FixedKLController | AdaptiveKLController
    tracking: Tracking
    display: Display
    stop: StopRequest
    env_factory: EnvFactory | None = None
    step: int = 0
    version: int = 0
    drawn: int = 0
    resumed_step: int = 0
    saved_step: int = 0
    failed_saves: int = 0
    before: dict[str, Any] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=dict)
    stopwatch: Stopwatch = field(default_factory=Stopwatch)

    def steps(self) -> Iterator[int]:
        """The steps that are left. Ends early when a stop was requested (SIGTERM, SIGUSR1)."""
        while self.step < self.total_steps and not self.stop.requested:
            self.before = {"metrics": self.metrics, "sampler": self.sampler.state_dict()}
            self.step += 1
            self.drawn = 0
            self.metrics, self.stopwatch = {}, Stopwatch()
            yield self.step

    def undo_step(self) -> None:
        """Back to the end of the last step, whose weights the workers still hold: nothing of this one was learnt yet."""
        self.step, self.metrics = self.step - 1, self.before["metrics"]
        self.sampler.load_state_dict(self.before["sampler"])

    @property
    def first_step(self) -> bool:
        """Whether this is the first step of this process, resumed or not."""
        return self.step == self.resumed_step + 1

    @property
    def last_step(self) -> bool:
        return self.step >= self.total_steps or self.stop.requested

    def state(self) -> dict[str, Any]:
        """The driver's part of a checkpoint, as JSON."""
        return {
            "step": self.step,
            "version": self.version,
            "sampler": self.sampler.state_dict(),
            "kl_controller": self.kl.state_dict(),
            "metrics": self.metrics,
            "critical": critical_settings(self.config),
            "model": dataclasses.asdict(self.config.actor_rollout_ref.model),
        }


def stage(name: str) -> Callable:
    """Time a stage as `timing_s/<name>` and display it as the current phase."""

    def wrap(function: Callable) -> Callable:
        @functools.wraps(function)
        def timed(run: Run, *args):
            with run.stopwatch(name), run.display.phase(name):
                return function(run, *args)

        return timed

    return wrap
