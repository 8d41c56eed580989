"""The fingerprint of a set of weights.

It proves that the engine generates with exactly the trainer's values. Both sides
compute it from their own tensors. It does not change if an engine fuses q, k and v into one matrix,
pads the vocabulary with zero rows, or shards a matrix over devices. It does not detect two values
that are exchanged; the measured log-prob gap between engine and trainer does.
"""

from collections.abc import Iterable

import torch
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
