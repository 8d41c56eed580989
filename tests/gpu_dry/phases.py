"""The memory of each GPU in each phase of a whole run, beside what `verlite plan` says."""

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple


class Call(NamedTuple):
    """A call of a worker.

    device: as the machine numbers them.
    before, peak, after: bytes of the worker's tensors.
    held: the most that all processes held of the device meanwhile, cached segments included.
    """

    role: str
    rank: int
    method: str
    device: int
    before: int
    peak: int
    after: int
    held: int


def record(actor: Any) -> None:
    """Let workers write a line for each of their calls to the file that DRY_PHASES names."""
    for method in ("build", "call"):
        setattr(actor, method, _recorded(getattr(actor, method)))


def _recorded(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(self: Any, name: Any, *arguments: Any) -> Any:
        import torch

        from tests.gpu_dry import gpu

        cuda, device = torch.cuda, int(os.environ.get("CUDA_VISIBLE_DEVICES") or -1)
        if device < 0:
            return function(self, name, *arguments)
        seen, reset = [0], cuda.reset_peak_memory_stats

        def note(*arguments: Any) -> None:
            seen.append(cuda.max_memory_allocated())
            reset(*arguments)

        gpu.peak(device)
        before = 0
        if cuda.is_initialized():
            before = cuda.memory_allocated()
            reset()
        cuda.reset_peak_memory_stats = note  # a worker resets them, too
        try:
            return function(self, name, *arguments)
        finally:
            cuda.reset_peak_memory_stats = reset
            method = name if isinstance(name, str) else "build"
            sizes = before, max(*seen, cuda.max_memory_allocated(), 0), cuda.memory_allocated()
            row = Call(self.spec.role, self.spec.rank, method, device, *sizes, gpu.peak(device))
            with open(os.environ["DRY_PHASES"], "a", encoding="utf-8") as log:
                log.write(json.dumps(row) + "\n")

    return call


def calls(log: Path) -> list[Call]:
    """Return the calls in the order in which they ended."""
    return [Call(*json.loads(line)) for line in log.read_text(encoding="utf-8").splitlines()]


MIB = 2**20
NAMES = {
    "build": {"build"},
    "generation": {"rollout.generate"},
    "old log-probs": {"actor.log_probs"},
    "reference log-probs": {"ref.log_probs"},
    "values": {"critic.values"},
    "critic update": {"critic.update"},
    "actor update": {"actor.update"},
    "sync": {"actor.offer_weights", "actor.publish_weights"},
    "sync: gather": {"actor.offer_weights", "actor.publish_weights"},
    "sync: load": {"rollout.fetch_weights", "rollout.load_weights"},
    "checkpoint": {"actor.save", "critic.save"},
}
"""The calls of each phase of `verlite plan`."""


class Count(NamedTuple):
    """What a phase needed: bytes of each role's tensors, and of the device."""

    tensors: dict[str, int]
    held: int


def counted(calls: list[Call], phase: str, device: int = 0) -> Count:
    """Return the fullest call of a phase; the tensors of the other roles are those that they had
    left."""
    rest: dict[str, int] = {}
    most, held = {"": 0}, 0
    for call in calls:
        if call.device != device:
            continue
        if call.method in NAMES[phase] or f"{call.role}.{call.method}" in NAMES[phase]:
            now = rest | {call.role: call.peak}
            most = max(most, now, key=lambda roles: sum(roles.values()))
            held = max(held, call.held)
        rest[call.role] = call.after
    return Count(most, held)
