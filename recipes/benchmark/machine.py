"""What this machine can do at best: the rates that floors are computed from."""

import time
from collections.abc import Callable

import torch


def gemm_flops(size: int = 2048) -> float:
    """Of all cores, on square matrices."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    out = torch.empty(size, size)
    return 2 * size**3 / best(lambda: torch.mm(a, b, out=out), 10)


def copy_rate(size: int) -> float:
    """Of one thread copying `size` bytes to memory that is there already."""
    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return size / best(lambda: target.copy_(source), 5)
    finally:
        torch.set_num_threads(threads)


def best(call: Callable[[], object], times: int) -> float:
    """Least seconds of several calls, after one that does not count."""
    call()
    return min(seconds(call) for _ in range(times))


def seconds(call: Callable[[], object]) -> float:
    """Of one call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
