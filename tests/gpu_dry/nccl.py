"""NCCL of simulated GPUs: gloo moves and reduces the bytes in their memory.

torch.distributed's collectives are operators, which cpu_kernels.py gives to the group's gloo. Here
is what else NCCL does: it refuses two ranks on one GPU, and its backend can be called itself.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.gpu_dry.cpu_kernels import in_host


class Nccl(dist.ProcessGroupNCCL):
    """The backend of one group."""

    def __init__(self, store: dist.Store, rank: int, size: int, options: Any) -> None:
        store.set(f"GPU of {rank}", str(torch.cuda.get_device_properties(None).uuid))
        gpus = [store.get(f"GPU of {other}") for other in range(size)]
        if len(set(gpus)) < size:
            raise dist.DistBackendError(f"Duplicate GPU detected: {gpus}")
        super().__init__(store, rank, size, options)
        self._join = lambda: dist.ProcessGroupGloo(store, rank, size, options._timeout)
        self._gloo: Any = None

    def broadcast(self, tensors: list[Tensor], options: Any) -> Any:
        self._gloo = self._gloo or self._join()
        return self._gloo.broadcast([in_host(tensor) for tensor in tensors], options)

    def abort(self) -> None:
        if self._gloo:
            self._gloo.abort()
