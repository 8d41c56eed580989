"""Mutants of verlite.weights: a sync that loses or mixes up weights."""

from tests.mutants import Mutant
from tests.mutants.patches import argument, calls, constant, does_nothing, result

FINGERPRINT = "tests/weights/test_fingerprint.py"
BUCKETS = "tests/weights/test_buckets.py"


def _only_shape(original, tensor, dtype=None):
    return tensor.numel()


MUTANTS = [
    Mutant(
        "the fingerprint sees only a tensor's size",
        "verlite.weights.fingerprint:tensor_fingerprint",
        calls(_only_shape),
        (FINGERPRINT,),
    ),
    Mutant(
        "the fingerprint ignores the engine's dtype",
        "verlite.weights.fingerprint:tensor_fingerprint",
        argument("dtype", lambda dtype: None),
        (FINGERPRINT,),
    ),
    Mutant(
        "the hash leaves the sign and the exponent in the high bits",
        "verlite.weights.fingerprint:_MIX_2",
        constant(0),
        (FINGERPRINT,),
    ),
    Mutant(
        "the compiled hash differs from torch's",
        "verlite.weights.native:kernel",
        result(lambda kernel: lambda address, count: kernel(address, count - 1)),
        (FINGERPRINT,),
    ),
    Mutant(
        "buckets are not freed",
        "verlite.weights.buckets:Buckets.close",
        does_nothing,
        (BUCKETS,),
    ),
]
