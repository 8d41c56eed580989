"""Weights from a trainer's GPU to an engine: bytes, order and what is left."""

import ctypes
import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.gpu_dry import gpu
from verlite.weights import TransportError, ipc
from verlite.weights.buckets import BucketFiles
from verlite.weights.ipc import Publisher, SharedBuffer, publish_trial
from verlite.weights.shared_memory import MemoryFiles
from verlite.weights.transport import publish

BUCKET = 12 << 20
GPU = torch.device("cuda", 0)
READER = """
import json, sys
from tests.gpu_dry import cpu_kernels, gpu
cpu_kernels.install()
from verlite.weights.ipc import BucketStream
with gpu.calls() as seen:
    weights = dict(BucketStream(("\\0" + sys.argv[1],), timeout_s=600))
    sums = {name: tensor.double().sum().item() for name, tensor in weights.items()}
calls = [call.name for call in seen.all if "Ipc" in call.name or "fault" in call.name]
print(json.dumps({"sums": sums, "calls": calls}))
"""


def named(count: int = 5, size: int = 3 << 20) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(size, generator=generator) for _ in range(count)]
    return [(f"w{i}", x.to(GPU)) for i, x in enumerate(values)]


def test_shared_memory_waits_for_each_copy() -> None:
    """A copy to pinned memory has not happened before its event."""
    weights, files = named(), MemoryFiles()
    with gpu.calls() as seen:
        publish(iter(weights), [files], BUCKET)
    found = dict(BucketFiles(tuple(files.paths)))
    for name, tensor in weights:
        torch.testing.assert_close(found[name], tensor.cpu(), rtol=0, atol=0)
    files.close()
    sent = sum(tensor.nbytes for _, tensor in weights)
    assert seen.bytes("copy to pinned") == sent and seen.count("copy to pageable") == 0


@pytest.mark.parametrize("settings", ["", "max_split_size_mb:64"])
def test_ipc(settings: str) -> None:
    """Two buffers are opened once, closed before they are freed, and nothing is left."""
    configure = torch._C._accelerator_setAllocatorSettings
    configure(",".join(filter(None, [settings, "expandable_segments:True"])))
    before = torch._C._accelerator_getAllocatorSettings()
    weights, publisher = named(), Publisher(GPU, timeout_s=600)
    sums = {name: tensor.double().sum().item() for name, tensor in weights}
    torch.cuda.empty_cache()
    held = gpu.used()
    reader = subprocess.Popen(
        [sys.executable, "-c", READER, publisher.address[1:]], stdout=subprocess.PIPE, text=True
    )
    with gpu.calls() as seen:
        publish(iter(weights), [publisher], BUCKET)
    out, _ = reader.communicate()
    publisher.close()
    read = json.loads(out.splitlines()[-1])
    assert read["sums"] == sums
    opened = [call for call in read["calls"] if "Ipc" in call and "Event" not in call]
    opens = opened.count("cudaIpcOpenMemHandle")  # two buffers may share a segment
    assert opens in (1, 2)
    assert opened == ["cudaIpcOpenMemHandle"] * opens + ["cudaIpcCloseMemHandle"] * opens
    assert seen.count("cudaIpcGetMemHandle") >= opens
    assert gpu.used() == held and torch._C._accelerator_getAllocatorSettings() == before
    configure("expandable_segments:False")


TRIED = """
import sys
from tests.gpu_dry import cpu_kernels
cpu_kernels.install()
from verlite.weights.ipc import BucketStream, read_trial
print(read_trial(BucketStream(("\\0" + sys.argv[1],), timeout_s=30)))
"""


@pytest.mark.parametrize("refused", ["", "driver", "allocator"])
def test_a_trial_says_why_memory_cannot_be_shared(refused: str, monkeypatch: Any) -> None:
    """Neither side fails, and nothing is left that could be opened."""
    if refused == "allocator":
        monkeypatch.setattr(ipc, "SharedBuffer", lambda *_: torch.empty(1 << 45, device=GPU))
    publisher = Publisher(GPU, timeout_s=30)
    env = os.environ | {"DRY_IPC": "0" if refused == "driver" else "1"}
    command = [sys.executable, "-c", TRIED, publisher.address[1:]]
    reader = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    published = publish_trial(publisher)
    read = reader.communicate(timeout=60)[0].splitlines()[-1]
    expected = {
        "": ("", ""),
        "driver": ("TransportError: the other side of a weight sync is", "AcceleratorError: CUDA"),
        "allocator": ("OutOfMemoryError: ", "TransportError: the trainer could not send"),
    }[refused]
    for found, begin in zip((published, read), expected, strict=True):
        assert found.startswith(begin) and bool(found) == bool(begin), (published, read)


def test_memory_that_another_stream_reads_is_not_unmapped() -> None:
    """A freed expandable segment is unmapped when its own stream is done. FSDP reads its gradients
    on another one."""
    torch.cuda.empty_cache()  # whose segments are plain
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    gradient = torch.full((12 << 20,), 7, dtype=torch.uint8, device=GPU)
    on_host = torch.empty_like(gradient, device="cpu", pin_memory=True)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        on_host.copy_(gradient, non_blocking=True)
    del gradient
    with gpu.calls() as seen:
        SharedBuffer(1 << 20, GPU).close()
    assert seen.count("cuMemUnmap") and not seen.faults() and on_host.unique().tolist() == [7]
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


def test_an_engine_on_another_gpu_is_refused() -> None:
    """As one that was restarted there would be."""
    publisher = Publisher(GPU, timeout_s=600)
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "1"}
    reader = subprocess.Popen(
        [sys.executable, "-c", READER, publisher.address[1:]],
        env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with pytest.raises(TransportError):
        publish(iter(named()), [publisher], BUCKET)
    _, stderr = reader.communicate()
    publisher.close()
    assert "the engine runs on GPU" in stderr and reader.returncode == 1


class Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * 64)]


HOLDER = """
import ctypes, sys
from tests.gpu_dry.test_weights import Handle
place, handle = ctypes.c_void_p(), Handle.from_buffer_copy(bytes.fromhex(sys.argv[1]))
print(ctypes.CDLL(None).cudaIpcOpenMemHandle(ctypes.byref(place), handle, 1), flush=True)
input()
"""


@pytest.mark.parametrize(
    "killed", [True, pytest.param(False, marks=pytest.mark.faults("fault: freed while open"))]
)
def test_the_dry_runtime_sees_shared_memory_freed_early(killed: bool) -> None:
    """A process that was killed has nothing open."""
    runtime, place, handle = ctypes.CDLL(None), ctypes.c_void_p(), Handle()
    assert not runtime.cudaMalloc(ctypes.byref(place), 4096)
    assert not runtime.cudaIpcGetMemHandle(ctypes.byref(handle), place)
    command = [sys.executable, "-c", HOLDER, bytes(handle.bytes).hex()]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout and holder.stdout.readline() == "0\n"
    if killed:
        holder.kill()
        holder.wait()
    runtime.cudaFree(place)
    holder.communicate(None if killed else "\n")
    done = subprocess.run(command, input="\n", capture_output=True, text=True)
    assert done.stdout == "1\n"  # cudaErrorInvalidValue: opened after free
