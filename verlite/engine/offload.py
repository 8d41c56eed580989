"""Page-locked host memory: of tensors that leave the device between passes, and of micro-batches.

A GPU copies to and from it several times faster than other memory. That of tensors that leave is
allocated once, in one piece of the exact size, because locking pages is slow and torch's own
allocator of page-locked memory rounds sizes up to powers of two.
"""

import logging
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

log = logging.getLogger(__name__)

_ALIGNMENT = 64  # bytes between the starts of tensors


class HostMemory:
    """Holds copies of the same tensors each time they leave the device.

    Attributes:
        is_holding: the tensors are in host memory.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.is_holding = False
        self._places: dict[Any, Tensor] = {}

    def offload(self, tensors: Mapping[Any, Tensor]) -> dict[Any, Tensor]:
        """Return copies of the tensors in host memory, sharded like them. The names, shapes and
        dtypes must be the same in every call."""
        if not self._places:
            self._places = _places(tensors, self.device)
        for name, tensor in tensors.items():
            self._places[name].copy_(_local(tensor), non_blocking=True)
        _synchronize(self.device)
        self.is_holding = True
        return {name: _like(tensor, self._places[name]) for name, tensor in tensors.items()}

    def onload(self, tensors: Mapping[Any, Tensor]) -> dict[Any, Tensor]:
        """Return copies of offloaded tensors on the device."""
        copies = {}
        for name, tensor in tensors.items():
            local = torch.empty_like(_local(tensor), device=self.device)
            copies[name] = _like(tensor, local.copy_(_local(tensor), non_blocking=True))
        _synchronize(self.device)
        self.is_holding = False
        return copies


def to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return host tensors on a device. To a GPU they go in one copy from page-locked memory, for
    which the host does not wait."""
    if device.type != "cuda":
        return [tensor.to(device) for tensor in tensors]
    memory = torch.empty(_total(tensors), dtype=torch.uint8, pin_memory=True)
    for piece, tensor in zip(_pieces(memory, tensors), tensors, strict=True):
        piece.copy_(tensor)
    # .data: a write in place to one of them must not count as one to all of their shared memory.
    return [piece.data for piece in _pieces(memory.to(device, non_blocking=True), tensors)]


def has_own_memory(device: torch.device) -> bool:
    """Return True if the device's memory is not the host's."""
    return device.type != "cpu"


def _places(tensors: Mapping[Hashable, Tensor], device: torch.device) -> dict[Hashable, Tensor]:
    """Return a tensor in page-locked memory for the local part of each tensor."""
    local = [_local(tensor) for tensor in tensors.values()]
    memory = torch.empty(_total(local), dtype=torch.uint8)
    _lock_pages(memory, device)
    return dict(zip(tensors, _pieces(memory, local), strict=True))


def _pieces(memory: Tensor, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield a piece of the memory for each tensor, of its shape and dtype."""
    start = 0
    for tensor in tensors:
        piece = memory[start : start + tensor.nbytes]
        yield piece.view(tensor.dtype).view(tensor.shape)
        start += _aligned(tensor.nbytes)


def _total(tensors: Sequence[Tensor]) -> int:
    return sum(_aligned(tensor.nbytes) for tensor in tensors)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _lock_pages(memory: Tensor, device: torch.device) -> None:
    """Lock the memory's pages for copies to and from a GPU, as long as the process lives."""
    if device.type != "cuda" or not memory.nbytes:
        return
    try:
        runtime: Any = torch.cuda.cudart()
        torch.cuda.check_error(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    except (RuntimeError, AttributeError) as error:
        log.warning(
            "offload is slower than it could be: %.1f GiB of host memory cannot be page-locked "
            "(%s). Raise the limit of locked memory (ulimit -l)",
            memory.nbytes / 2**30,
            error,
        )


def _local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _like(tensor: Tensor, local: Tensor) -> Tensor:
    """Return `local` as this rank's part of a tensor that is sharded like `tensor`."""
    if not isinstance(tensor, DTensor):
        return local
    # DTensor.from_local would copy it to the device of the mesh.
    return DTensor(local, tensor._spec, requires_grad=False)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
