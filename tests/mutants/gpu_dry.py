"""Mutants of the GPU's code paths: bugs that a CPU does not show. They are planted where an
environment with torch for CUDA exists (`make gpu-dry` makes it)."""

import os

from tests.mutants import Mutant
from tests.mutants.patches import calls, does_nothing, result, returns

ENGINE, ROLES, WEIGHTS = (
    f"tests/test_gpu_dry.py::test_gpu_dry[{name}]" for name in ("engine", "roles", "weights")
)


class _Changed:
    """A module with other attributes."""

    def __init__(self, module, **changes):
        self.__dict__.update(changes, module=module)

    def __getattr__(self, name):
        return getattr(self.module, name)


def _without_waits(torch):
    return _Changed(torch, cuda=_Changed(torch.cuda, synchronize=lambda *_: None))


def _first_stays(original, tensors, device):
    return [tensors[0], *original(tensors[1:], device)]


def _waits(tensors):
    import torch

    torch.cuda.synchronize()
    return tensors


def _frees_at_once(original, self):
    from verlite.weights.ipc import _send

    while self._unread:
        self._wait()
    _send(self._peer, b'{"end": true}')
    self._peer = None
    self._free()


def _as_the_machine_counts(device):
    import torch

    return torch.device("cuda", int(os.environ["CUDA_VISIBLE_DEVICES"]))


MUTANTS = [
    Mutant(
        "page-locked memory is read before its copy's event",
        "verlite.weights.shared_memory:Staging._wait",
        calls(lambda original, self, slot, size: self.buffers[slot][:size]),
        (WEIGHTS,),
    ),
    Mutant(
        "trainer and engine go on before their copies of a bucket are over",
        "verlite.weights.ipc:torch",
        _without_waits,
        (WEIGHTS,),
    ),
    Mutant(
        "a trainer frees buffers that its engine has open",
        "verlite.weights.ipc:Publisher.finish",
        calls(_frees_at_once),
        (WEIGHTS,),
    ),
    Mutant(
        "an engine takes the handle of another GPU",
        "verlite.weights.ipc:_check_gpu",
        does_nothing,
        (WEIGHTS,),
    ),
    Mutant(
        "settings of the allocator are lost when memory is shared",
        "verlite.weights.ipc:_allocator_settings",
        returns(""),
        (WEIGHTS,),
    ),
    Mutant(
        "a worker counts GPUs as the machine does",
        "verlite.controller.worker:Worker.device",
        result(_as_the_machine_counts),
        (ROLES,),
    ),
    Mutant(
        "offloaded tensors are used before their copies are over",
        "verlite.engine.offload:_synchronize",
        does_nothing,
        (ENGINE,),
    ),
    Mutant(
        "one tensor of a micro-batch stays in host memory",
        "verlite.engine.offload:to_device",
        calls(_first_stays),
        (ENGINE,),
    ),
    Mutant(
        "the host waits for each micro-batch",
        "verlite.engine.offload:to_device",
        result(_waits),
        (ENGINE,),
    ),
    Mutant(
        "offloaded tensors stay in pageable memory",
        "verlite.engine.offload:_lock_pages",
        does_nothing,
        (ENGINE,),
    ),
    Mutant(
        "the hf engine sleeps with its weights on the GPU",
        "verlite.rollout.engines.hf:_frees_weights",
        returns(False),
        (ROLES,),
    ),
]
