"""A run: everything that the stages of the loop share."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verlite.algorithms.kl import AdaptiveKLController, FixedKLController
from verlite.config.plan import Plan, max_turns
from verlite.config.schema import Config
from verlite.controller.supervise import StopRequest
from verlite.data.dataset import PromptDataset
from verlite.data.sampler import PromptSampler
from verlite.envs.world import World
from verlite.trainer.display import Display
from verlite.trainer.metrics import Metrics, Stopwatch
from verlite.trainer.tracking import Tracking
from verlite.workers.actor import ActorWorker
from verlite.workers.critic import CriticWorker
from verlite.workers.reference import ReferenceWorker
from verlite.workers.rollout import RolloutWorker

AGENT_LENGTHS = ("max_start_length", "max_prompt_length", "max_response_length", "max_obs_length")
LORA = ("lora_rank", "lora_alpha", "target_modules", "exclude_modules", "lora_adapter_path")


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
    world: World | None = None
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


def critical_settings(config: Config) -> dict[str, Any]:
    """Settings that give other numbers when they change between a checkpoint and its resumption."""
    model, actor, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    return {
        "actor_rollout_ref.model.path": model.path,
        **{f"actor_rollout_ref.model.{name}": getattr(model, name) for name in LORA},
        "actor_rollout_ref.rollout.n": rollout.n,
        "actor_rollout_ref.rollout.seed": rollout.seed,
        "actor_rollout_ref.actor.ppo_mini_batch_size": actor.ppo_mini_batch_size,
        "actor_rollout_ref.actor.ppo_epochs": actor.ppo_epochs,
        "algorithm.adv_estimator": config.algorithm.adv_estimator,
        "data.train_files": config.data.train_files,
        "data.train_batch_size": config.data.train_batch_size,
        "data.seed": config.data.seed,
        "data.shuffle": config.data.shuffle,
        "max_turns": max_turns(config),
        **({"env.name": config.env.name, "env.kwargs": config.env.kwargs} if max_turns(config) else {}),
        **({f"data.{name}": getattr(config.data, name) for name in AGENT_LENGTHS} if max_turns(config) else {}),
        **({"retriever.topk": config.retriever.topk} if max_turns(config) and config.env.name == "search" else {}),
    }
