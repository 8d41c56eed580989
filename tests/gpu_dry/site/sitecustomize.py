"""Python runs this first, as its folder is on PYTHONPATH: processes that tests start see the GPUs
that are not there, and compute on the CPU from their first import of what computes."""

import importlib
import os
import sys
from typing import Any


class Hook:
    """An import hook."""

    computes = ("verlite.engine.fsdp", "verlite.rollout.engines.hf", "verlite.weights.transport")

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "verlite.machine" and name not in self.seen:
            self.seen.add(name)
            importlib.import_module(name)._nvidia_gpus = lambda root: int(os.environ["DRY_GPUS"])  # type: ignore[attr-defined]
        if name in self.computes and "computes" not in self.seen:
            self.seen.add("computes")
            importlib.import_module("tests.gpu_dry.cpu_kernels").install()

    def __init__(self) -> None:
        self.seen: set[str] = set()


if os.environ.get("DRY_GPUS"):
    sys.meta_path.insert(0, Hook())  # type: ignore[arg-type]
