"""Live bytes of fake tensors, in segments of a run."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

Place = tuple[str | int, ...]
"""Where in a run a segment is. Its last element is a layer's number where it belongs to one."""


@dataclass(frozen=True)
class Segment:
    """A part of a run between two marks.

    place: where it is.
    peak: most live bytes within it.
    live: live bytes at its end.
    """

    place: Place
    peak: int
    live: int


def _temporary_bytes(func: Any, args: tuple[Any, ...]) -> int:
    """Return the bytes that an operator allocates and frees inside its kernel."""
    if func is torch.ops.aten.logsumexp.default:
        return int(args[0].nbytes)  # exp(x - max)
    return 0


class Tracker(TorchDispatchMode):
    """Counts the storage of every fake tensor of `mode` that an operator returns, until it is
    freed."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mode = mode
        self.live = 0
        self.peak = 0
        self.segments: list[Segment] = []
        self._sizes: dict[int, int] = {}
        self._is_paused = False

    def mark(self, *place: str | int) -> None:
        """End a segment here; `place` names it."""
        self.segments.append(Segment(place, self.peak, self.live))
        self.peak = self.live

    def take_segments(self) -> list[Segment]:
        """Return the segments since the last call."""
        taken, self.segments = self.segments, []
        return taken

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing within the context."""
        before, self._is_paused = self._is_paused, True
        yield
        self._is_paused = before

    def note(self, value: object) -> None:
        """Count a tensor's storage."""
        if isinstance(value, DTensor):
            value = value._local_tensor
        if not isinstance(value, FakeTensor) or value.fake_device.type == "meta":
            return
        if value.fake_mode is not self.mode:
            return  # DTensor's own, with which it infers shapes of whole tensors
        storage = value.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = 0
            self._set(key, storage.nbytes())
            weakref.finalize(storage, self._free, key)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count the new size of a storage."""
        if storage._cdata in self._sizes:
            self._set(storage._cdata, storage.nbytes())

    def _set(self, key: int, size: int) -> None:
        self.live += size - self._sizes[key]
        self._sizes[key] = size
        self.peak = max(self.peak, self.live)

    def _free(self, key: int) -> None:
        self.live -= self._sizes.pop(key)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor first splits it into operators on local tensors
        result = func(*args, **(kwargs or {}))
        if self._is_paused:
            return result
        for value in tree_iter(result):
            if isinstance(value, Tensor):
                self.note(value)
        self.peak = max(self.peak, self.live + _temporary_bytes(func, args))
        return result


@contextmanager
def resizes_noted(tracker: Tracker) -> Iterator[None]:
    """Tell the tracker when FSDP frees or reallocates a storage. No operator runs then."""
    resize: Callable[..., Any] = torch.UntypedStorage.resize_

    def noted(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        tracker.resized(storage)
        return result

    torch.UntypedStorage.resize_ = noted  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
