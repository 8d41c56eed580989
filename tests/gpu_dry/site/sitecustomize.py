"""Python runs this first, as its folder is on PYTHONPATH: processes that tests start see
simulated GPUs, and compute on the CPU from their first import of what computes."""

import importlib
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

COMPUTES = ("verlite.engine.fsdp", "verlite.rollout.engines.hf", "verlite.weights.transport")


def has_gpus(machine: ModuleType) -> None:
    machine.__dict__["_nvidia_gpus"] = lambda root: int(os.environ["DRY_GPUS"])


def records_memory(worker_actor: ModuleType) -> None:
    if "DRY_PHASES" in os.environ:
        importlib.import_module("tests.gpu_dry.phases").record(worker_actor.WorkerActor)


def computes(vllm: ModuleType) -> None:
    importlib.import_module("tests.gpu_dry.vllm_kernels").install(vllm)


CHANGES = {
    "verlite.machine": has_gpus,
    "verlite.controller.worker_actor": records_memory,
    "verlite.rollout.engines.vllm": computes,
}


class Hook:
    """An import hook."""

    computing = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name in COMPUTES and not self.computing:
            self.computing = True
            importlib.import_module("tests.gpu_dry.cpu_kernels").install()
        change = CHANGES.get(name)
        if change is None:
            return None
        spec = PathFinder.find_spec(name, path)
        assert spec is not None
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            change(module)

        loader.exec_module = exec_module
        return spec


if os.environ.get("DRY_GPUS"):
    sys.meta_path.insert(0, Hook())  # type: ignore[arg-type]
if "VERLITE_MUTANT" in os.environ:
    importlib.import_module("tests.mutants.plant").install()
if "DRY_BRANCHES" in os.environ:
    importlib.import_module("tests.gpu_dry.branches").install()
