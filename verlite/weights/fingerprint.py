"""The fingerprint of a set of weights.

It proves that the engine generates with exactly the trainer's values. Both sides
compute it from their own tensors. It does not change if an engine fuses q, k and v into one matrix,
pads the vocabulary with zero rows, or shards a matrix over devices. It does not detect two values
that are exchanged; the measured log-prob gap between engine and trainer does.
"""

import ctypes
import functools
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

MODULUS = 1 << 32

# Elements hashed at a time by torch. The int32 scratch stays in a core's cache, which is many times
# faster than hashing whole tensors. On a CPU it is at most what torch does in one thread:
# distributing so little work costs more than the work, on a busy machine 20 times more.
_CPU_CHUNK = 1 << 15
CUDA_CHUNK = 1 << 24

# CPU tensors of at least this many elements are hashed in C, which is compiled at the first.
_NATIVE_ELEMENTS = 1 << 16

# Odd 32-bit multipliers as signed integers: golden ratio, and one of Wellons' lowbias32. int32
# arithmetic wraps. The shifts carry the sign and the exponent into the low bits, so that a change
# of only those adds to the sum what is different for almost every element. The C loop has the same
# numbers.
_MIX_1 = 0x9E3779B1 - (1 << 32)
_MIX_2 = 0x7FEB352D
_SHIFT_1 = 16
_SHIFT_2 = 13

_INT_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def tensor_fingerprint(tensor: Tensor, dtype: torch.dtype | None = None) -> int:
    """Return the sum, modulo 2^32, of a hash of each element's bits.

    Zeros of either sign add 0, so padding does not change the sum. The hash is not linear in the
    bits: +1 in one element and -1 in another do not cancel. A change of values goes undetected with
    a probability of about 2^-30. The cost on a CPU is that of reading the tensor once if a C
    compiler is installed, and several times that if not.

    Args:
        tensor: Any shape. An empty tensor gives 0.
        dtype: Floating-point numbers are cast to it first; None does not cast.
    """
    return combine(sum_of_hashes(tensor, dtype))


def sum_of_hashes(tensor: Tensor, dtype: torch.dtype | None = None) -> int | Tensor:
    """Return `tensor_fingerprint` before the modulus. A GPU's may still be computed; see
    `settle`."""
    if tensor.ndim == 2 and tensor.t().is_contiguous():
        tensor = tensor.t()  # the order of elements does not matter, and this needs no copy
    flat = tensor.detach().reshape(-1)
    if dtype is None or not flat.is_floating_point():
        dtype = flat.dtype
    if flat.numel() == 0:
        return 0
    if flat.device.type == "cpu" and flat.numel() >= _NATIVE_ELEMENTS:
        compiled = kernel(dtype)
        if compiled is not None and flat.data_ptr() % flat.itemsize == 0:
            parts = [flat] if flat.dtype == dtype else _cast(flat, dtype)
            return combine(*(compiled(part.data_ptr(), part.numel()) for part in parts))
    return _sum_in_torch(flat, dtype)


def _cast(flat: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield chunks of `flat` in `dtype`, each valid until the next."""
    size = min(flat.numel(), CUDA_CHUNK if flat.is_cuda else _CPU_CHUNK)
    values = torch.empty(size, dtype=dtype, device=flat.device)
    for chunk in flat.split(size):
        yield values[: chunk.numel()].copy_(chunk)


def _sum_in_torch(flat: Tensor, dtype: torch.dtype) -> Tensor:
    shifted: Tensor | None = None
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for value in _cast(flat, dtype):
        if dtype.is_floating_point and dtype.itemsize > 1:
            # -0.0 + 0 = +0.0, whose bits are all zero. After the cast, which can round to -0.0.
            value.add_(0)
        bits = value.view(_INT_OF_SIZE[dtype.itemsize]).to(torch.int32)
        shifted = torch.empty_like(bits) if shifted is None else shifted[: bits.numel()]
        bits.mul_(_MIX_1)
        bits.bitwise_xor_(torch.bitwise_right_shift(bits, _SHIFT_1, out=shifted))
        bits.addcmul_(bits, torch.bitwise_right_shift(bits, _SHIFT_2, out=shifted), value=_MIX_2)
        total += bits.sum(dtype=torch.int32)
    return total


def combine(*fingerprints: int | Tensor) -> int:
    """Return the fingerprint of disjoint parts: tensors, shards of one tensor, or models."""
    return int(sum(fingerprints)) % MODULUS


def settle(hashes: dict[str, int | Tensor]) -> dict[str, int]:
    """Return the fingerprint of each tensor from its `sum_of_hashes`. On a GPU it waits once, for
    all tensors."""
    waiting = {name: value for name, value in hashes.items() if isinstance(value, Tensor)}
    if waiting:
        device = next((v.device for v in waiting.values() if v.is_cuda), torch.device("cpu"))
        values = torch.stack([value.to(device) for value in waiting.values()]).tolist()
        hashes = hashes | dict(zip(waiting, values, strict=True))
    return {name: combine(value) for name, value in hashes.items()}


def fingerprint(named: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None) -> int:
    """Return the fingerprint of a set of weights.

    It does not depend on their order, names, fusion, sharding and zero padding. `combine` of the
    ranks' fingerprints is the model's. Tied weights must be named once.

    On a GPU it waits once, for all tensors.

    dtype: of the engine. A float32 master copy and a bfloat16 engine agree under bfloat16.
    """
    return combine(*(sum_of_hashes(tensor, dtype) for _, tensor in named))


# CPU tensors: one loop in C, compiled in a process that needs it.
#
# It reads memory once, where torch needs seven passes. It gives the same value. A machine without a
# C compiler uses torch.

_SOURCE = """
#include <stddef.h>
#include <stdint.h>
#define SUM_OF(type, minus_zero)                                         \\
    uint32_t sum_of_##type(const type *values, size_t count) {           \\
        uint32_t total = 0;                                              \\
        for (size_t i = 0; i < count; i++) {                             \\
            int32_t bits = values[i] == minus_zero ? 0 : values[i];      \\
            int32_t hash = (int32_t)((uint32_t)bits * 0x9E3779B1u);      \\
            hash ^= hash >> 16;                                          \\
            total += (uint32_t)hash * (1u + 0x7FEB352Du * (uint32_t)(hash >> 13)); \\
        }                                                                \\
        return total;                                                    \\
    }
SUM_OF(int16_t, INT16_MIN)
SUM_OF(int32_t, INT32_MIN)
"""
_TYPES = {torch.float32: "int32_t", torch.bfloat16: "int16_t", torch.float16: "int16_t"}

_log = logging.getLogger(__name__)

Kernel = Callable[[int, int], int]
"""Takes the address and the number of contiguous, aligned elements; returns the sum of their
hashes, modulo 2^32."""


def kernel(dtype: torch.dtype) -> Kernel | None:
    """Return the loop for a dtype; None if this machine cannot compile it."""
    kind = _TYPES.get(dtype)
    return _compiled().get(kind) if kind else None


@functools.cache
def _compiled() -> dict[str, Kernel]:
    """Compile the loop for this machine, in about 0.2 s; empty without a compiler."""
    compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
    if shutil.which(compiler[0]) is None:
        _log.info("weights are hashed by torch, which is slower: no C compiler is installed")
        return {}
    # The library is compiled for this machine's processor, so it is not kept for other processes.
    with tempfile.TemporaryDirectory(prefix="verlite-") as folder:
        path = os.path.join(folder, "fingerprint.so")
        options = ["-O3", "-march=native", "-shared", "-fPIC", "-x", "c", "-", "-o", path]
        try:
            subprocess.run(
                compiler + options,
                input=_SOURCE.encode(),
                capture_output=True,
                check=True,
                timeout=60,
            )
            library = ctypes.CDLL(path)
        except (OSError, subprocess.SubprocessError) as error:
            detail = getattr(error, "stderr", None) or b""
            _log.info(
                "weights are hashed by torch, which is slower: %s %s", error, detail.decode()[-500:]
            )
            return {}
    found: dict[str, Kernel] = {}
    for kind in sorted(set(_TYPES.values())):
        function = library[f"sum_of_{kind}"]
        function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_size_t], ctypes.c_uint32
        found[kind] = function
    return found
