"""What actor, critic and reference share: a training engine behind Ray, its precision, offload, checkpoints and micro-batches."""

import resource
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from verlite.config.plan import Micro, Plan, Updates
from verlite.config.schema import Config
from verlite.controller.dispatch import register
from verlite.controller.worker import Worker
from verlite.protocol.data import DataProto

if TYPE_CHECKING:
    from verlite.engine.fsdp import TrainEngine
    from verlite.engine.micro import MicroBatching


class TrainingWorker(Worker):
    """One rank of a model under FSDP2. Subclasses make the engine and name their losses."""

    engine: "TrainEngine"

    def __init__(self, config: Config, plan: Plan, total_steps: int):
        self.config, self.plan, self.total_steps = config, plan, total_steps
        self.init_distributed()

    @register("all")
    def save(self, folder: str) -> str | None:
        """Write this role's shards (all ranks together). What the disk refuses is told, not raised: the run goes on without."""
        try:
            self.engine.save(folder)
        except OSError as error:
            return str(error)
        return None

    @register("all")
    def load(self, folder: str) -> None:
        """Read them back, whatever the number of ranks that wrote them."""
        self.engine.onload(optimizer=True)
        self.engine.load(folder)
        self.engine.offload()

    def update_in_mini_batches(
        self, role: str, batch: DataProto, updates: Updates, loss, **options
    ) -> dict[str, float]:
        """One optimizer step per mini-batch and epoch; returns means over the steps that have a metric, equal on every rank.

        Every rank makes the same number of steps, also one that has no row in some of them. The engine's own metrics (grad_norm,
        lr, ...) get the role's name in front.
        """
        steps = []
        temperature, dump = (
            self.config.actor_rollout_ref.rollout.temperature,
            Path(self.config.trainer.default_local_dir, "nonfinite"),
        )
        numbers = batch.batch["critic_mini_batch_index" if role == "critic" else "mini_batch_index"]
        self.engine.onload(optimizer=True)
        for epoch in range(updates.epochs):
            for update in range(batch.meta_info["updates"]):
                rows = batch.select_idxs(numbers[:, epoch] == update)
                folder = dump / f"step_{batch.meta_info['step']}_{role}_{epoch}_{update}"
                steps.append(
                    self.engine.update(
                        rows, cut(updates.micro), temperature, loss, dump_dir=folder, **options
                    )
                )
        self.engine.step_schedule()
        self.engine.offload()
        # A step whose rows have all lost their vote has no loss: it must not hide that of the others.
        named = {
            key: [step[key] for step in steps if key in step]
            for key in {key: None for step in steps for key in step}
        }
        means = {key: sum(values) / len(values) for key, values in named.items()}
        return {
            (key if "/" in key else f"{role}/{key}"): value for key, value in means.items()
        } | self._memory(role)

    def _memory(self, role: str) -> dict[str, float]:
        """Most memory this rank has held, in GiB."""
        peak = {
            f"{role}/perf/cpu_memory_used_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            / 2**20
        }
        if self.device.type == "cuda":
            peak[f"{role}/perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated() / 2**30
            peak[f"{role}/perf/max_memory_reserved_gb"] = torch.cuda.max_memory_reserved() / 2**30
        return peak


def cut(micro: Micro) -> "MicroBatching":
    """The plan's micro-batches as the engine takes them."""
    from verlite.engine.micro import MicroBatching

    return (
        MicroBatching(max_tokens=micro.max_tokens)
        if micro.max_tokens is not None
        else MicroBatching(size=micro.size)
    )
