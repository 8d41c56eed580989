"""The memory of each GPU in each phase of a whole run, beside what `verlite plan` says.

`python -m tests.gpu_dry.phases` runs the tests of plans and writes the table of docs/verified.md.
"""

import functools
import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

PAGE = Path(__file__).parents[2] / "docs/verified.md"


class Call(NamedTuple):
    """A call of a worker.

    device: as the machine numbers them.
    before, peak, after: bytes of the worker's tensors.
    held: the most that all processes held of the device meanwhile, cached segments included.
    others: what other processes held of it when the call began, and when it ended.
    began, ended: by the machine's clock.
    """

    role: str
    rank: int
    method: str
    device: int
    before: int
    peak: int
    after: int
    held: int
    others: list[int]
    began: float
    ended: float

    def meets(self, other: "Call") -> bool:
        """Whether both ran at one time."""
        return self.began < other.ended and other.began < self.ended


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

        def others() -> int:
            return gpu.held(device) - gpu.used(device)

        gpu.peak(device)
        before, at_first, began = 0, others(), time.monotonic()
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
            now = gpu.peak(device), [at_first, others()]
            times = began, time.monotonic()
            row = Call(self.spec.role, self.spec.rank, method, device, *sizes, *now, *times)
            with open(os.environ["DRY_PHASES"], "a", encoding="utf-8") as log:
                log.write(json.dumps(row) + "\n")

    return call


def calls(log: Path) -> list[Call]:
    """Return the calls in the order in which they ended."""
    return [Call(*json.loads(line)) for line in log.read_text(encoding="utf-8").splitlines()]


# Whole runs beside their plans

MODEL = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "vocab_size": 8192,
    "initializer_range": 0.02,
}
BASE = (
    "data.train_batch_size=4",
    "data.max_prompt_length=64",
    "data.max_response_length=192",
    "data.truncation=left",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.ignore_eos=true",
    "actor_rollout_ref.rollout.max_num_seqs=16",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.name=hf",
    "algorithm.adv_estimator=grpo",
    "trainer.total_training_steps=1",
    "trainer.save_freq=1",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "trainer.n_gpus_per_node=1",
    "trainer.device=cuda",
    "ray_kwargs.ray_init.address=local",
)
SHAPES = {
    "GRPO, KL loss, all weights": (
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.rollout.weight_transport=shared_memory",
    ),
    "GRPO, LoRA of rank 8": (
        "actor_rollout_ref.model.lora_rank=8",
        "actor_rollout_ref.rollout.weight_transport=shared_memory",
    ),
    "PPO, critic, two ranks, the actor offloads, `ipc`": (
        "algorithm.adv_estimator=gae",
        "data.train_batch_size=16",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.model.share_prefixes=false",
        "actor_rollout_ref.actor.fsdp_config.param_offload=true",
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload=true",
        "actor_rollout_ref.rollout.sync_bucket_mb=4",
        "critic.model.share_prefixes=false",
        "critic.ppo_micro_batch_size_per_gpu=4",
        "trainer.n_gpus_per_node=2",
    ),
}
PASS = (0.01, 0.01)
TOLERANCE = {
    "build": (0.01, 0.2),
    "generation": (0.12, 0.0),
    "old log-probs": PASS,
    "reference log-probs": PASS,
    "values": PASS,
    "critic update": PASS,
    "actor update": PASS,
    "sync: check": PASS,
    "sync: gather": PASS,
    "sync: stream": (0.01, 0.2),
    "sync: load": PASS,
    "checkpoint": (0.01, 0.3),
}
"""How far the plan may be below, and above, the count of tensors. A pass: the losses' and the
scheduler's numbers per token, which are not planned. Generation: the engine hf's own passes are not
planned. Build, streaming: the plan lets the fullest moments of all roles coincide. Checkpoint: the
engine is awake, and hf allocates the planned KV cache at its next request only."""
PAGES = 64 << 20
"""What torch's allocator may hold beside tensors in each process: pages of 20 MiB of the pools of
three streams (FSDP gathers and reduces on its own)."""

CALLS = {
    "build": ("actor.build", "critic.build", "ref.build"),
    "generation": ("rollout.generate", "rollout.generate sleep_after"),
    "old log-probs": ("actor.log_probs",),
    "reference log-probs": ("ref.log_probs",),
    "values": ("critic.values",),
    "critic update": ("critic.update",),
    "actor update": ("actor.update",),
    "sync: check": ("actor.offer_weights",),
    "sync: gather": ("actor.offer_weights", "actor.publish_weights"),
    "sync: stream": ("actor.publish_weights", "rollout.fetch_weights"),
    "sync: load": ("rollout.load_weights",),
    "checkpoint": ("actor.save", "critic.save"),
}
"""The calls of each phase of `verlite plan`."""


class Count(NamedTuple):
    """What a phase needed: bytes of all tensors on a device, and of the device."""

    tensors: int
    held: int


def counted(calls: list[Call], phase: str, device: int) -> Count:
    """Return the fullest moment of a phase: the peaks of a call and of all that it meets, and what
    the other roles had left before."""
    calls = [call for call in calls if call.device == device]
    called = [call for call in calls if f"{call.role}.{call.method}" in CALLS[phase]]
    rest: dict[str, int] = {}
    most = held = 0
    for call in calls:
        if call in called:
            now = rest | {other.role: other.peak for other in called if other.meets(call)}
            most, held = max(most, sum(now.values())), max(held, call.held)
        rest[call.role] = call.after
    return Count(most, held)


def problem(phase: str, planned: float, count: Count, roles: int) -> str:
    """Return how a plan and a count differ by more than is allowed; "" if they do not."""
    less, more = TOLERANCE[phase]
    if not count.tensors * (1 - less) <= planned <= count.tensors * (1 + more):
        return f"{phase}: {planned:,.0f} bytes are planned, and tensors took {count.tensors:,}"
    if count.held > count.tensors + roles * PAGES:
        return f"{phase}: tensors took {count.tensors:,} bytes, and the GPU holds {count.held:,}"
    return ""


def options(folder: Path, shape: str) -> list[str]:
    """Return the arguments of `main_ppo`, and of `verlite plan`; model and data are in `folder`."""
    model, data = folder / "model", folder / "long.parquet"
    named = [f"actor_rollout_ref.model.path={model}", f"critic.model.path={model}"]
    files = [f"data.train_files={data}", f"data.val_files={data}"]
    return [*BASE, *named[: 1 + ("critic" in shape)], *files, *SHAPES[shape]]


def planned(folder: Path, shape: str) -> dict[str, int]:
    """Return the bytes of all tensors on device 0 in each phase, without a margin."""
    from verlite.config.compile import model_spec
    from verlite.config.load import compose
    from verlite.config.plan import make_plan
    from verlite.sizing.devices import Devices
    from verlite.sizing.facts import model_facts
    from verlite.sizing.measure import Measurer
    from verlite.sizing.memory import run_memory

    config = compose(None, options(folder, shape), elsewhere=True).config
    plan = make_plan(config, "cuda")
    devices = Devices("H100", plan.devices_per_node, 80 << 30, "cuda")
    policy = model_facts(model_spec(config.actor_rollout_ref.model))
    memory = run_memory(config, plan, devices, policy, Measurer(use_cache=False))
    return {phase.name: sum(phase.held.values()) for phase in memory.groups[0].phases}


# The table of docs/verified.md

HEADING = "| run | phase | planned, MiB | tensors, MiB | GPU, MiB |\n|---|---|---|---|---|\n"
ROW = re.compile(r"^\| (.+) \| (.+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", re.M)


def rows(text: str) -> list[tuple[str, str, float, float, float]]:
    """Return the table's rows."""
    table = text.split(HEADING)[1].split("\n\n")[0]
    return [(run, phase, *map(float, sizes)) for run, phase, *sizes in ROW.findall(table)]  # type: ignore[misc]


def write_page(found: Path) -> None:
    """Write what the tests have found, a line of JSON each."""
    lines = [json.loads(line) for line in found.read_text(encoding="utf-8").splitlines()]
    shown = [(run, phase, *(f"{n / 2**20:.1f}" for n in sizes)) for run, phase, *sizes in lines]
    before, rest = PAGE.read_text(encoding="utf-8").split(HEADING)
    table = "".join(f"| {' | '.join(row)} |\n" for row in shown)
    rest = re.sub(r"\A(\|.*\n)*", "", rest)  # the rows of today
    PAGE.write_text(before + HEADING + table + rest, encoding="utf-8")


def main() -> None:
    from tests.test_gpu_dry import PYTHON

    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "found")
        env = os.environ | {"DRY_FOUND": str(found)}
        test = "tests/gpu_dry/test_memory.py::test_a_plan_says_what_each_phase_needs"
        command = [PYTHON, "-m", "tests.gpu_dry", test]
        subprocess.run(command, cwd=PAGE.parents[1], env=env, check=True)
        write_page(found)


if __name__ == "__main__":
    main()
