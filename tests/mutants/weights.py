"""Mutants of verlite.weights: a sync that loses or mixes up weights."""

from tests.mutants import Mutant
from tests.mutants.patches import argument, calls, constant, does_nothing, result, returns

FINGERPRINT = "tests/weights/test_fingerprint.py"
PROBE = "tests/engine/test_probe.py"
MEMORY = "tests/weights/test_shared_memory.py"
COLLECTIVE = "tests/weights/test_collective.py"
IPC = "tests/weights/test_ipc.py"
FILES = "tests/weights/test_files.py"
ROUTES = "tests/spec/test_weight_routes.py"
SYNC = "tests/workers/test_weights_and_samples.py"


def _only_shape(original, tensor, dtype=None):
    return tensor.numel()


def _keeps_last_bucket_back(original, named, bucket_bytes):
    return list(original(named, bucket_bytes))[:-1]


def _never_waits_for_the_engine(original, self):
    self._unread -= 1


MUTANTS = [
    Mutant(
        "the fingerprint sees only a tensor's size",
        "verlite.weights.fingerprint:tensor_fingerprint",
        calls(_only_shape),
        (FINGERPRINT,),
    ),
    Mutant(
        "the log-prob probe allows any gap",
        "verlite.weights.probe:probe_limit",
        result(lambda limit: 1000 * limit),
        (PROBE,),
    ),
    Mutant(
        "the log-prob probe looks at the median only",
        "verlite.weights.probe:_TAIL_SHARE",
        constant(1e9),
        (PROBE + "::test_two_experts_in_each_others_place_are_detected",),
    ),
    Mutant(
        "the compiled hash differs from torch's",
        "verlite.weights.fingerprint:kernel",
        result(lambda kernel: lambda address, count: kernel(address, count - 1)),
        (FINGERPRINT,),
    ),
    Mutant(
        "memory files are not freed",
        "verlite.weights.shared_memory:MemoryFiles.close",
        does_nothing,
        (MEMORY,),
    ),
    Mutant(
        "the last bucket is not sent",
        "verlite.weights.transport:in_buckets",
        calls(_keeps_last_bucket_back),
        (SYNC,),
    ),
    Mutant(
        "a staging buffer is not waited for",
        "verlite.weights.shared_memory:Staging._wait",
        calls(lambda original, self, slot, size: self.buffers[1 - slot][:size]),
        (MEMORY,),
    ),
    Mutant(
        "a receiver takes a half sync for a whole one",
        "verlite.weights.collective:_ABORT",
        constant(0),
        (COLLECTIVE,),
    ),
    Mutant(
        "a broken group is used again",
        "verlite.weights.collective:WeightReceiver.close",
        does_nothing,
        (COLLECTIVE,),
    ),
    Mutant(
        "a buffer is overwritten while the engine reads it",
        "verlite.weights.ipc:Publisher._wait",
        calls(_never_waits_for_the_engine),
        (IPC,),
    ),
    Mutant(
        "a trial of ipc compares nothing",
        "verlite.weights.ipc:read_trial",
        calls(lambda original, stream: "" if list(stream) else "nothing"),
        (IPC,),
    ),
    Mutant(
        "ipc is taken without memory for it",
        "verlite.workers.actor:ActorWorker._lack_of_memory",
        returns(""),
        (SYNC,),
    ),
    Mutant(
        "a reader takes the version before",
        "verlite.weights.files:_problem",
        does_nothing,
        (FILES,),
    ),
    Mutant(
        "engines beside the actor are sent the weights over the network",
        "verlite.spec.weight_routes:weight_routes",
        argument("chosen", lambda chosen: "collective"),
        (ROUTES,),
    ),
]
