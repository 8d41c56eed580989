"""Everything that only a GPU can show, on one bare machine, in one command of at most nine minutes.

python recipes/benchmark/gpu.py [--parts attention ipc ...] [--seconds 520] [--out FOLDER]
python recipes/benchmark/gpu.py --list
python recipes/benchmark/gpu.py --size tiny [--device cpu]
python recipes/benchmark/gpu.py --take FOLDER/gpu.jsonl

It needs torch and transformers, but no network, no vLLM, no Ray and no installed verlite; bare.py
says what else a machine lacks and how to bring it. PARTS are in the order of what matters most.
Each runs in its own process. A part that is not finished when its own seconds or those of the
command are over is killed; a part that does not fit into what is left is skipped, and says so.
FOLDER/gpu.jsonl (FOLDER is $OUT, else build/) gets a line as soon as a row is measured, so that a
run that is cut off keeps its results. The exit code is 1 if a check failed.

With --size tiny the same parts run with tiny models and batches, which tests this script: in a
minute or two on a CPU, where it is the default, and on a GPU that only a program simulates
(tests/gpu_dry/test_script.py). --take stores the
measured parts of a gpu.jsonl that was brought from another machine in results.json.

Checks: gpu_checks.py. Measurements: models have the shapes of Qwen2.5 and random weights. FLOPs are
model FLOPs. A pass counts 2 per weight and token (output layer: trained tokens only) plus 2 x
layers x heads x head size x length^2 per sequence (half of the square, because attention is
causal). Training counts three passes; recomputation by gradient checkpointing is not counted. MFU
is relative to the GPU's dense bfloat16 peak in its data sheet.
"""

import bare

bare.prepare()

import argparse
import gc
import importlib.util
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from generation import sampled
from gpu_checks import one_rank, rows, run_group
from parts import Part, Results, read, run_parts, show
from report import RESULTS, keep
from sync import sync
from training import loss
from workload import BUILD, model_in

from verlite.algorithms import logprobs
from verlite.engine.fsdp import TrainEngine
from verlite.engine.micro import MicroBatching
from verlite.protocol.data import DataProto
from verlite.rollout.batched import build_engine, engine_dtype
from verlite.spec.roles import FSDPSpec, GenerationSpec, ModelSpec, OptimSpec

PEAKS = {
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
}
"""Dense bfloat16 FLOP/s in NVIDIA's data sheets, by the driver's device name; other variants of
these GPUs have other peaks."""

_QWEN = {"max_position_embeddings": 32_768, "rope_theta": 1e6, "rms_norm_eps": 1e-6}
SHAPES: dict[str, dict[str, Any]] = {
    "1.5b": {
        **_QWEN,
        "vocab_size": 151_936,
        "hidden_size": 1536,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "intermediate_size": 8960,
    },
    # The width of 7B. Four layers show the speed of a layer and fit beside float32 states.
    "7b-width": {
        **_QWEN,
        "vocab_size": 152_064,
        "hidden_size": 3584,
        "num_hidden_layers": 4,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18_944,
    },
    "tiny": {
        "vocab_size": 128,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 128,
        "max_position_embeddings": 1024,
    },
}
# Sequences of an update and the longest: 16,640 tokens. Prompts, samples per prompt, tokens per
# prompt and per response.
SIZES = {"update": (13, 2048), "generation": (32, 8, 128, 256)}
TINY_SIZES = {"update": (12, 128), "generation": (4, 2, 16, 48)}
ROUNDS = 2
KERNELS = 20


@dataclass(frozen=True)
class Rows:
    """Measures the rows of one part while time remains."""

    results: Results
    device: torch.device

    def __call__(self, name: str, needs: float, call: Callable[[], dict[str, Any]]) -> None:
        """Measure one row, which takes about `needs` seconds, and record its peak memory."""
        began, left = time.time(), self.results.left()
        if needs > left:
            skipped = f"takes about {needs:.0f} s, and {left:.0f} s were left"
            self.results.write(name, {"skipped": skipped})
            return
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            found = call()
        except torch.OutOfMemoryError as error:  # a smaller GPU than the row was written for
            found = {"skipped": f"{error}".partition("\n")[0]}
        except Exception as error:  # a failed row must not stop the others
            found = {"error": f"{type(error).__name__}: {error}"}
        memory = self._memory()
        self.results.write(name, found | {"row_seconds": time.time() - began, **memory})

    def _memory(self) -> dict[str, float]:
        if self.device.type != "cuda":
            return {"peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
        free, total = torch.cuda.mem_get_info()  # includes vLLM's memory
        return {
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
            "held_gib": torch.cuda.memory_allocated() / 2**30,
            "used_gib": (total - free) / 2**30,
        }


def forward_flops(shape: dict[str, Any], parameters: int, batch: DataProto) -> float:
    """Return the FLOPs of one pass over a batch; see the module's docstring. `parameters` counts
    the tied embedding once."""
    lengths, trained = (
        batch.batch["attention_mask"].sum(1).double(),
        int(batch.batch["response_mask"].sum()),
    )
    head = shape["vocab_size"] * shape["hidden_size"]
    attention = (
        2 * shape["num_hidden_layers"] * shape["hidden_size"] * float(lengths.square().sum())
    )
    return 2 * (parameters - head) * float(lengths.sum()) + 2 * head * trained + attention


def median_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the median seconds of ROUNDS calls, after a warm-up call."""

    def once() -> float:
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    once()
    return statistics.median(once() for _ in range(ROUNDS))


def copy_rates(device: torch.device, size: int) -> dict[str, float]:
    """Return the bytes per second of copies between host and GPU, from which the limit of a weight
    sync or an offload follows."""
    if device.type != "cuda":
        source, target = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
        return {"copy": size / median_seconds(lambda: target.copy_(source), device)}
    on_gpu = torch.ones(size, dtype=torch.uint8, device=device)
    other = torch.empty_like(on_gpu)
    pageable = torch.ones(size, dtype=torch.uint8)
    pinned = pageable.pin_memory()
    pairs = {
        "gpu_to_gpu": (other, on_gpu),
        "gpu_to_pageable": (pageable, on_gpu),
        "gpu_to_pinned": (pinned, on_gpu),
        "pageable_to_gpu": (on_gpu, pageable),
        "pinned_to_gpu": (on_gpu, pinned),
    }
    return {
        name: size / median_seconds(lambda to=to, source=source: to.copy_(source), device)
        for name, (to, source) in pairs.items()
    }


def machine(results: Results, device_name: str, is_tiny: bool) -> None:
    """The part "machine": the device's name, its rate of a large matrix product, and of copies."""
    row, device = Rows(results, torch.device(device_name)), torch.device(device_name)

    def products() -> dict[str, Any]:
        size, dtype = (1024, torch.float32) if is_tiny else (8192, torch.bfloat16)
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        seconds = median_seconds(lambda: torch.mm(a, b), device)
        return {**_device(device), "seconds": seconds, "flops": 2 * size**3 / seconds}

    row("matrix product", 5, products)
    row("copies", 5, lambda: copy_rates(device, (64 << 20) if is_tiny else (2 << 30)))


def _device(device: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {"device": name, "torch": torch.__version__, "peak_flops": PEAKS.get(name)}


def _head(device: torch.device) -> dict[str, bool]:
    """Return which of the output head's fast paths the passes before took: compiled kernels, which
    need a C compiler, and products that add to float32."""
    if device.type != "cuda":
        return {"head_fused": False, "head_adds_wide": False}
    dtype = engine_dtype("auto", device)
    wide = logprobs._adds_wide(device, dtype)
    return {"head_fused": not logprobs._unfused, "head_adds_wide": wide}


def engine_of(name: str, device: torch.device, **options: Any) -> TrainEngine:
    """Build a trainer. Options: enable_gradient_checkpointing, use_torch_compile, offload."""
    dtype = str(engine_dtype("auto", device)).removeprefix("torch.")
    folder = model_in(BUILD / f"qwen-{name}", str(device), dtype, **SHAPES[name])
    recompute = options.get("enable_gradient_checkpointing", True)
    offload = options.get("offload", False)
    return TrainEngine(
        ModelSpec(path=str(folder), enable_gradient_checkpointing=recompute),
        FSDPSpec(
            use_torch_compile=options.get("use_torch_compile", False),
            param_offload=offload,
            optimizer_offload=offload,
        ),
        OptimSpec(lr=1e-6),
        total_training_steps=1000,
        device=device,
    )


def update(results: Results, device_name: str, name: str) -> None:
    """The parts of one update: as by default, its largest kernels, without recomputation, compiled;
    a log-prob pass; offload and onload."""
    device = torch.device(device_name)
    row = Rows(results, device)
    batch = rows(*(TINY_SIZES if name == "tiny" else SIZES)["update"])
    tokens = int(batch.batch["attention_mask"].sum())
    cut = MicroBatching(max_tokens=tokens)
    peak = _device(device)["peak_flops"]

    def speed(call: Callable[[], object], passes: int, parameters: int) -> dict[str, Any]:
        took = median_seconds(call, device)
        rate = passes * forward_flops(SHAPES[name], parameters, batch) / took
        found = {"seconds": took, "tokens": tokens, "tokens_per_s": tokens / took, "flops": rate}
        return found | _head(device) | ({"mfu": rate / peak} if peak else {})

    def updates(trainer: TrainEngine) -> dict[str, Any]:
        parameters = sum(parameter.numel() for parameter in trainer.parameters)
        return speed(lambda: trainer.update(batch, cut, 1.0, loss), 3, parameters)

    with one_rank(device_name):
        found: list[TrainEngine] = []

        def load() -> dict[str, Any]:
            found.append(engine_of(name, device))
            parameters = sum(parameter.numel() for parameter in found[0].parameters)
            return {"parameters": parameters, **_device(device)}

        row("load", 15, load)
        if found:
            (trainer,) = found
            row("update", 10, lambda: updates(trainer))
            row("kernels", 10, lambda: kernels(trainer, batch, cut))
            parameters = sum(parameter.numel() for parameter in trainer.parameters)
            row(
                "log-probs",
                5,
                lambda: speed(
                    lambda: trainer.forward(batch, cut, 1.0, with_entropy=True), 1, parameters
                ),
            )
            del trainer
        found.clear()
        row("offload and onload", 20, lambda: moved(engine_of(name, device, offload=True)))
        for what, needs, option in (
            ("update without recomputation", 20, {"enable_gradient_checkpointing": False}),
            ("update, products kept", 20, {"enable_gradient_checkpointing": "products"}),
            ("update, compiled", 70, {"use_torch_compile": True}),
        ):
            if device.type == "cpu" and "compiled" in what:
                results.write(what, {"skipped": "takes minutes on a CPU"})
                continue
            row(what, needs, lambda option=option: updates(engine_of(name, device, **option)))


def kernels(trainer: TrainEngine, batch: DataProto, cut: MicroBatching) -> dict[str, Any]:
    """Return the kernels (on a CPU: operators) of one update that take the most time, in ms."""
    from torch.profiler import ProfilerActivity, profile

    is_cuda = trainer.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU]) as made:
        trainer.update(batch, cut, 1.0, loss)
        if is_cuda:
            torch.cuda.synchronize()
    key = "self_device_time_total" if is_cuda else "self_cpu_time_total"
    events = sorted(made.key_averages(), key=lambda event: -getattr(event, key))
    if not events:
        return {"skipped": "torch's profiler sees no kernels here: CUPTI did not start"}
    return {
        "total_ms": sum(getattr(event, key) for event in events) / 1e3,
        "kernels": [
            {"name": event.key[:120], "calls": event.count, "ms": getattr(event, key) / 1e3}
            for event in events[:KERNELS]
        ],
    }


def moved(trainer: TrainEngine) -> dict[str, float]:
    """Return the seconds of moving parameters and optimizer to the host and back."""
    trainer.onload(optimizer=True)
    trainer.offload()  # page-locks the host memory
    trainer.onload(optimizer=True)
    began = time.perf_counter()
    trainer.offload()
    out = time.perf_counter() - began
    trainer.onload(optimizer=True)
    back = time.perf_counter() - began - out
    return {"seconds": out + back, "offload_seconds": out, "onload_seconds": back}


def generation(results: Results, device_name: str, name: str, engine: str) -> None:
    """Start, weight sync, generation, sleep and wake of an engine beside a trainer."""
    device = torch.device(device_name)
    sizes = (TINY_SIZES if name == "tiny" else SIZES)["generation"]
    if engine == "vllm" and importlib.util.find_spec("vllm") is None:
        results.write("engine vllm", {"skipped": "vllm is not installed"})
        return
    with one_rank(device_name):
        Rows(results, device)(
            f"engine {engine}",
            30,
            lambda: generate(engine, engine_of(name, device, offload=True), name, sizes),
        )


def generate(
    engine: str, trainer: TrainEngine, name: str, sizes: tuple[int, ...]
) -> dict[str, Any]:
    """Start an engine while the trainer is offloaded, sync weights, sample, and put the engine to
    sleep."""
    dtype = engine_dtype("auto", trainer.device)
    prompts, samples, prompt_tokens, new_tokens = sizes
    trainer.offload()
    rollout, began = GenerationSpec(), time.perf_counter()
    length = prompt_tokens + new_tokens
    built = build_engine(
        engine, ModelSpec(path=str(BUILD / f"qwen-{name}")), rollout, length, trainer.device, 0
    )
    found: dict[str, Any] = {"start_seconds": time.perf_counter() - began}
    try:
        trainer.onload()  # as workers.actor does before an export
        syncs = [
            sync(trainer, built, version, rollout.sync_bucket_mb << 20, dtype)
            for version in range(3)
        ]
        trainer.offload()
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(3, 128, (prompts, prompt_tokens), generator=generator).tolist()
        took = median_seconds(lambda: sampled(built, ids, samples, new_tokens), trainer.device)
        began = time.perf_counter()
        built.sleep()
        slept = time.perf_counter()
        if trainer.device.type == "cuda":
            free, total = torch.cuda.mem_get_info()
            found["asleep_used_gib"] = (total - free) / 2**30
        built.wake("weights")
        found |= {"sleep_seconds": slept - began, "wake_seconds": time.perf_counter() - slept}
    finally:
        built.close()
    tokens = prompts * samples * new_tokens
    median = {key: statistics.median(one[key] for one in syncs) for key in syncs[0]}
    return found | {
        "sync": median,
        "sync_seconds": sum(v for key, v in median.items() if key not in ("bytes", "gap")),
        "seconds": took,
        "tokens": tokens,
        "tokens_per_s": tokens / took,
    }


def cumem(results: Results, device_name: str, is_tiny: bool) -> None:
    """vLLM's allocator for sleep, without vLLM: memory is freed asleep, and whole when awake.

    It needs the module cumem_allocator of vLLM's wheel for GPUs: with vLLM installed, or the file
    cumem_allocator.abi3.so in build/carried.
    """
    row = Rows(results, torch.device(device_name))
    library = next(
        (
            path
            for folder in (bare.CARRIED, *(Path(entry, "vllm") for entry in sys.path))
            for path in folder.glob("cumem_allocator*.so")
        ),
        None,
    )
    if device_name == "cpu" or library is None:
        reason = "needs a GPU" if device_name == "cpu" else "no cumem_allocator*.so was carried"
        results.write("sleep and wake", {"skipped": reason})
        return
    sys.path.append(str(library.parent))
    row("sleep and wake", 10, lambda: slept(library, (64 << 20) if is_tiny else (1 << 30)))


_KEPT: list[object] = []
"""What must live until the process ends."""


def slept(library: Path, size: int) -> dict[str, Any]:
    """Put `size` bytes to sleep and wake them; see `cumem`."""
    import cumem_allocator
    from torch.cuda.memory import CUDAPluggableAllocator, MemPool, use_mem_pool

    handles: dict[int, tuple[int, ...]] = {}

    def allocated(handle: tuple[int, ...]) -> None:
        handles[handle[2]] = handle  # device, size, address, memory

    freed_callback = handles.pop
    cumem_allocator.init_module(allocated, freed_callback)
    allocator = CUDAPluggableAllocator(str(library), "my_malloc", "my_free")
    pool = MemPool(allocator.allocator())
    # The module holds no references, and the pool must outlive its tensors.
    _KEPT.extend([allocated, freed_callback, allocator, pool])
    with use_mem_pool(pool):
        tensor = torch.arange(size // 4, dtype=torch.int32, device="cuda")

    def used() -> float:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return (total - free) / 2**30

    kept, awake, began = tensor.cpu(), used(), time.perf_counter()
    for handle in handles.values():
        cumem_allocator.python_unmap_and_release(*handle)
    asleep, middle = used(), time.perf_counter()
    for handle in handles.values():
        cumem_allocator.python_create_and_map(*handle)
    woken = time.perf_counter()
    tensor.copy_(kept)
    if not torch.equal(tensor.cpu(), kept):
        raise AssertionError("the memory is not usable after waking")
    freed, again = awake - asleep, used() - asleep
    del tensor
    held = size / 2**30
    if min(freed, again) < 0.9 * held:
        raise AssertionError(f"{held:g} GiB held, {freed:.2f} freed asleep, {again:.2f} woken")
    return {"freed_gib": freed, "seconds": woken - began, "sleep_seconds": middle - began}


def parts_of(device: str, size: str = "full") -> dict[str, Part]:
    """Return every part by name, in the order of what matters most. size: "full" or "tiny"."""
    is_tiny = size == "tiny"

    def shape(name: str) -> str:
        return "tiny" if is_tiny else name

    def check(group: str, needs: float, seconds: float) -> Part:
        arguments = (group, device, "tiny" if is_tiny else "small")
        return Part(group, seconds, run_group, arguments, needs)

    found = [
        check("attention", 15, 60),
        check("ipc", 15, 90),
        check("training", 20, 135),
        check("trees", 15, 90),
        check("memory", 15, 60),
        Part("machine", 30, machine, (device, is_tiny), 10),
        Part("1.5b", 150, update, (device, shape("1.5b")), 30),
        Part("7b-width", 160, update, (device, shape("7b-width")), 30),
        check("hf", 20, 60),
        Part("cumem", 30, cumem, (device, is_tiny), 10),
        Part("1.5b-hf", 90, generation, (device, shape("1.5b"), "hf"), 40),
        check("fingerprints", 15, 60),
        check("checkpoint", 15, 60),
        check("adapters", 15, 60),
        check("plan", 15, 60),
        check("compiled", 45, 150),
        check("vllm", 60, 300),
        Part("1.5b-vllm", 320, generation, (device, shape("1.5b"), "vllm"), 120),
    ]
    slower = 5 if is_tiny else 1  # it computes on a CPU, perhaps a busy one
    return {part.name: replace(part, seconds=part.seconds * slower) for part in found}


def summary(results: dict[str, dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return a line per row: part, row, seconds, tokens per second, MFU, peak GiB, and what else
    matters or went wrong."""
    lines = []
    for part, part_rows in results.items():
        for name, row in part_rows.items():
            if name == "process" and "error" not in row:
                continue
            numbers = [
                format(row[key], form) if row.get(key) is not None else ""
                for key, form in _COLUMNS.items()
            ]
            lines.append((part, name, *numbers, _note(row)))
    return lines


_COLUMNS = {"seconds": ".3f", "tokens_per_s": ",.0f", "mfu": ".1%", "peak_gib": ".2f"}
HEAD = ("part", "row", "seconds", "tokens/s", "MFU", "peak GiB", "")


def _note(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"ERROR {row['error'][:200]}"
    if "skipped" in row:
        return f"skipped: {row['skipped']}"
    notes = []
    if "status" in row:
        figure = f"{row['figure']:.3g}, limit {row['limit']:g}" if "figure" in row else ""
        return f"{row['status']} {figure} {row.get('reason', '')[:120]}".rstrip()
    if "kernels" in row:
        notes = [f"{k['ms']:.1f} ms {k['name'][:40]}" for k in row["kernels"][:5]]
    if "parameters" in row:
        notes.append(f"{row['parameters'] / 1e6:,.1f}M parameters on {row['device']}")
    elif "flops" in row and "mfu" not in row:
        notes.append(f"{row['flops'] / 1e12:,.2f} TFLOP/s")
    if row.get("head_fused") is False:
        notes.append("head not fused")
    if "sync_seconds" in row:
        rate = row["sync"]["bytes"] / row["sync_seconds"] / 1e9
        notes.append(f"sync {row['sync_seconds']:.2f} s, {rate:.1f} GB/s")
    rates = {key: value for key, value in row.items() if "_to_" in key or key == "copy"}
    notes += [f"{key.replace('_', ' ')} {value / 1e9:.1f} GB/s" for key, value in rates.items()]
    return ", ".join(notes)


def keep_part(part: str, measured: dict[str, Any], path: Path) -> None:
    """Store a measured part in results.json, unless all of it failed. Checks are not stored."""
    rows = [row for name, row in measured.items() if name != "process" and "status" not in row]
    if any("error" not in row and "skipped" not in row for row in rows):
        keep(f"gpu_{part}", {"rows": measured}, path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=parts_of("cuda"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--size", choices=("full", "tiny"), help="default: full, on a CPU tiny")
    parser.add_argument("--seconds", type=float, default=520, help="limit of the whole command")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or BUILD))
    parser.add_argument("--list", action="store_true", help="show the parts and their time limits")
    parser.add_argument("--take", type=Path, help="store the measured parts of this gpu.jsonl")
    args = parser.parse_args()
    parts = parts_of(args.device, args.size or ("full" if args.device == "cuda" else "tiny"))
    if args.list:
        limits = [(name, f"{p.needs:.0f}", f"{p.seconds:.0f}") for name, p in parts.items()]
        show(("part", "seconds at least", "seconds at most"), limits)
        return
    if args.take:
        for part, measured in read(args.take).items():
            keep_part(part, measured, RESULTS)
        return
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU. --device cpu tests this script")
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "gpu.jsonl"
    path.unlink(missing_ok=True)
    chosen = [parts[name] for name in args.parts or parts]
    run_parts(chosen, path, time.time() + args.seconds)
    found = read(path)
    show(HEAD, summary(found))
    sys.exit(int(has_failed(found)))


def has_failed(results: dict[str, dict[str, Any]]) -> bool:
    """Return whether a check failed, a row raised, or a part did not end by itself."""
    rows = [row for part in results.values() for row in part.values()]
    return any("error" in row or row.get("status") == "failed" for row in rows)


if __name__ == "__main__":
    main()
