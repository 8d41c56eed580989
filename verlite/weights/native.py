"""The fingerprint of CPU tensors as one loop in C, compiled in a process that needs it.

It reads memory once, where torch needs seven passes. It gives the same value. A machine without a
C compiler uses torch.
"""

import ctypes
import functools
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable

import torch

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
