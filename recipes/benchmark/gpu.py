"""Speed on one GPU: training, log-probs, weight sync, generation, and the memory of each.

python recipes/benchmark/gpu.py [--parts 0.5b-training 0.5b-hf ...] [--out FOLDER]
python recipes/benchmark/gpu.py --list
python recipes/benchmark/gpu.py --parts tiny-training tiny-hf --device cpu
python recipes/benchmark/gpu.py --take FOLDER/gpu.json

It needs torch and transformers, but neither Ray nor an installed verlite; bare.py says what else a
machine lacks and how to bring it. Each part runs in its own process, for at most the seconds that
--list shows, always under nine minutes. A part that takes longer is killed, and the next one has
its own time in full. FOLDER/gpu.json (FOLDER is $OUT, else build/) is written after every row, so
an early end loses nothing. A row that does not fit into the remaining time is skipped and marked; a
row that fails leaves its error. Each part measured on a GPU goes to results.json too. --take does
that with a gpu.json that was brought from another machine.

Models have the shapes of Qwen2.5 and random weights. In a part with an engine, trainer and engine
share the device as in a run.

FLOPs are model FLOPs. A pass counts 2 per weight and token (output layer: trained tokens only) plus
2 x layers x heads x head size x length^2 per sequence (half of the square, because attention is
causal). Training counts three passes; recomputation by gradient checkpointing is not counted. MFU
is relative to the GPU's dense bfloat16 peak in its data sheet.
"""

import bare

bare.prepare()

import argparse
import importlib.util
import os
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from generation import sampled
from parts import Part, Results, read, run_parts, show
from report import RESULTS, keep
from sync import sync
from training import loss
from workload import BUILD, model_in

from verlite.config.schema import FSDPConfig, ModelConfig, OptimConfig, RolloutConfig
from verlite.engine.fsdp import TrainEngine
from verlite.engine.micro import MicroBatching
from verlite.protocol.data import DataProto
from verlite.rollout.build import build_engine, engine_dtype

PEAKS = {
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
}
"""Dense bfloat16 FLOP/s in NVIDIA's data sheets, by the driver's device name; other variants of
these GPUs have other peaks."""

_QWEN = {
    "vocab_size": 151_936,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
}
SHAPES: dict[str, dict[str, Any]] = {
    "0.5b": {
        **_QWEN,
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "intermediate_size": 4864,
    },
    "1.5b": {
        **_QWEN,
        "hidden_size": 1536,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "intermediate_size": 8960,
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
# Tokens per micro-batch; sequences per update and the longest; prompts, samples per prompt, tokens
# per prompt and per response.
SIZES = {"training": ((4096, 16_384), 48, 2048), "generation": (32, 8, 128, 256)}
TINY_SIZES = {"training": ((256, 1024), 12, 128), "generation": (4, 2, 16, 48)}
ROUNDS = 3


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
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            found = call()
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


def rows(sequences: int, longest: int) -> DataProto:
    """Return sequences of longest/4 to longest tokens, with prompts of an eighth of the longest."""
    prompt, generator = longest // 8, torch.Generator().manual_seed(0)
    lengths = torch.linspace(longest // 4, longest, sequences).long()
    attention = (torch.arange(longest)[None] < lengths[:, None]).long()
    response_mask = attention[:, prompt:]
    return DataProto.from_dict(
        {
            "input_ids": torch.randint(3, 128, attention.shape, generator=generator) * attention,
            "attention_mask": attention,
            "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
            "response_mask": response_mask,
            "advantages": torch.randn(sequences, 1, generator=generator) * response_mask,
        }
    )


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


def machine(results: Results, device_name: str) -> None:
    """The part "machine": the device's name, its rate of a large matrix product, and of copies."""
    row, device = Rows(results, torch.device(device_name)), torch.device(device_name)
    is_cuda = device.type == "cuda"

    def products() -> dict[str, Any]:
        size, dtype = (8192, torch.bfloat16) if is_cuda else (1024, torch.float32)
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        seconds = median_seconds(lambda: torch.mm(a, b), device)
        return {**_device(device), "seconds": seconds, "flops": 2 * size**3 / seconds}

    row("matrix product", 5, products)
    row("copies", 5, lambda: copy_rates(device, (2 << 30) if is_cuda else (64 << 20)))


def _device(device: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {"device": name, "torch": torch.__version__, "peak_flops": PEAKS.get(name)}


@dataclass
class Setup:
    """A shape's model and its trainer, offloaded as in a run."""

    shape: dict[str, Any]
    sizes: dict[str, tuple]
    model: ModelConfig
    trainer: TrainEngine

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.trainer.parameters)


def load(row: Rows, name: str) -> Setup | None:
    """Build a shape's model and trainer as the row "load"; None if that fails."""
    is_cuda = row.device.type == "cuda"
    backends = "cpu:gloo,cuda:nccl" if is_cuda else "gloo"
    dist.init_process_group(backends, store=dist.HashStore(), rank=0, world_size=1)
    found: list[Setup] = []

    def build() -> dict[str, Any]:
        shape, dtype = SHAPES[name], engine_dtype("auto", row.device)
        dtype_name = str(dtype).removeprefix("torch.")
        folder = model_in(BUILD / f"qwen-{name}", str(row.device), dtype_name, **shape)
        model = ModelConfig(path=str(folder))
        offload = FSDPConfig(param_offload=True, optimizer_offload=True)
        trainer = TrainEngine(
            model, offload, OptimConfig(lr=1e-6), total_training_steps=1000, device=row.device
        )
        found.append(Setup(shape, TINY_SIZES if name == "tiny" else SIZES, model, trainer))
        return {"parameters": found[0].parameters, **_device(row.device)}

    row("load", 30, build)
    return found[0] if found else None


def training(results: Results, device_name: str, name: str) -> None:
    """The part "SHAPE-training": updates, log-prob passes, offload and onload."""
    row, device = Rows(results, torch.device(device_name)), torch.device(device_name)
    setup = load(row, name)
    if setup is None:
        return
    trainer = setup.trainer
    micro_batches, sequences, longest = setup.sizes["training"]
    batch = rows(sequences, longest)
    tokens = int(batch.batch["attention_mask"].sum())
    flops = forward_flops(setup.shape, setup.parameters, batch)
    peak = _device(device)["peak_flops"]

    def speed(call: Callable[[], object], passes: int) -> dict[str, Any]:
        took = median_seconds(call, device)
        rate = passes * flops / took
        found = {"seconds": took, "tokens": tokens, "tokens_per_s": tokens / took, "flops": rate}
        return found | ({"mfu": rate / peak} if peak else {})

    def update(cut: MicroBatching) -> dict[str, Any]:
        trainer.onload(optimizer=True)
        return speed(lambda: trainer.update(batch, cut, 1.0, loss), 3)

    def log_probs(cut: MicroBatching) -> dict[str, Any]:
        trainer.offload()  # the optimizer stays in host memory
        trainer.onload()
        return speed(lambda: trainer.forward(batch, cut, 1.0, with_entropy=True), 1)

    for most in micro_batches:
        cut = MicroBatching(max_tokens=most)
        row(f"update, {most} tokens a pass", 40, lambda cut=cut: update(cut))
        row(f"log-probs, {most} tokens a pass", 20, lambda cut=cut: log_probs(cut))
    row("offload and onload", 20, lambda: moved(trainer))


def moved(trainer: TrainEngine) -> dict[str, float]:
    """Return the seconds of moving parameters and optimizer to the host and back."""
    trainer.onload(optimizer=True)
    began = time.perf_counter()
    trainer.offload()
    out = time.perf_counter() - began
    trainer.onload(optimizer=True)
    back = time.perf_counter() - began - out
    trainer.offload()
    return {"seconds": out + back, "offload_seconds": out, "onload_seconds": back}


def generation(results: Results, device_name: str, name: str, engine: str) -> None:
    """The part "SHAPE-ENGINE": start, weight sync, generation, sleep and wake of an engine, and a
    log-prob pass after it."""
    row = Rows(results, torch.device(device_name))
    setup = load(row, name)
    if setup is not None:
        needs = {"hf": 60, "vllm": 120}[engine]
        row(f"engine {engine}", needs, lambda: generate(engine, setup))


def generate(engine: str, setup: Setup) -> dict[str, Any]:
    """Start an engine while the trainer is offloaded, sync weights, sample, and put the engine to
    sleep."""
    trainer = setup.trainer
    dtype = engine_dtype("auto", trainer.device)
    prompts, samples, prompt_tokens, new_tokens = setup.sizes["generation"]
    trainer.offload()
    rollout, began = RolloutConfig(), time.perf_counter()
    length = prompt_tokens + new_tokens
    built = build_engine(engine, setup.model, rollout, length, trainer.device, 0)
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


ENGINES = ("hf", "vllm")


def all_parts(device: str, seconds: float | None = None) -> dict[str, Part]:
    """Return every part by name. `seconds` replaces their own time limits."""
    found = [Part("machine", 90, machine, (device,))]
    for shape, scale in (("0.5b", 1.0), ("1.5b", 1.5), ("tiny", 0.5)):
        found.append(Part(f"{shape}-training", 240 * scale, training, (device, shape)))
        for engine, limit in zip(ENGINES, (180, 320), strict=True):
            name = f"{shape}-{engine}"
            found.append(Part(name, limit * scale, generation, (device, shape, engine)))
    return {part.name: replace(part, seconds=seconds or part.seconds) for part in found}


DEFAULT = [name for name in all_parts("cuda") if not name.startswith("tiny")]


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
    if "parameters" in row:
        notes.append(f"{row['parameters'] / 1e6:,.1f}M parameters on {row['device']}")
    elif "flops" in row and "mfu" not in row:
        notes.append(f"{row['flops'] / 1e12:,.2f} TFLOP/s")
    if "sync_seconds" in row:
        rate = row["sync"]["bytes"] / row["sync_seconds"] / 1e9
        notes.append(f"sync {row['sync_seconds']:.2f} s, {rate:.1f} GB/s")
    rates = {key: value for key, value in row.items() if "_to_" in key or key == "copy"}
    notes += [f"{key.replace('_', ' ')} {value / 1e9:.1f} GB/s" for key, value in rates.items()]
    return ", ".join(notes)


def keep_part(part: str, measured: dict[str, Any], path: Path) -> None:
    """Store a part in results.json, unless all of it failed."""
    if any("error" not in row for name, row in measured.items() if name != "process"):
        keep(f"gpu_{part}", {"rows": measured}, path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=all_parts("cuda"), default=DEFAULT)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, help="time limit of each part instead of its own")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or BUILD))
    parser.add_argument("--list", action="store_true", help="show the parts and their time limits")
    parser.add_argument("--take", type=Path, help="store the results of this gpu.json")
    args = parser.parse_args()
    parts = all_parts(args.device, args.seconds)
    if args.list:
        limits = [(name, f"{part.seconds:.0f}") for name, part in parts.items()]
        show(("part", "seconds at most"), limits)
        return
    if args.take:
        for part, measured in read(args.take).items():
            keep_part(part, measured, RESULTS)
        return
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU. Use --device cpu --parts tiny-training tiny-hf")
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "gpu.json"
    path.unlink(missing_ok=True)
    # A CPU's figures stay out of the published results.
    kept = RESULTS if args.device == "cuda" else args.out / "results.json"
    chosen = [parts[name] for name in args.parts]
    if not importlib.util.find_spec("vllm"):
        chosen = [part for part in chosen if not part.name.endswith("-vllm")]
    run_parts(chosen, path, lambda part, measured: keep_part(part, measured, kept))
    show(HEAD, summary(read(path)))


if __name__ == "__main__":
    main()
