"""What the simulated CUDA (cuda.c) has seen in this process."""

import ctypes
import functools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


class _Row(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char * 32),
        ("device", ctypes.c_long),
        ("bytes", ctypes.c_long),
        ("stream", ctypes.c_void_p),
        ("place", ctypes.c_void_p),
    ]


@dataclass(frozen=True)
class Call:
    """A call of the runtime. device: as the process numbers them."""

    name: str
    device: int
    bytes: int
    stream: int | None
    place: int | None


@dataclass
class Calls:
    """The calls within a context, in order."""

    all: list[Call] = field(default_factory=list)

    def count(self, name: str) -> int:
        return sum(call.name.startswith(name) for call in self.all)

    def faults(self) -> list[str]:
        """Return what no GPU would have survived or computed."""
        return [call.name for call in self.all if call.name.startswith(("fault", "kernel"))]

    def bytes(self, name: str) -> int:
        return sum(call.bytes for call in self.all if call.name.startswith(name))

    def names(self) -> Counter[str]:
        return Counter(call.name for call in self.all)

    @property
    def waits(self) -> list[str]:
        """Calls in which the host waited for the GPU; a pageable copy to the host is one."""
        waiting = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize",
                   "copy to pageable", "cudaMemcpy")  # fmt: skip
        return [call.name for call in self.all if call.name in waiting]


def loaded() -> bool:
    """Return whether cuda.c is preloaded."""
    return hasattr(ctypes.CDLL(None), "dry_rows")


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    library.dry_rows.restype = ctypes.POINTER(_Row)
    for name in ("dry_row_count", "dry_used", "dry_pinned", "dry_held", "dry_peak"):
        getattr(library, name).restype = ctypes.c_long
    number, place = ctypes.c_int, ctypes.c_void_p
    library.dry_operator.argtypes = [number, place, place, ctypes.c_long, number]
    return library


@contextmanager
def calls() -> Iterator[Calls]:
    """Yield the calls of this context, which are complete at its end."""
    library, found = _library(), Calls()
    start = library.dry_row_count()
    yield found
    rows = library.dry_rows()
    for i in range(start, library.dry_row_count()):
        row = rows[i % (1 << 20)]
        found.all.append(Call(row.name.decode(), row.device, row.bytes, row.stream, row.place))


def used(device: int = 0) -> int:
    """Return the bytes that this process holds of a GPU, as the machine numbers GPUs."""
    return int(_library().dry_used(device))


def held(device: int = 0) -> int:
    """Return the bytes of a GPU that all processes hold that have this DRY_MEMORY."""
    return int(_library().dry_held(device))


def peak(device: int = 0) -> int:
    """Return the most that they held since the last call."""
    return int(_library().dry_peak(device))


def pinned() -> int:
    """Return the bytes of page-locked host memory."""
    return int(_library().dry_pinned())


def note(name: str) -> None:
    """Add a call."""
    _library().dry_note(name.encode())


def operator(device: torch.device, place: int, size: int, writes: bool) -> None:
    """Say that an operator on the current stream reads or writes memory now."""
    stream = torch.cuda.current_stream(device).cuda_stream
    _library().dry_operator(device.index, stream, place, size, writes)
