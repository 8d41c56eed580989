"""Peak rates of this machine, from which lower bounds are computed."""

import time
from collections.abc import Callable

import torch


def gemm_flops(size: int = 2048) -> float:
    """Return the FLOP/s of all cores on square matrices."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    out = torch.empty(size, size)
    return 2 * size**3 / best(lambda: torch.mm(a, b, out=out), 10)


def copy_rate(size: int) -> float:
    """Return the bytes per second of one thread copying `size` bytes into allocated memory."""
    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return size / best(lambda: target.copy_(source), 5)
    finally:
        torch.set_num_threads(threads)


def best(call: Callable[[], object], times: int) -> float:
    """Return the minimum seconds of several calls, after a warm-up call."""
    call()
    return min(seconds(call) for _ in range(times))


def seconds(call: Callable[[], object]) -> float:
    """Return the seconds of one call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
