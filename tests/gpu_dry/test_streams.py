"""What cuda.c does about programs that forget to wait: toys, each with its right twin."""

import ctypes
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.gpu_dry import gpu

GPU = torch.device("cuda", 0)
N = 1 << 18  # float32: 1 MiB
RACE = ["fault: streams race"]


def sevens() -> tuple[Tensor, Tensor]:
    """Return sevens on the GPU, and page-locked zeros."""
    made = torch.full((N,), 7.0, device=GPU), torch.zeros(N, pin_memory=True)
    torch.cuda.synchronize()
    return made


@pytest.mark.parametrize("between", [lambda x: None, lambda x: x.add_(1)])
def test_the_host_sees_a_copy_after_its_event(between: Callable[[Tensor], object]) -> None:
    """Nor does an operator in the same stream bring it."""
    x, host = sevens()
    copied = torch.cuda.Event()
    host.copy_(x, non_blocking=True)
    copied.record()
    between(x)
    assert host.sum() == 0
    copied.synchronize()
    assert host.sum() == 7 * N


def test_a_query_says_no_for_a_while() -> None:
    x, host = sevens()
    copied = torch.cuda.Event()
    copied.record()
    assert copied.query()
    host.copy_(x, non_blocking=True)
    copied.record()
    answers = [copied.query() for _ in range(20)]
    assert answers == [False] * 8 + [True] * 12 and host.sum() == 7 * N
    host.copy_(x, non_blocking=True)
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    assert torch.cuda.current_stream().query()


def test_an_old_event_says_nothing_of_new_work() -> None:
    x, host = sevens()
    old = torch.cuda.Event()
    host.copy_(x, non_blocking=True)
    old.record()
    torch.cuda.synchronize()
    host.zero_()
    host.copy_(x, non_blocking=True)
    old.synchronize()
    assert host.sum() == 0
    torch.cuda.synchronize()


@pytest.mark.parametrize("waits", [True, pytest.param(False, marks=pytest.mark.faults(*RACE))])
def test_a_stream_waits_for_what_it_reads(waits: bool) -> None:
    x, host = sevens()
    side = torch.cuda.Stream()
    x.mul_(2)
    if waits:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        host.copy_(x, non_blocking=True)
    side.synchronize()


@pytest.mark.parametrize("waits", [True, pytest.param(False, marks=pytest.mark.faults(*RACE))])
def test_an_operator_waits_for_what_another_stream_brings(waits: bool) -> None:
    x, host = sevens()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x.copy_(host, non_blocking=True)
    if waits:
        torch.cuda.current_stream().wait_stream(side)
    y = x + 1
    torch.cuda.synchronize()
    assert y.sum() == (N if waits else 8 * N)


@pytest.mark.parametrize("recorded", [True, pytest.param(False, marks=pytest.mark.faults(*RACE))])
def test_memory_returns_to_the_allocator_when_every_stream_has_read_it(recorded: bool) -> None:
    x, host = sevens()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        host.copy_(x, non_blocking=True)
    if recorded:
        x.record_stream(side)
    place = x.data_ptr()
    del x
    y = torch.full((N,), 9.0, device=GPU)
    assert (y.data_ptr() == place) != recorded
    side.synchronize()


@pytest.mark.parametrize(
    "waits",
    [True, pytest.param(False, marks=pytest.mark.faults("fault: source of a copy changed"))],
)
def test_the_source_of_a_copy_rests_until_it_is_over(waits: bool) -> None:
    x, host = sevens()
    x.copy_(host, non_blocking=True)
    if waits:
        torch.cuda.synchronize()
    host.fill_(3)
    torch.cuda.synchronize()
    assert x.sum() == (0 if waits else 3 * N)


@pytest.mark.parametrize(
    "waits", [True, pytest.param(False, marks=pytest.mark.faults("fault: unlocked while copied"))]
)
def test_pages_stay_locked_until_the_copy_is_over(waits: bool) -> None:
    x, host = sevens()[0], torch.zeros(N)
    runtime = torch.cuda.cudart()
    runtime.cudaHostRegister(host.data_ptr(), host.nbytes, 0)
    host.copy_(x, non_blocking=True)
    if waits:
        torch.cuda.synchronize()
    runtime.cudaHostUnregister(host.data_ptr())
    assert host.sum() == 7 * N


@pytest.mark.parametrize("waits", [True, pytest.param(False, marks=pytest.mark.faults(*RACE))])
def test_a_copy_that_the_host_waits_for_waits_for_its_own_stream(waits: bool) -> None:
    x, pinned = sevens()
    side, host = torch.cuda.Stream(), torch.zeros(N)
    with torch.cuda.stream(side):
        x.mul_(2)
        if waits:
            torch.cuda.default_stream().wait_stream(side)
        pinned.copy_(x, non_blocking=True)
    copy = ctypes.CDLL(None).cudaMemcpy
    copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    copy(host.data_ptr(), x.data_ptr(), x.nbytes, 2)
    assert host.sum() == 14 * N and pinned.sum() == 0
    side.synchronize()


def test_copies_of_other_memory_are_over_when_the_call_returns() -> None:
    x, _ = sevens()
    host = torch.zeros(N)
    host.copy_(x, non_blocking=True)
    assert host.sum() == 7 * N
    with gpu.calls() as seen:
        x.copy_(host.fill_(3), non_blocking=True)
        host.fill_(4)
    assert seen.count("copy from pageable") == 1 and not seen.waits
    assert (x + 0).sum() == 3 * N
