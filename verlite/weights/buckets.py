"""Buckets: weights as safetensors files in shared memory, which other processes map by path."""

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
