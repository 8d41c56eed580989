"""Safetensors files written one tensor at a time."""

import ctypes
import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from verlite.engine import checkpoint, export
from verlite.engine.checkpoint import TensorFile

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


class _Mallinfo(ctypes.Structure):
    """struct mallinfo2 of glibc."""

    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
        "fordblks", "keepcost",
    )]  # fmt: skip


def bytes_in_use() -> int:
    """Return the bytes that this process has allocated and not freed.

    Unlike resident memory they do not depend on what else runs on the machine.
    """
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Mallinfo
    found = mallinfo()
    return found.uordblks + found.hblkhd


def peak_rise(call: Callable[[], object]) -> int:
    """Return by how much `bytes_in_use` rises during the call, looked at whenever a function begins
    or ends."""
    before = peak = bytes_in_use()

    def look(*event: object) -> None:
        nonlocal peak
        peak = max(peak, bytes_in_use())

    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
    return peak - before


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33 or newer")
@pytest.mark.slow
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
    assert peak_rise(lambda: torch.save(model.state_dict(), io.BytesIO())) > 100 * MIB
    saved = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(saved[name], p) for name, p in model.named_parameters())
