"""A training engine's state on disk. Tensors are stored by torch.distributed.checkpoint as
safetensors, the rest as JSON.

    shards/*.safetensors     parameters, buffers and Adam's moments; one file per rank, loadable by
    any number of ranks. With LoRA,
                             only the trained parameters: the base model is stored at model.path.
    state.json               schedule, Adam's step counts, number of ranks
    rng_rank_N.json          states of Python's, NumPy's and torch's random generators on rank N

Nothing is pickled. Files are written in place; the caller makes the folder appear atomically.
"""

import json
import math
import os
import random
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from verlite.engine import lora
from verlite.files import read_json, replace_file
from verlite.weights.buckets import DTYPE_NAMES, flat_bytes

_MOMENTS = ("exp_avg", "exp_avg_sq")


def save(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    schedule: dict[str, Any],
) -> None:
    """Write the state. All ranks must call it.

    Args:
        folder: where to write.
        model: the sharded model.
        optimizer: AdamW, or None for a frozen model.
        schedule: JSON values that `load` returns.

    Raises:
        OSError: on all ranks, if any rank cannot write.
    """
    rank = dist.get_rank()
    with _raise_on_all_ranks(folder):
        folder.mkdir(parents=True, exist_ok=True)
    writer = _StreamingWriter(str(folder / "shards"), save_distributed=True)
    try:
        dcp.save(_tensors(model, optimizer), storage_writer=writer)
    except dcp.CheckpointException as error:
        # Raised on all ranks. It is a BaseException, which handlers of failed saves would not
        # catch.
        raise OSError(f"cannot write the checkpoint {folder}: {_cause(error)}") from error
    with _raise_on_all_ranks(folder):
        replace_file(folder / f"rng_rank_{rank}.json", json.dumps(_rng_state()))
        if rank == 0:
            state = {
                "world_size": dist.get_world_size(),
                "schedule": schedule,
                "optimizer_steps": _step_counts(model, optimizer),
            }
            replace_file(folder / "state.json", json.dumps(state))


class _StreamingWriter(HuggingFaceStorageWriter):
    """Writes the same files as torch's writer, but holds one tensor in host memory at a time. torch
    collects all of a rank's tensors and then copies them into one bytes object."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's shards."""
        results = []
        if plan.items:
            offsets = {item.index.fqn: {"saved_offsets": _offsets(item)} for item in plan.items}
            metadata = {
                "DCP_SHARDING_INFO": json.dumps(offsets),
                "DCP_VERSION": "1.0",
                "format": "pt",
            }
            path = Path(self.path, f"shard-{plan.storage_data['shard_index']:05d}.safetensors")
            header_bytes = len(json.dumps(metadata)) + sum(
                _HEADER_BYTES + len(json.dumps(item.index.fqn)) for item in plan.items
            )
            with TensorFile(path, header_bytes, metadata) as file:
                for item in plan.items:
                    data = planner.resolve_data(item)
                    assert isinstance(data, Tensor)
                    file.add(item.index.fqn, data)
                    results.append(WriteResult(item.index, data.nbytes, None))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future


_HEADER_BYTES = 256
"""Space in a file's header for dtype, shape and place of one tensor of up to 8 dimensions."""


def _offsets(item: WriteItem) -> list[int]:
    """Return where a shard begins in the whole tensor."""
    assert item.tensor_data is not None
    return list(item.tensor_data.chunk.offsets)


def _step_counts(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, int]:
    if optimizer is None:
        return {}
    return {name: int(optimizer.state[p]["step"]) for name, p in lora.trained(model)}


@contextmanager
def _raise_on_all_ranks(folder: Path) -> Iterator[None]:
    """Raise an OSError of any rank on all ranks, so that no rank waits in a collective for one that
    failed."""
    own: str | None = None
    try:
        yield
    except OSError as error:
        own = f"rank {dist.get_rank()}: {error}"
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, own)
    failed = [error for error in errors if error]
    if failed:
        raise OSError(f"cannot write the checkpoint {folder}: {failed[0]}")


def load(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    files: Collection[str] | None = None,
) -> dict[str, Any]:
    """Read what `save` wrote into model and optimizer. All ranks must call it.

    The number of ranks may differ from the one that saved. Random generators are restored only if
    it is the same.

    Args:
        files: names of the files that may be read, relative to `folder`. None: all.

    Returns:
        The schedule given to `save`.

    Raises:
        ValueError: the folder is incomplete or belongs to another model.
    """
    try:
        state = _read_json(folder, "state.json", files)
        dcp.load(_tensors(model, optimizer), storage_reader=_Reader(folder, files))
        if optimizer is not None:
            for name, parameter in lora.trained(model):
                optimizer.state[parameter]["step"].fill_(state["optimizer_steps"][name])
        if state["world_size"] == dist.get_world_size():
            _set_rng_state(_read_json(folder, f"rng_rank_{dist.get_rank()}.json", files))
        schedule: dict[str, Any] = state["schedule"]
        missing = {"step", "updated", "nonfinite_in_a_row"} - set(schedule)
        if missing:
            raise ValueError(f"state.json has no {min(missing)}")
    except dcp.CheckpointException as error:
        raise ValueError(
            f"cannot load the checkpoint {folder} into this model: {_cause(error)}"
        ) from error
    except Exception as error:  # the content of a file may raise anything
        cause = f"{type(error).__name__}: {error}"
        raise ValueError(f"cannot load the checkpoint {folder} into this model: {cause}") from error
    return schedule


def _read_json(folder: Path, name: str, files: Collection[str] | None) -> Any:
    if files is not None and name not in files:
        raise ValueError(f"its manifest does not list {name}")
    return read_json(folder / name)


def _cause(error: dcp.CheckpointException) -> str:
    """Return the first failure of any rank, without the tracebacks of torch."""
    rank, (cause, _) = min(error.failures.items())
    return f"rank {rank}: {cause}"


class _Reader(HuggingFaceStorageReader):
    """Reads only the shards that `files` names, and refuses tensors of which a part is missing."""

    def __init__(self, folder: Path, files: Collection[str] | None) -> None:
        super().__init__(str(folder / "shards"))
        self.fs = _OnlyFiles(folder, files)

    def read_metadata(self) -> Metadata:
        """Read names, shapes and places of all tensors."""
        metadata = super().read_metadata()
        for name, tensor in metadata.state_dict_metadata.items():
            if isinstance(tensor, TensorStorageMetadata):
                found = sum(chunk.sizes.numel() for chunk in tensor.chunks)
                if found != tensor.size.numel():
                    raise ValueError(f"a part of {name} is missing in its shards")
        return metadata


class _OnlyFiles(FileSystem):
    """A folder of which only the named files exist."""

    def __init__(self, folder: Path, files: Collection[str] | None) -> None:
        self._paths = None if files is None else {str(folder / name) for name in files}

    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        """List the paths in a folder."""
        return [name for name in super().ls(path) if self._paths is None or name in self._paths]


def nonfinite(model: nn.Module) -> list[str]:
    """Return the names of parameters with NaN or infinite values on any rank. All ranks must call
    it."""
    named = list(model.named_parameters())
    flags = torch.stack([~_largest(local_part(p)).isfinite() for _, p in named]).int()
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    return [name for (name, _), flag in zip(named, flags.tolist(), strict=True) if flag]


def _largest(part: Tensor) -> Tensor:
    """Return the largest magnitude, [], or NaN. It takes no memory; isfinite(part) does."""
    return torch.linalg.vector_norm(part, math.inf) if part.numel() else part.new_zeros(())


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a sharded tensor, or a plain tensor itself, detached."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    return tensor.detach()


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint by name."""
    trained = lora.trained(model)
    tensors = {
        f"model.{name}": tensor.detach() for name, tensor in [*trained, *persistent_buffers(model)]
    }
    if optimizer is not None:
        for name, parameter in trained:
            for moment in _MOMENTS:
                tensors[f"optimizer.{name}.{moment}"] = optimizer.state[parameter][moment]
    return tensors


def persistent_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the buffers in the model's state_dict, by name. Derived tables, such as rotary
    frequencies, are not among them."""
    return [
        (f"{prefix}.{name}".lstrip("."), buffer)
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    ]


def _rng_state() -> dict[str, Any]:
    """Return the random generators' states as JSON values."""
    algorithm, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": [algorithm, keys.tolist(), position, has_gauss, gauss],  # type: ignore[union-attr]
        "torch": torch.get_rng_state().tolist(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state().tolist()
    return state


def _set_rng_state(state: dict[str, Any]) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(tuple(state["numpy"]))
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.tensor(state["cuda"], dtype=torch.uint8))


# Writing a safetensors file one tensor at a time.
#
# A file begins with the size of its header and the header, a JSON object with the place of every
# tensor. The library's `save_file` therefore needs all tensors at once, and copies them. Here the
# header has a fixed size, padded with spaces as the format allows, and is written last.


class TensorFile:
    """A safetensors file that is being written. It is complete after `close`; one that was left
    before has no valid header.

    Args:
        path: the file to create.
        header_bytes: space for the header.
        metadata: strings in the header.

    Attributes:
        names: names of the tensors so far.
        data_bytes: their size.
    """

    def __init__(self, path: Path, header_bytes: int, metadata: dict[str, str]):
        self.names: list[str] = []
        self.data_bytes = 0
        self._header: dict[str, Any] = {"__metadata__": metadata}
        self._header_bytes = (header_bytes + 7) // 8 * 8  # the format aligns the data to 8 bytes
        self._used = len(json.dumps(self._header))
        self._file = open(path, "wb")  # noqa: SIM115
        self._file.seek(8 + self._header_bytes)

    def __enter__(self) -> "TensorFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self._file.close()

    def has_room(self, name: str, tensor: Tensor) -> bool:
        """Return True if the header has space for the tensor."""
        return self._used + len(self._entry(name, tensor)) <= self._header_bytes

    def add(self, name: str, tensor: Tensor) -> None:
        """Write a tensor of any device.

        Raises:
            ValueError: the header has no space for it.
        """
        if not self.has_room(name, tensor):
            raise ValueError(
                f"{self._file.name}: the header of {self._header_bytes} bytes has no space for "
                f"{name} after {len(self.names)} tensors. Write fewer tensors to one file"
            )
        self._used += len(self._entry(name, tensor))
        end = self.data_bytes + tensor.nbytes
        self._header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [self.data_bytes, end],
        }
        self._file.write(flat_bytes(tensor.detach().cpu()).numpy().data)
        self.data_bytes = end
        self.names.append(name)

    def _entry(self, name: str, tensor: Tensor) -> str:
        """Return text at least as long as the tensor's entry in the header."""
        end = self.data_bytes + tensor.nbytes
        entry = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [end, end]}
        return json.dumps({name: entry}) + ", "

    def close(self) -> None:
        """Write the header, and wait until the file is on the disk."""
        header = json.dumps(self._header).encode().ljust(self._header_bytes)
        self._file.seek(0)
        self._file.write(len(header).to_bytes(8, "little"))
        self._file.write(header)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
