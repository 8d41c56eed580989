"""Safetensors files written one tensor at a time."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from verlite.engine import checkpoint, export
from verlite.engine.tensor_file import TensorFile

MIB = 1 << 20


def test_safetensors_reads_every_dtype_and_shape(tmp_path: Path) -> None:
    dtypes = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool)
    tensors = {str(dtype): torch.arange(6).reshape(2, 3).to(dtype) for dtype in dtypes}
    tensors |= {
        "scalar": torch.tensor(1.5),
        "empty": torch.zeros(0, 4),
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
        "größe": torch.ones(1),
    }
    with TensorFile(tmp_path / "a.safetensors", 1 << 12, {"format": "pt"}) as file:
        for name, tensor in tensors.items():
            file.add(name, tensor)
    loaded = load_file(tmp_path / "a.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name], tensor), name


def test_a_full_header_and_an_unfinished_file(tmp_path: Path) -> None:
    tensor = torch.ones(2)
    with (
        pytest.raises(ValueError, match="no space for name-1[0-9] after 1[0-9] tensors"),
        TensorFile(tmp_path / "a.safetensors", 1000, {"format": "pt"}) as file,
    ):
        for i in range(100):
            file.add(f"name-{i}", tensor)
    with pytest.raises(SafetensorError):
        load_file(tmp_path / "a.safetensors")


def peak_rise(call: Callable[[], object]) -> int:
    """Return by how many bytes the process's resident memory rises at most during the call."""
    status = Path("/proc/self/status")

    def read(field: str) -> int:
        line = next(line for line in status.read_text().splitlines() if line.startswith(field))
        return int(line.split()[1]) << 10

    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = read("VmRSS")
    call()
    return read("VmHWM") - before


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="Linux only")
def test_checkpoint_and_export_hold_one_tensor_in_memory(tmp_path: Path) -> None:
    """128 MiB of weights in 16 tensors. torch's writer and save_file would copy all of them."""
    model = nn.ModuleList(nn.Linear(1024, 2048, bias=False) for _ in range(16))
    rise = peak_rise(lambda: checkpoint.save(tmp_path / "checkpoint", model, None, {}))
    assert rise < 40 * MIB
    writer = export._ShardWriter(tmp_path)

    def write() -> None:
        for name, parameter in model.named_parameters():
            writer.add(name, parameter.detach() * 1)
        writer.finish()

    assert peak_rise(write) < 40 * MIB
    saved = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(saved[name], p) for name, p in model.named_parameters())
