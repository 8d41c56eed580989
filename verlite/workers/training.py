"""The base of actor, critic and reference workers: a training engine behind Ray."""

import ctypes
import logging
import os
import resource
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from verlite import progress
from verlite.controller.columns import fetch
from verlite.controller.dispatch import register
from verlite.controller.worker import Worker
from verlite.protocol.branches import split
from verlite.protocol.data import DataProto
from verlite.protocol.metrics import Metrics
from verlite.protocol.ragged import is_token_column, pad_columns, padded
from verlite.spec.roles import Micro, TrainingRole, Updates

if TYPE_CHECKING:
    from verlite.engine.fsdp import LossFn, TrainEngine
    from verlite.engine.micro import MicroBatching


# Padded rows of a training step, fetched and padded once per worker


class StepRows:
    """Rows of the current training step, or of a part of it (trainer.mode=pipelined).

    All calls of a step get the same rows, each with the columns that it needs. A column is fetched
    and padded by the first call that needs it, and kept for later calls of the same step.
    """

    def __init__(self) -> None:
        self._source: tuple[int, int | None] | None = None
        self._columns: dict[str, Tensor] = {}

    def padded(self, batch: DataProto) -> DataProto:
        """Return `batch` padded (see `protocol.ragged.padded`); meta_info needs `step`, and `part`
        if its rows are not those of the whole step."""
        source = batch.meta_info["step"], batch.meta_info.get("part")
        if source != self._source:
            self.clear()
            self._source = source
        names = [name for name in batch.non_tensor_batch if is_token_column(name)]
        missing = [name for name in names if name not in self._columns]
        if missing:
            new = fetch(batch.select(non_tensor_batch_keys=missing))
            self._columns |= pad_columns(new)
        return padded(batch, {name: self._columns[name] for name in names})

    def clear(self) -> None:
        """Free the columns."""
        self._source = None
        self._columns = {}


LEAST_COLLECTIVE_S = 1800.0
"""Seconds that a collective waits at least."""


class TrainingWorker(Worker):
    """One rank of a model under FSDP2. Subclasses define the losses.

    spec: what the role needs to know. rank_rows: this rank's rows of the current training step.
    """

    head = "lm"
    """What the model computes: "lm" for log-probs, "value" for values."""

    def __init__(self, spec: TrainingRole) -> None:
        self.spec = spec
        self.rank_rows = StepRows()
        if self.device.type == "cuda":
            use_expandable_segments()
            torch.cuda.set_device(self.device)
        # A collective must not end before the call that it is part of. Loading a model may wait
        # longer than calls may be without progress.
        self.init_distributed(max(LEAST_COLLECTIVE_S, spec.phase_timeout_s))
        self.engine = self._build_engine()
        self.engine.offload()

    def _build_engine(self) -> "TrainEngine":
        # Imported here: these libraries take seconds, and the driver only names the classes.
        from verlite.engine.fsdp import TrainEngine

        engine = self.spec.engine
        return TrainEngine(
            engine.model,
            engine.fsdp,
            engine.optim,
            head=self.head,
            total_training_steps=self.spec.total_steps,
            grad_clip=engine.grad_clip,
            max_nonfinite_updates=engine.max_nonfinite_updates,
            device=self.device,
            seed=engine.seed,
            sequence_parallel=engine.sequence_parallel,
        )

    @register("all")
    def save(self, folder: str) -> str | None:
        """Write this role's shards, all ranks together. Return an I/O error, None if it worked."""
        try:
            self.save_parts(folder)
        except OSError as error:
            return str(error)
        return None

    def save_parts(self, folder: str) -> None:
        """Write what a checkpoint has of this role. All ranks must call it."""
        self.engine.save(folder)

    @register("all")
    def load(self, folder: str, files: list[str]) -> None:
        """Load what `save` wrote, with any number of ranks. Only `files`, relative to `folder`, are
        read."""
        self.engine.onload(optimizer=True)
        self.engine.load(folder, files)
        self.engine.offload()

    def forward(
        self, rows: DataProto, micro: Micro, temperature: float, **options: bool
    ) -> dict[str, Tensor]:
        """Return `TrainEngine.forward` of padded rows [b, R], whose samples may have branches."""
        sequences, places = split(rows)
        out = self.engine.forward(sequences, micro_batching(micro), temperature, **options)
        return out if places is None else {name: places.put(out[name]) for name in out}

    def update_in_mini_batches(
        self, role: str, batch: DataProto, updates: Updates, loss: "LossFn", **options: Any
    ) -> Metrics:
        """Take one optimizer step per mini-batch and epoch on padded rows.

        Every rank takes the same number of steps, even if it has no rows in some of them.

        Returns:
            Means over the steps that have a metric, equal on every rank. The engine's own metrics
            (grad_norm, lr, ...) are prefixed with the role's name.
        """
        rows = trained_rows(batch)
        column = "critic_mini_batch_index" if role == "critic" else "mini_batch_index"
        mini_batch_index = rows.batch[column]
        dump_dir = Path(self.spec.run_dir, "nonfinite")
        steps = []
        self.engine.onload(optimizer=True)
        for epoch in range(updates.epochs):
            for update in range(rows.meta_info["updates"]):
                number = epoch * rows.meta_info["updates"] + update + 1
                total = updates.epochs * rows.meta_info["updates"]
                progress.here.part = f"mini-batch {number} of {total}"
                step = self.engine.update(
                    rows.select_idxs(mini_batch_index[:, epoch] == update),
                    micro_batching(updates.micro),
                    self.spec.temperature,
                    loss,
                    dump_dir=dump_dir / f"step_{rows.meta_info['step']}_{role}_{epoch}_{update}",
                    **options,
                )
                steps.append(step)
        self.engine.step_schedule()
        self.engine.offload()
        self.rank_rows.clear()
        means = mean_metrics(steps)
        named = {key if "/" in key else f"{role}/{key}": value for key, value in means.items()}
        return named | self._memory(role)

    def _memory(self, role: str) -> Metrics:
        """Return this rank's peak memory in GiB: on the device since the role's last update, in
        the host since the start."""
        peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak = {f"{role}/perf/cpu_memory_used_gb": peak_kib / 2**20}
        if self.device.type == "cuda":
            peak[f"{role}/perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated() / 2**30
            peak[f"{role}/perf/max_memory_reserved_gb"] = torch.cuda.max_memory_reserved() / 2**30
            torch.cuda.reset_peak_memory_stats()
        return peak


def use_expandable_segments() -> None:
    """Let torch's allocator grow its segments in this process, unless the user has configured it.

    Micro-batches differ in length, which fragments segments of fixed size. Must be called before
    the process allocates on a GPU. vLLM's sleep mode does not work with it, so only processes of
    training roles call it. On NVIDIA GPUs torch asks NVML at the first allocation of such a segment
    and fails without it, so without NVML segments keep a fixed size.
    """
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    if any(name in os.environ for name in names):
        return
    if torch.version.hip is None and not _has_nvml():
        logging.getLogger(__name__).warning(
            "libnvidia-ml.so.1 (NVML) cannot be used here, so torch's allocator keeps segments of "
            "a fixed size. Memory may fragment; start the container with the driver's utilities "
            "(NVIDIA_DRIVER_CAPABILITIES=compute,utility)"
        )
        return
    configure = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if configure is None:  # an older torch, which has only the variable
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    else:  # the variable may have been read when torch was imported
        configure("expandable_segments:True")


def _has_nvml() -> bool:
    """Return whether NVIDIA's management library can be loaded and started."""
    try:
        return bool(ctypes.CDLL("libnvidia-ml.so.1").nvmlInit_v2() == 0)
    except (OSError, AttributeError):
        return False


def trained_rows(batch: DataProto) -> DataProto:
    """Return padded rows as an update reads them, one for each branch of a sample: the engine's
    micro-batching and the losses read the mask of trained tokens, `loss_mask`, under the name
    response_mask. Advantages have their `credit`."""
    batch = credited(batch)
    return split(batch.with_batch(response_mask=batch.batch["loss_mask"]))[0]


def credited(batch: DataProto) -> DataProto:
    """Return padded rows with the advantages of the policy's update: times `credit`, if any."""
    t = batch.batch
    if "credit" in t.keys() and "advantages" in t.keys():
        return batch.with_batch(advantages=t["advantages"] * t["credit"])
    return batch


def mean_metrics(steps: list[Metrics]) -> Metrics:
    """Return each metric's mean over the steps that have it.

    A step without trained tokens has no loss. It must not count as a loss of 0.
    """
    names = dict.fromkeys(name for step in steps for name in step)
    means = {}
    for name in names:
        values = [step[name] for step in steps if name in step]
        means[name] = sum(values) / len(values)
    return means


def micro_batching(micro: Micro) -> "MicroBatching":
    """Convert the spec's micro-batches to the engine's."""
    from verlite.engine.micro import MicroBatching

    if micro.max_tokens is not None:
        return MicroBatching(max_tokens=micro.max_tokens)
    return MicroBatching(size=micro.size)
