"""One GPU in under nine minutes: training, log-probs, weight export and sync, generation, and the
memory of each. Needs no Ray.

python recipes/benchmark/gpu.py [--shapes 0.5b 1.5b] [--engines hf vllm] [--seconds 520] [--out
FOLDER] python recipes/benchmark/gpu.py --shapes tiny --device cpu --engines hf

Models have the shapes of Qwen2.5 and random weights. Each shape runs in its own process, in which
trainer and engine share the device as in a run. FOLDER/gpu.json (FOLDER is $OUT, else build/) is
written after every part, so an early end loses nothing. A part that does not fit into the remaining
time is skipped and marked; a part that fails leaves its error.

FLOPs are model FLOPs. A pass counts 2 per weight and token (output layer: trained tokens only) plus
2 x layers x heads x head size x length^2 per sequence (half of the square, because attention is
causal). Training counts three passes; recomputation by gradient checkpointing is not counted. MFU
is relative to the GPU's dense bfloat16 peak in its data sheet.
"""

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from generation import sampled
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
TINY_SIZES = {"training": ((256, 1024), 12, 128), "generation": (4, 2, 8, 16)}
ROUNDS = 3


class Parts:
    """Runs parts while time remains, and writes all results after each."""

    def __init__(self, path: Path, shape: str, device: torch.device, deadline: float) -> None:
        self.path, self.shape, self.device, self.deadline = path, shape, device, deadline

    def __call__(self, name: str, needs: float, call: Callable[[], dict[str, Any]]) -> None:
        """Run one part, which takes about `needs` seconds, and record its peak memory."""
        began, left = time.time(), self.deadline - time.time()
        if needs > left:
            self._write(
                name, {"skipped": f"takes about {needs:.0f} s, and {max(left, 0):.0f} s were left"}
            )
            return
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        try:
            found = call()
        except Exception as error:  # a failed part must not stop the others
            found = {"error": f"{type(error).__name__}: {error}"}
        self._write(name, found | {"part_seconds": time.time() - began, **self._memory()})

    def _memory(self) -> dict[str, float]:
        if self.device.type != "cuda":
            return {"peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
        free, total = torch.cuda.mem_get_info()  # includes vLLM's memory
        return {
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
            "held_gib": torch.cuda.memory_allocated() / 2**30,
            "used_gib": (total - free) / 2**30,
        }

    def _write(self, name: str, found: dict[str, Any]) -> None:
        known = json.loads(self.path.read_text()) if self.path.exists() else {}
        known.setdefault(self.shape, {})[name] = found
        self.path.write_text(json.dumps(known, indent=1) + "\n")
        print(f"{self.shape} {name}: {json.dumps(found)}", flush=True)


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


def machine(device: torch.device) -> dict[str, Any]:
    """Return the device's name and memory, and the FLOP/s of a large matrix product."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    rate = 2 * size**3 / median_seconds(lambda: torch.mm(a, b), device)
    return {
        "device": name,
        "torch": torch.__version__,
        "peak_flops": PEAKS.get(name),
        "gemm_flops": rate,
    }


def measure(name: str, args: argparse.Namespace, path: Path, deadline: float) -> None:
    """Run all parts of one shape."""
    device, shape, sizes = (
        torch.device(args.device),
        SHAPES[name],
        TINY_SIZES if name == "tiny" else SIZES,
    )
    part, cuda = Parts(path, name, device, deadline), device.type == "cuda"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo", store=dist.HashStore(), rank=0, world_size=1
    )
    dtype, held, known = engine_dtype("auto", device), {}, {}

    def load() -> dict[str, Any]:
        folder = model_in(
            BUILD / f"qwen-{name}", args.device, str(dtype).removeprefix("torch."), **shape
        )
        held["model"] = ModelConfig(path=str(folder))
        offload = FSDPConfig(param_offload=True, optimizer_offload=True)
        held["trainer"] = TrainEngine(
            held["model"], offload, OptimConfig(lr=1e-6), total_training_steps=1000, device=device
        )
        return {"parameters": sum(parameter.numel() for parameter in held["trainer"].parameters)}

    def machine_part() -> dict[str, Any]:
        known.update(machine(device))
        return dict(known)

    part("machine", 5, machine_part)
    part("load", 60, load)
    if "trainer" not in held:
        return
    trainer: TrainEngine = held["trainer"]
    parameters = sum(parameter.numel() for parameter in trainer.parameters)
    micro_batches, sequences, longest = sizes["training"]
    batch = rows(sequences, longest)
    tokens, flops = (
        int(batch.batch["attention_mask"].sum()),
        forward_flops(shape, parameters, batch),
    )

    def speed(call: Callable[[], object], passes: int) -> dict[str, Any]:
        took = median_seconds(call, device)
        rate = passes * flops / took
        mfu = {"mfu": rate / known["peak_flops"]} if known.get("peak_flops") else {}
        return {
            "seconds": took,
            "tokens": tokens,
            "tokens_per_s": tokens / took,
            "flops": rate,
            **mfu,
        }

    def update(cut: MicroBatching) -> dict[str, Any]:
        trainer.onload(optimizer=True)
        return speed(lambda: trainer.update(batch, cut, 1.0, loss), 3)

    def log_probs(cut: MicroBatching) -> dict[str, Any]:
        trainer.offload()  # the optimizer stays in host memory
        trainer.onload()
        return speed(lambda: trainer.forward(batch, cut, 1.0, with_entropy=True), 1)

    for most in micro_batches:
        cut = MicroBatching(max_tokens=most)
        part(f"update, {most} tokens a pass", 40, lambda cut=cut: update(cut))
        part(f"log-probs, {most} tokens a pass", 20, lambda cut=cut: log_probs(cut))

    def moved() -> dict[str, Any]:
        trainer.onload(optimizer=True)
        began = time.perf_counter()
        trainer.offload()
        out = time.perf_counter() - began
        trainer.onload(optimizer=True)
        found = {"offload_seconds": out, "onload_seconds": time.perf_counter() - began - out}
        trainer.offload()
        return found

    part("offload and onload", 20, moved)
    for engine in args.engines:
        part(
            f"engine {engine}",
            {"hf": 60, "vllm": 120}[engine],
            lambda engine=engine: generate(engine, held["model"], trainer, dtype, sizes),
        )


def generate(
    engine: str,
    model: ModelConfig,
    trainer: TrainEngine,
    dtype: torch.dtype,
    sizes: dict[str, tuple],
) -> dict[str, Any]:
    """Start an engine while the trainer is offloaded, sync weights, sample, and put the engine to
    sleep."""
    prompts, samples, prompt_tokens, new_tokens = sizes["generation"]
    trainer.offload()
    rollout, began = RolloutConfig(), time.perf_counter()
    built = build_engine(engine, model, rollout, prompt_tokens + new_tokens, trainer.device, 0)
    found: dict[str, Any] = {"start_seconds": time.perf_counter() - began}
    try:
        trainer.onload()  # as workers.actor does before an export
        syncs = [
            sync(trainer, built, version, rollout.sync_bucket_mb << 20, dtype)
            for version in range(3)
        ]
        trainer.offload()
        ids = torch.randint(
            3, 128, (prompts, prompt_tokens), generator=torch.Generator().manual_seed(0)
        ).tolist()
        took = median_seconds(lambda: sampled(built, ids, samples, new_tokens), trainer.device)
        began = time.perf_counter()
        built.sleep()
        slept = time.perf_counter()
        built.wake("weights")
        found |= {"sleep_seconds": slept - began, "wake_seconds": time.perf_counter() - slept}
    finally:
        built.close()
    return found | {
        "sync": {key: statistics.median(one[key] for one in syncs) for key in syncs[0]},
        "tokens": prompts * samples * new_tokens,
        "tokens_per_s": prompts * samples * new_tokens / took,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["0.5b", "1.5b"])
    parser.add_argument("--engines", nargs="+", choices=("hf", "vllm"), default=["hf", "vllm"])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=520.0)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or BUILD))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    path, began = args.out / "gpu.json", time.time()
    path.unlink(missing_ok=True)
    for number, name in enumerate(args.shapes, 1):
        deadline = began + args.seconds * number / len(args.shapes)
        process = multiprocessing.get_context("spawn").Process(
            target=measure, args=(name, args, path, deadline)
        )
        process.start()
        process.join(began + args.seconds - time.time())
        if process.exitcode is None:
            process.kill()  # a part hangs; earlier results are already written


if __name__ == "__main__":
    main()
