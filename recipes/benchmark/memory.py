"""What `verlite plan` says about memory, compared with the training engine's real peaks on this
machine's CPU.

python recipes/benchmark/memory.py [--shapes w25 ...] [--device cpu|cuda]

Each shape runs in two processes, one for each of the two measures. "tensors" are the bytes that
torch's allocator reports: what the plan counts. "process" is the largest resident size above that
of the process before it built the engine; pages that were freed may still be resident.
On a GPU "tensors" is max_memory_allocated and "process" max_memory_reserved.
"""

import argparse
import gc
import json
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from report import keep
from workload import BUILD, model_in, model_of, w128

from verlite.engine.fsdp import TrainEngine
from verlite.sizing.dry_engine import DryEngineSpec
from verlite.sizing.measure import Objective, Passes, PassRows, measure, rows_batch
from verlite.spec.roles import FSDPSpec, ModelSpec, OptimSpec


def small_vocabulary() -> Path:
    return model_of("w25")


def large_vocabulary() -> Path:
    """As many parameters in the embeddings as in the layers; the logits need most memory."""
    return model_in(
        BUILD / "w60-vocabulary",
        vocab_size=60_000,
        max_position_embeddings=1024,
        hidden_size=512,
        num_hidden_layers=8,
        intermediate_size=1408,
        num_attention_heads=8,
        num_key_value_heads=4,
    )


SHAPES: dict[str, tuple[Callable[[], Path], str, dict[str, Any], PassRows]] = {
    "w25": (small_vocabulary, "lm", {}, PassRows((512,) * 8, 256, True)),
    "w25, all activations kept": (
        small_vocabulary,
        "lm",
        {"enable_gradient_checkpointing": False},
        PassRows((512,) * 8, 256, True),
    ),
    "w25, products kept": (
        small_vocabulary,
        "lm",
        {"enable_gradient_checkpointing": "products"},
        PassRows((512,) * 8, 256, True),
    ),
    "w128": (w128, "lm", {}, PassRows((768,) * 4, 512, True)),
    "vocabulary of 60,000": (large_vocabulary, "lm", {}, PassRows((512,) * 4, 256, True)),
    "w128, critic": (w128, "value", {}, PassRows((768,) * 4, 512, True)),
    "w25, LoRA of rank 16": (small_vocabulary, "lm", {"lora_rank": 16}, PassRows((512,) * 8, 256)),
}


def spec_of(shape: str, device: str) -> tuple[DryEngineSpec, Passes]:
    folder, head, options, rows = SHAPES[shape]
    model = ModelSpec(path=str(folder()), **options)
    dtype = "bfloat16" if device == "cuda" else "float32"
    spec = DryEngineSpec(model, FSDPSpec(), OptimSpec(), head, 1, 1, device, dtype)
    return spec, Passes(rows, rows, forward_entropy=head == "lm")


def planned(shape: str, device: str) -> dict[str, int]:
    """Return the plan's bytes."""
    memory = measure(*spec_of(shape, device))
    return {"built": memory.resident, "forward": memory.forward, "update": memory.update}


def run(shape: str, device: str, peak: Callable[[Callable[[], object]], int]) -> dict[str, int]:
    """Run the real engine; return what `peak` says about each part."""
    spec, passes = spec_of(shape, device)
    found = {}
    engines: list[TrainEngine] = []
    batch, micro = rows_batch(passes.update)
    objective = Objective(with_entropy=False)

    def build() -> None:
        engines.append(
            TrainEngine(spec.model, spec.fsdp, spec.optim, head=spec.head, device=device)
        )

    def update() -> None:
        engines[0].update(batch, micro, 1.0, objective)

    found["built"] = peak(build)
    found["forward"] = peak(
        lambda: engines[0].forward(batch, micro, with_entropy=passes.forward_entropy)
    )
    found["update"] = peak(update)
    return found


def tensors(shape: str, device: str) -> dict[str, int]:
    """Return the peaks of torch's allocator."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if device == "cuda":
        return run(shape, device, cuda_peak)
    live = 0

    def peak(call: Callable[[], object]) -> int:
        nonlocal live
        with torch.profiler.profile(profile_memory=True) as profiler:
            call()
            gc.collect()
        events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
        most = live
        for event in sorted(events, key=lambda e: e.start_ns()):
            live += event.nbytes()
            most = max(most, live)
        return most

    found = run(shape, device, peak)
    dist.destroy_process_group()
    return found


def cuda_peak(call: Callable[[], object]) -> int:
    torch.cuda.reset_peak_memory_stats()
    call()
    return torch.cuda.max_memory_allocated()


def process(shape: str, device: str) -> dict[str, int]:
    """Return the peaks of the process's resident memory above its start; on a GPU those of the
    allocator's reserved memory."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    started = resident("VmRSS")

    def peak(call: Callable[[], object]) -> int:
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            call()
            return torch.cuda.max_memory_reserved()
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from here
        call()
        return resident("VmHWM") - started

    found = run(shape, device, peak)
    dist.destroy_process_group()
    return found | {"started": started}


def resident(name: str) -> int:
    """Return a line of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    found = {}
    for shape in args.shapes:
        spec_of(shape, args.device)  # writes the model
        parts = {}
        for part in (planned, tensors, process):
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                parts[part.__name__] = pool.submit(part, shape, args.device).result()
        found[shape] = parts
        print(shape, json.dumps(parts), flush=True)
    part = "memory" if args.device == "cpu" else "memory_gpu"
    keep(part, {"device": args.device, "shapes": found})


if __name__ == "__main__":
    main()
