"""A training engine's state on disk: torch.distributed.checkpoint in safetensors, and JSON for the rest. Nothing is pickled.

    shards/*.safetensors     parameters (of a model with LoRA those that are trained, and not the base, which lies at its model.path),
                             buffers, Adam's moments; one file per rank, loadable by any number of ranks
    state.json               schedule, Adam's step counts, world size
    rng_rank_N.json          states of Python's, numpy's and torch's generators on rank N

Files are written in place; the caller makes the folder appear atomically.
"""

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.tensor import DTensor

from verlite.engine import lora

_MOMENTS = ("exp_avg", "exp_avg_sq")


def save(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    schedule: dict[str, Any],
) -> None:
    """Write the state; all ranks must call it. `schedule` is JSON. Raises OSError on all ranks when one of them cannot write."""
    with _together(folder):
        folder.mkdir(parents=True, exist_ok=True)
    writer = HuggingFaceStorageWriter(str(folder / "shards"), save_distributed=True)
    try:
        dcp.save(_tensors(model, optimizer), storage_writer=writer)
    except (
        dcp.CheckpointException
    ) as error:  # on all ranks; a BaseException, which no handler of failed saves would see
        raise OSError(f"cannot write the checkpoint {folder}: {error}") from error
    with _together(folder):
        (folder / f"rng_rank_{dist.get_rank()}.json").write_text(json.dumps(_rng_state()))
        if dist.get_rank() == 0:
            steps = (
                {}
                if optimizer is None
                else {name: int(optimizer.state[p]["step"]) for name, p in lora.trained(model)}
            )
            state = {
                "world_size": dist.get_world_size(),
                "schedule": schedule,
                "optimizer_steps": steps,
            }
            (folder / "state.json").write_text(json.dumps(state))


@contextmanager
def _together(folder: Path) -> Iterator[None]:
    """What one rank's disk refuses is raised on all ranks: nobody waits in a collective for one that has left."""
    mine: str | None = None
    try:
        yield
    except OSError as error:
        mine = f"rank {dist.get_rank()}: {error}"
    every: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    if refused := [text for text in every if text]:
        raise OSError(f"cannot write the checkpoint {folder}: {refused[0]}")


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Read what `save` wrote, by any number of ranks, into model and optimizer; returns the schedule. All ranks must call it.

    Generators are restored when the number of ranks is the same. Raises ValueError when the folder is incomplete or belongs to
    another model.
    """
    try:
        state = json.loads((folder / "state.json").read_text())
        dcp.load(
            _tensors(model, optimizer),
            storage_reader=HuggingFaceStorageReader(str(folder / "shards")),
        )
    except (OSError, KeyError, ValueError, RuntimeError, dcp.CheckpointException) as error:
        raise ValueError(f"cannot load the checkpoint {folder} into this model: {error}") from error
    if optimizer is not None:
        for name, parameter in lora.trained(model):
            optimizer.state[parameter]["step"].fill_(state["optimizer_steps"][name])
    if state["world_size"] == dist.get_world_size():
        _set_rng_state(json.loads((folder / f"rng_rank_{dist.get_rank()}.json").read_text()))
    return state["schedule"]


def nonfinite(model: nn.Module) -> list[str]:
    """Names of parameters with NaN or infinite values on any rank; all ranks must call it."""
    named = list(model.named_parameters())
    bad = torch.stack([(~torch.isfinite(local_part(p))).any() for _, p in named]).int()
    dist.all_reduce(bad, dist.ReduceOp.MAX)
    return [name for (name, _), flag in zip(named, bad.tolist(), strict=True) if flag]


def local_part(tensor: Tensor) -> Tensor:
    """This rank's shard of a sharded tensor; a plain tensor as it is."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    tensors = {
        f"model.{name}": tensor.detach()
        for name, tensor in [*lora.trained(model), *persistent_buffers(model)]
    }
    if optimizer is not None:
        for name, parameter in lora.trained(model):
            tensors |= {
                f"optimizer.{name}.{moment}": optimizer.state[parameter][moment]
                for moment in _MOMENTS
            }
    return tensors


def persistent_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Buffers that belong to the weights (state_dict has them), as opposed to derived tables such as rotary frequencies."""
    return [
        (f"{prefix}.{name}".lstrip("."), buffer)
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    ]


def _rng_state() -> dict[str, Any]:
    algorithm, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)  # type: ignore[misc]
    state = {
        "python": random.getstate(),
        "numpy": [algorithm, keys.tolist(), position, has_gauss, gauss],  # type: ignore[union-attr]
        "torch": torch.get_rng_state().tolist(),
    }
    return state | (
        {"cuda": torch.cuda.get_rng_state().tolist()} if torch.cuda.is_available() else {}
    )


def _set_rng_state(state: dict[str, Any]) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(tuple(state["numpy"]))
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.tensor(state["cuda"], dtype=torch.uint8))
