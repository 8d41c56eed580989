"""A torch.distributed process group for a training engine outside of Ray."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def single_process_group() -> Iterator[None]:
    """Initialize torch.distributed with this process as the only rank; destroy it at the end."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
