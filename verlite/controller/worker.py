"""The base class of every worker."""

import socket
from datetime import timedelta
from typing import TYPE_CHECKING

from verlite import progress
from verlite.breakpoints import NO_LIMIT_S
from verlite.controller.records import WorkerSpec

if TYPE_CHECKING:
    import torch


class Worker:
    """One rank of a role. Subclasses mark the methods that the driver may call with @register.

    The attributes are set before the subclass's __init__ runs.

    Attributes:
        role: name of the role.
        rank: index among the workers of the role.
        world_size: number of workers of the role.
        local_rank: index among the workers of the role on the same node.
    """

    role: str
    rank: int
    world_size: int
    local_rank: int

    def assign(
        self, spec: WorkerSpec, rendezvous: tuple[str, int], listener: socket.socket | None
    ) -> None:
        """Set the attributes. WorkerActor calls this before __init__.

        Args:
            rendezvous: address and port where the ranks of the role meet.
            listener: the socket that listens there, on rank 0.
        """
        self.role = spec.role
        self.rank = spec.rank
        self.world_size = spec.world_size
        self.local_rank = spec.local_rank
        self._spec = spec
        self._rendezvous = rendezvous
        self._listener = listener

    @property
    def device(self) -> "torch.device":
        """The worker's own device. A worker sees only its own GPUs, so it is cuda:0 or cpu."""
        import torch

        if self._spec.device_kind == "cpu":
            return torch.device("cpu")
        return torch.device("cuda", 0)

    @property
    def node_id(self) -> str:
        """Ray's id of the worker's node."""
        import ray

        node_id: str = ray.get_runtime_context().get_node_id()
        return node_id

    def init_distributed(self, timeout_s: float = 1800.0) -> None:
        """Create the torch.distributed process group of this role. All ranks must call it.

        The backend is gloo on CPU, and NCCL with gloo for host tensors on GPU. The ranks meet at a
        port that rank 0 has kept open since it started, on loopback if they share a node.

        Args:
            timeout_s: time limit of one collective, in seconds. In a run with a debugger the limit
                is NO_LIMIT_S: another rank may wait for the debugger.
        """
        import torch.distributed as dist

        if dist.is_initialized():
            return
        address, port = self._rendezvous
        timeout = timedelta(seconds=NO_LIMIT_S if self._spec.debugger else timeout_s)
        listening = None if self._listener is None else self._listener.detach()
        store = dist.TCPStore(
            address,
            port,
            self.world_size,
            is_master=listening is not None,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listening,
        )
        backend = "gloo" if self._spec.device_kind == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(
            backend, store=store, rank=self.rank, world_size=self.world_size, timeout=timeout
        )
        progress.here.in_group = self.world_size > 1

    def close(self) -> None:
        """Release what must not wait for the end of the process. Subclasses may extend it."""
        import sys

        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            distributed.destroy_process_group()
