"""A torch.distributed process group for a training engine outside of Ray."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


@contextmanager
def process_group(device: str) -> Iterator[None]:
    """Initialize torch.distributed for torchrun's processes, or for this process alone."""
    if "WORLD_SIZE" not in os.environ:
        with single_process_group(device):
            yield
        return
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(_backend(device))
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def single_process_group(device: str = "cpu") -> Iterator[None]:
    """Initialize torch.distributed with this process as the only rank; destroy it at the end.

    Args:
        device: "cuda" if tensors on a GPU take part in collectives.
    """
    dist.init_process_group(_backend(device), store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _backend(device: str) -> str:
    """Return NCCL for tensors on GPUs, and gloo for those in host memory."""
    return "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
