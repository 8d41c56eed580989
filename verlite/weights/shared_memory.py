"""Transport `shared_memory`: one copy of the weights in the memory of a host, which every engine of
that host maps.

The trainer writes all buckets before an engine reads the first one, so the trainer can free its GPU
memory before the engine allocates its own.
"""

import mmap
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from itertools import chain, pairwise
from typing import BinaryIO

import torch
from torch import Tensor

from verlite.weights.buckets import Bucket, flat_bytes, header_of

STAGING_BYTES = 64 << 20
"""Size of each of the two pinned buffers between a GPU and a memory file."""


class MemoryFiles:
    """Bucket files that other processes of this machine read by path, until `close`.

    On Linux they are anonymous memory files, which end with this process and do not depend on the
    size of /dev/shm. On other systems they are in a private temporary folder.

    Attributes:
        paths: of the files.
        bytes: total size of the files.
    """

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.bytes = 0
        self._files: list[BinaryIO] = []
        self._folder: str | None = None
        self._staging: Staging | None = None

    def add(self, bucket: Bucket) -> None:
        """Copy a bucket into a new file."""
        file = self._new_file()
        header, size = header_of(bucket)
        file.write(header)
        device = bucket[0][1].device
        if device.type != "cpu" and self._staging is None:
            self._staging = Staging(device, STAGING_BYTES)
        tensors: Iterable[Tensor] = [tensor for _, tensor in bucket]
        for part in tensors if self._staging is None else self._staging.to_host(tensors):
            _write(part, file)
        self.bytes += len(header) + size

    def map_new(self, header: bytes, size: int) -> Tensor:
        """Create a file with this header. Return its tensors' bytes as writable uint8 [size]."""
        file = self._new_file()
        file.write(header)
        file.truncate(len(header) + size)
        self.bytes += len(header) + size
        mapped = mmap.mmap(file.fileno(), len(header) + size)  # the tensor keeps it alive
        return torch.frombuffer(mapped, dtype=torch.uint8)[len(header) :]

    def finish(self) -> None:
        """Do nothing: every bucket is complete."""

    def abort(self, reason: str) -> None:
        """Close the files."""
        self.close()

    def close(self) -> None:
        """Close the files. Their memory is freed when readers have dropped their tensors too."""
        for file in self._files:
            file.close()
        self._files.clear()
        self._staging = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _new_file(self) -> BinaryIO:
        name = f"verlite-bucket-{len(self.paths):05d}"
        if hasattr(os, "memfd_create"):
            file: BinaryIO = open(os.memfd_create(name), "w+b", buffering=0)
            path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
        else:
            self._folder = self._folder or tempfile.mkdtemp(prefix="verlite-")
            path = os.path.join(self._folder, name)
            file = open(path, "w+b", buffering=0)
        self._files.append(file)
        self.paths.append(path)
        return file


class Staging:
    """Copies from a device to the host through two buffers: while one is read, the other is filled.

    On a GPU the buffers are pinned, so the device copies without the help of a core.
    """

    def __init__(self, device: torch.device, size: int) -> None:
        is_cuda = device.type == "cuda"
        self.buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=is_cuda) for _ in range(2)]
        self.copied = [torch.cuda.Event() for _ in range(2)] if is_cuda else None

    def to_host(self, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield the bytes of the tensors in order, in host tensors that are valid until the next.
        Each but the last fills a buffer, so that small tensors are copied together."""
        for filled, _ in pairwise(chain(self._fill(tensors), [None])):  # the next is on its way
            assert filled is not None
            yield self._wait(*filled)

    def _fill(self, tensors: Iterable[Tensor]) -> Iterator[tuple[int, int]]:
        """Copy to the buffers in turn. Yield each buffer's number and bytes as soon as its copies
        are under way."""
        size = self.buffers[0].numel()
        slot = filled = 0
        for rest in map(flat_bytes, tensors):
            while rest.numel():
                part, rest = rest[: size - filled], rest[size - filled :]
                self.buffers[slot][filled : filled + part.numel()].copy_(part, non_blocking=True)
                filled += part.numel()
                if filled == size:
                    self._record(slot)
                    yield slot, filled
                    slot, filled = 1 - slot, 0
        if filled:
            self._record(slot)
            yield slot, filled

    def _record(self, slot: int) -> None:
        if self.copied is not None:
            self.copied[slot].record()

    def _wait(self, slot: int, size: int) -> Tensor:
        if self.copied is not None:
            self.copied[slot].synchronize()
        return self.buffers[slot][:size]


def _write(tensor: Tensor, file: BinaryIO) -> None:
    data = flat_bytes(tensor).numpy().data
    while data:
        data = data[file.write(data) :]
