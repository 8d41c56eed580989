"""The base of every worker class."""

import socket
from datetime import timedelta
from typing import TYPE_CHECKING

from verlite.controller.host import WorkerSpec

if TYPE_CHECKING:
    import torch


class Worker:
    """A subclass gets its attributes before its own __init__ runs, and marks what the driver may call with @register.

    role, rank, world_size: its role and place in it. local_rank: its place among the role's workers on its node.
    device: torch.device of its own device; a worker sees only its own GPUs, so that is always cuda:0.
    """

    role: str
    rank: int
    world_size: int
    local_rank: int

    def assign(
        self, seat: WorkerSpec, rendezvous: tuple[str, int], listener: socket.socket | None
    ) -> None:
        """Called by the host before __init__."""
        self.role, self.rank, self.world_size, self.local_rank = (
            seat.role,
            seat.rank,
            seat.world_size,
            seat.local_rank,
        )
        self._seat, self._rendezvous, self._listener = seat, rendezvous, listener

    @property
    def device(self) -> "torch.device":
        import torch

        return torch.device("cpu") if self._seat.device_kind == "cpu" else torch.device("cuda", 0)

    @property
    def node_id(self) -> str:
        """Ray's id of the worker's node."""
        import ray

        return ray.get_runtime_context().get_node_id()

    def init_distributed(self, timeout_s: float = 1800.0) -> None:
        """Join the torch.distributed world of this role: gloo on CPU, NCCL (and gloo for host tensors) on GPU.

        All ranks must call it. They meet at a port that rank 0 has held open since it started, on the address Ray uses for its
        node, or on loopback when all ranks share a node. timeout_s: longest a collective may take.
        """
        import torch.distributed as dist

        if dist.is_initialized():
            return
        address, port = self._rendezvous
        timeout = timedelta(seconds=timeout_s)
        listening = None if self._listener is None else self._listener.detach()
        leads = listening is not None
        store = dist.TCPStore(
            address,
            port,
            self.world_size,
            leads,
            timeout,
            wait_for_workers=False,
            master_listen_fd=listening,
        )
        backend = "gloo" if self._seat.device_kind == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(
            backend, store=store, rank=self.rank, world_size=self.world_size, timeout=timeout
        )

    def close(self) -> None:
        """Release what must not wait for the end of the process. Subclasses that hold more extend it."""
        import sys

        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            distributed.destroy_process_group()
