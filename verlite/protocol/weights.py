"""Weights between the trainer and a generation engine: a fingerprint, and files in shared memory.

The fingerprint proves that the engine generates with exactly the trainer's values. Both sides
compute it from their own tensors. It does not change if an engine fuses q, k and v into one matrix,
pads the vocabulary with zero rows, or shards a matrix over devices. It does not detect two values
that are exchanged; the measured log-prob gap between engine and trainer does.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

import torch
from safetensors import safe_open
from torch import Tensor

MODULUS = 1 << 32

# Elements hashed at a time. The int32 scratch stays in a core's cache, which is many times faster
# than hashing whole tensors. On a CPU it is at most what torch does in one thread: distributing so
# little work costs more than the work, on a busy machine 20 times more.
_CPU_CHUNK = 1 << 15
_CUDA_CHUNK = 1 << 24

# Odd 32-bit multipliers as signed integers: golden ratio, and Appleby's MurmurHash3 finalizer.
# int32 arithmetic wraps.
_MIX_1 = 0x9E3779B1 - (1 << 32)
_MIX_2 = 0x85EBCA6B - (1 << 32)

_INT_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}

# Names of the safetensors format: https://github.com/huggingface/safetensors#format
_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def tensor_fingerprint(tensor: Tensor, dtype: torch.dtype | None = None) -> int:
    """Return the sum, modulo 2^32, of a hash of each element's bits.

    Zeros of either sign add 0, so padding does not change the sum. The hash is not linear in the
    bits: +1 in one element and -1 in another do not cancel. Any change goes undetected with a
    probability of about 2^-32. The cost is little more than that of copying the tensor.

    Args:
        tensor: Any shape. An empty tensor gives 0.
        dtype: Floating-point numbers are cast to it first; None does not cast.
    """
    if tensor.ndim == 2 and tensor.t().is_contiguous():
        tensor = tensor.t()  # the order of elements does not matter, and this needs no copy
    flat = tensor.detach().reshape(-1)
    if dtype is None or not flat.is_floating_point():
        dtype = flat.dtype
    size = min(flat.numel(), _CUDA_CHUNK if flat.is_cuda else _CPU_CHUNK)
    if size == 0:
        return 0
    values = torch.empty(size, dtype=dtype, device=flat.device)
    shifted = torch.empty(size * max(dtype.itemsize // 4, 1), dtype=torch.int32, device=flat.device)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for chunk in flat.split(size):
        value = values[: chunk.numel()].copy_(chunk)
        if dtype.is_floating_point and dtype.itemsize > 1:
            # -0.0 + 0 = +0.0, whose bits are all zero. After the cast, which can round to -0.0.
            value.add_(0)
        bits = value.view(_INT_OF_SIZE[dtype.itemsize]).to(torch.int32)
        bits.mul_(_MIX_1)
        bits.bitwise_xor_(torch.bitwise_right_shift(bits, 15, out=shifted[: bits.numel()]))
        bits.mul_(_MIX_2)
        total += bits.sum(dtype=torch.int32)
    return int(total) % MODULUS


def combine(*fingerprints: int) -> int:
    """Return the fingerprint of disjoint parts: tensors, shards of one tensor, or models."""
    return sum(fingerprints) % MODULUS


def fingerprints(
    named: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None
) -> dict[str, int]:
    """Return `tensor_fingerprint` of each tensor by name, to find the weight that differs."""
    return {name: tensor_fingerprint(tensor, dtype) for name, tensor in named}


def fingerprint(named: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None) -> int:
    """Return the fingerprint of a set of weights.

    It does not depend on their order, names, fusion, sharding and zero padding. `combine` of the
    ranks' fingerprints is the model's. Tied weights must be named once.

    dtype: of the engine. A float32 master copy and a bfloat16 engine agree under bfloat16.
    """
    return combine(*(tensor_fingerprint(tensor, dtype) for _, tensor in named))


@dataclass
class Buckets:
    """Weights that other processes of this machine read by path, until `close`.

    On Linux they are in anonymous memory files, which end with this process and do not depend on
    the size of /dev/shm. On other systems they are in a private temporary folder.
    """

    paths: list[str] = field(default_factory=list)
    bytes: int = 0
    _files: list[BinaryIO] = field(default_factory=list)
    _folder: str | None = None

    def add(self, named: list[tuple[str, Tensor]]) -> None:
        """Add a file with these tensors."""
        name = f"verlite-bucket-{len(self.paths):05d}"
        if hasattr(os, "memfd_create"):
            file: BinaryIO = open(os.memfd_create(name), "wb", buffering=0)
            path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
        else:
            self._folder = self._folder or tempfile.mkdtemp(prefix="verlite-")
            path = os.path.join(self._folder, name)
            file = open(path, "wb", buffering=0)
        self._files.append(file)
        self.paths.append(path)
        self.bytes += _write_safetensors(named, file)

    def close(self) -> None:
        """Close the files. Their memory is freed when readers have dropped their tensors too."""
        for file in self._files:
            file.close()
        self._files.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def write_buckets(named: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Buckets:
    """Write weights to safetensors files of about `bucket_bytes` each, which `read_buckets` maps.

    It copies memory once, and keeps at most one bucket of `named`'s tensors. A tensor larger than a
    bucket gets its own file. If this raises, no file remains.
    """
    buckets = Buckets()
    pending: list[tuple[str, Tensor]] = []
    pending_bytes = 0
    try:
        for name, tensor in named:
            if pending and pending_bytes + tensor.nbytes > bucket_bytes:
                buckets.add(pending)
                pending, pending_bytes = [], 0
            pending.append((name, tensor.detach().cpu()))
            pending_bytes += tensor.nbytes
        if pending:
            buckets.add(pending)
    except BaseException:
        buckets.close()
        raise
    return buckets


def _write_safetensors(named: list[tuple[str, Tensor]], file: BinaryIO) -> int:
    # safetensors' own writer copies every tensor into Python bytes first.
    header: dict[str, dict[str, object]] = {}
    end = 0
    for name, tensor in named:
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 64)  # so that tensors start on a cache line
    file.write(len(text).to_bytes(8, "little") + text)
    for _, tensor in named:
        data = tensor.reshape(-1).view(torch.uint8).numpy().data
        while data:
            data = data[file.write(data) :]
    return 8 + len(text) + end


def read_buckets(paths: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of `write_buckets`, mapped from the files and not copied.

    They stay readable after `Buckets.close`.
    """
    for path in paths:
        with safe_open(path, framework="pt") as file:
            for name in file.offset_keys():
                yield name, file.get_tensor(name)
