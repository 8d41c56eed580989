"""Page-locked host memory."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from verlite.engine import offload


@pytest.mark.parametrize("result", [0, 2])
def test_pages_are_locked_or_a_warning_says_why_not(
    result: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A limit of locked memory makes offload slow, but does not end the run."""
    calls = []

    def register(address: int, size: int, flags: int) -> int:
        calls.append((address, size, flags))
        return result

    def check(code: int) -> None:
        if code:
            raise RuntimeError("CUDA error: out of memory")

    runtime: Any = SimpleNamespace(cudaHostRegister=register)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", check)
    memory = torch.empty(100, dtype=torch.uint8)
    with caplog.at_level(logging.WARNING):
        offload._lock_pages(memory, torch.device("cuda", 0))
    assert calls == [(memory.data_ptr(), 100, 0)]
    assert ("out of memory" in caplog.text and "ulimit -l" in caplog.text) == bool(result)


def test_memory_is_exact_and_places_do_not_overlap() -> None:
    tensors = {"a": torch.arange(3.0), "b": torch.zeros(0), "c": torch.ones(2, 5).bfloat16()}
    host = offload.HostMemory(torch.device("cpu"))
    away = host.offload(tensors)
    assert host.is_holding and all(torch.equal(away[name], t) for name, t in tensors.items())
    assert away["a"].untyped_storage().nbytes() == 64 + 0 + 64
    again = host.offload({name: tensor + 1 for name, tensor in host.onload(away).items()})
    assert all(torch.equal(again[name], t + 1) for name, t in tensors.items())
    assert again["c"].data_ptr() == away["c"].data_ptr()


def test_a_shard_of_a_mesh_on_other_devices_stays_in_host_memory() -> None:
    """On GPUs copies of shards went back to the mesh's devices, and offload freed nothing."""
    mesh = DeviceMesh("meta", [0], _init_backend=False, _rank=0)
    meta = TensorMeta(torch.Size([6, 2]), (2, 1), torch.float32)
    spec = DTensorSpec(mesh, (Shard(0),), meta)
    shard = DTensor(torch.arange(12.0).view(6, 2), spec, requires_grad=False)
    host = offload.HostMemory(torch.device("cpu"))
    away = host.offload({"a": shard})["a"]
    assert isinstance(away, DTensor) and away.placements == (Shard(0),) and away.shape == (6, 2)
    assert torch.equal(away.to_local(), shard.to_local())
    assert away.to_local().data_ptr() == host._places["a"].data_ptr()


class _PageLocked(torch.Tensor):
    """Host memory that goes to a stand-in of a GPU, in one copy."""

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        assert kwargs == {"non_blocking": True}
        return self.as_subclass(torch.Tensor).clone()


def test_a_write_to_a_row_of_one_copy_does_not_count_as_one_to_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows share memory on a GPU. A loss may write into one and keep another for its gradient."""
    empty = torch.empty

    def locked(size: int, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        return empty(size, dtype=dtype).as_subclass(_PageLocked)

    monkeypatch.setattr(torch, "empty", locked)
    sent = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([[4, 5]])]
    device: Any = SimpleNamespace(type="cuda")
    kept, written = offload.to_device(sent, device)
    monkeypatch.undo()
    assert kept.untyped_storage().data_ptr() == written.untyped_storage().data_ptr()
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * kept).sum()
    written.add_(1)
    loss.backward()
    assert weight.grad is not None and weight.grad.tolist() == [1.0, 2.0, 3.0]
    assert written.tolist() == [[5, 6]] and sent[1].tolist() == [[4, 5]]
