"""The roles of a run: which worker class each one uses.

To add a role, write its worker class and its spec (`verlite/spec/roles.py`), add a line to ROLES
and one to `role_spec` in `verlite/config/compile.py`, and set in `verlite/config/plan.py` which
runs have it. `run.workers` then has its worker group.

Nothing heavy is imported here, because the launcher reads this table before torch is loaded.
"""

import importlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Role:
    """A group of workers of one class.

    worker: dotted path of the worker class, "package.module:Class".
    preload: modules that its processes import while the driver is still checking the data.
    saves: the role's state is a part of every checkpoint, in a folder of the role's name.
    """

    worker: str
    preload: tuple[str, ...] = ()
    saves: bool = False

    def worker_class(self) -> type:
        """Import the worker class."""
        module, _, name = self.worker.partition(":")
        worker_class: type = getattr(importlib.import_module(module), name)
        return worker_class


_ENGINE = ("verlite.engine.fsdp",)

ROLES = {
    "actor": Role("verlite.workers.actor:ActorWorker", _ENGINE, saves=True),
    "critic": Role("verlite.workers.critic:CriticWorker", _ENGINE, saves=True),
    "inference": Role("verlite.workers.inference:InferenceWorker", _ENGINE),
    "ref": Role("verlite.workers.reference:ReferenceWorker", _ENGINE),
    "teacher": Role("verlite.workers.reference:ReferenceWorker", _ENGINE),
    "rollout": Role("verlite.workers.rollout:RolloutWorker"),
}
"""Every role, in the order in which workers are built.

Rollout comes last: vLLM takes its share of the GPU memory that the other roles have left free.
"""
