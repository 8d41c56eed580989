"""What this machine can do at best: the rates that floors are computed from."""

import os
import platform
import time
from collections.abc import Callable

import torch


def machine() -> dict[str, object]:
    """Cores, peak rate of float32 matrix products in FLOP/s, and bytes a second of a copy in memory (read and written counted once)."""
    return {
        "cpu": _cpu_name(), "cores": len(os.sched_getaffinity(0)), "torch": torch.__version__,
        "gemm_flops": gemm_flops(), "copy_bytes_per_s": copy_rate(256 << 20),
    }  # fmt: skip


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


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()
