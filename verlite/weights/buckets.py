"""Buckets: a group of weights in the bytes of one safetensors file.

Every transport moves buckets. The format is public, so other tools can read a bucket on a disk:
https://github.com/huggingface/safetensors#format
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from safetensors import safe_open
from torch import Tensor

from verlite import progress
from verlite.weights import TransportError

Bucket = list[tuple[str, Tensor]]
"""(Hugging Face name, whole tensor) of a few weights."""

DTYPE_NAMES = {
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
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}

TRAINED = "trained:"
"""Begins the names of LoRA adapters as the trainer stores them. The role `inference` reads them and
nothing else; rollout engines skip them."""


def in_buckets(named: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[Bucket]:
    """Group weights into buckets of at most `bucket_bytes`, in order.

    A tensor larger than that gets its own bucket. At most one bucket of `named`'s tensors is kept.
    """
    bucket: Bucket = []
    size = 0
    for name, tensor in named:
        if bucket and size + tensor.nbytes > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor.detach()))
        size += tensor.nbytes
    if bucket:
        yield bucket


def header_of(bucket: Bucket) -> tuple[bytes, int]:
    """Return the bytes of a safetensors file before its tensors, and the bytes of the tensors."""
    entries: dict[str, dict[str, object]] = {}
    end = 0
    for name, tensor in bucket:
        begin, end = end, end + tensor.nbytes
        entries[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries).encode()
    text += b" " * (-(8 + len(text)) % 64)  # so that tensors start on a cache line
    return len(text).to_bytes(8, "little") + text, end


def flat_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes as a flat uint8 tensor. Copies only if it is not contiguous."""
    return tensor.reshape(-1).view(torch.uint8)


def fill(payload: Tensor, bucket: Bucket) -> None:
    """Copy the tensors of a bucket into `payload`, uint8 of header_of's size, on any device."""
    end = 0
    for _, tensor in bucket:
        begin, end = end, end + tensor.nbytes
        payload[begin:end].copy_(flat_bytes(tensor))


def views(header: bytes, payload: Tensor) -> Bucket:
    """Return the bucket whose tensors are views of `payload`, uint8 on any device."""
    entries = json.loads(header[8:])
    bucket: Bucket = []
    for name, entry in entries.items():
        begin, end = entry["data_offsets"]
        dtype = _DTYPES[entry["dtype"]]
        part = payload[begin:end]
        if part.storage_offset() % dtype.itemsize:  # a view needs alignment
            part = part.clone()
        bucket.append((name, part.view(dtype).reshape(entry["shape"])))
    return bucket


@dataclass(frozen=True)
class BucketFiles:
    """Weights in bucket files. Each iteration maps the files again and copies nothing.

    Any process of the machine can iterate over a pickled copy. The tensors stay readable after the
    files are removed.

    trained: iterate over the weights whose names begin with TRAINED, which is removed. False: over
        all others.
    """

    paths: tuple[str, ...]
    trained: bool = False

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for path in self.paths:
            try:
                opened = safe_open(path, framework="pt")
            except FileNotFoundError as error:
                raise TransportError(f"the process that wrote {path} is gone") from error
            with opened as file:
                for name in file.offset_keys():
                    if name.startswith(TRAINED) == self.trained:
                        progress.tick()
                        yield name.removeprefix(TRAINED), file.get_tensor(name)
