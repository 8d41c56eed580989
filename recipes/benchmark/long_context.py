"""Peak memory and time of an update with one long sequence, by length and by what saves memory; the
plan beside it, also for lengths that were not run.

python recipes/benchmark/long_context.py [--lengths 8192 16384 32768] [--planned 131072]
    [--means ...]

What was measured before and is not measured again stays in results.json.

A Qwen2 with two layers of width 64 and a vocabulary of 2,048, in float32 on CPU ranks. Peaks are
those of torch's allocator on rank 0, as in memory.py; seconds are CPU seconds of an update on that
rank. "head in one piece" computes the log-probs of all tokens at once.
"""

import argparse
import gc
import json
import multiprocessing
import socket
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from report import keep, read
from workload import BUILD, model_in

from verlite.engine.fsdp import TrainEngine
from verlite.sizing.dry_engine import DryEngineSpec
from verlite.sizing.measure import Objective, Passes, PassRows, measure, rows_batch
from verlite.spec.roles import FSDPSpec, ModelSpec, OptimSpec

MEANS: dict[str, tuple[dict[str, Any], int]] = {
    "recomputation, the default": ({}, 1),
    "all activations kept": ({"enable_gradient_checkpointing": False}, 1),
    "products kept": ({"enable_gradient_checkpointing": "products"}, 1),
    "head in one piece": ({}, 1),
    "Ulysses over two ranks": ({}, 2),
}


def spec_of(means: str, length: int) -> tuple[DryEngineSpec, Passes]:
    options, ranks = MEANS[means]
    folder = model_in(
        BUILD / "long",
        vocab_size=2048,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=131072,
    )
    model = ModelSpec(path=str(folder), **options)
    rows = PassRows((length,), length - 1024)
    spec = DryEngineSpec(model, FSDPSpec(), OptimSpec(), "lm", ranks, ranks, "cpu", "float32")
    return spec, Passes(None, rows)


def head_of(means: str) -> AbstractContextManager[Any]:
    """Let the head compute all tokens at once where it is in one piece."""
    if "one piece" not in means:
        return nullcontext()
    return mock.patch("verlite.algorithms.logprobs._chunk_for", return_value=2**62)


def planned(means: str, length: int) -> int:
    """Return the plan's bytes for an update."""
    with head_of(means):
        return measure(*spec_of(means, length)).update


def real(means: str, length: int, rank: int, port: int) -> dict[str, float]:
    """Return rank's peak during the second update, and its CPU seconds."""
    spec, passes = spec_of(means, length)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=spec.ranks)
    live = most = 0

    def traced(call: Any) -> Any:
        nonlocal live, most
        with torch.profiler.profile(profile_memory=True) as profiler:
            result = call()
            gc.collect()
        events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
        most = live
        for event in sorted(events, key=lambda e: e.start_ns()):
            live += event.nbytes()
            most = max(most, live)
        return result

    engine = traced(
        lambda: TrainEngine(
            spec.model,
            spec.fsdp,
            spec.optim,
            head="lm",
            device="cpu",
            sequence_parallel=spec.sequence_parallel,
        )
    )
    assert passes.update is not None
    batch, micro = rows_batch(passes.update)
    with head_of(means):
        traced(lambda: engine.update(batch, micro, 1.0, Objective(with_entropy=False)))
        peak, began = most, time.process_time()
        engine.update(batch, micro, 1.0, Objective(with_entropy=False))
        took = time.process_time() - began
    dist.destroy_process_group()
    return {"peak": peak, "cpu_seconds": took}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 16384, 32768])
    parser.add_argument("--planned", type=int, nargs="*", default=[131072])
    parser.add_argument("--means", nargs="+", choices=MEANS, default=list(MEANS))
    args = parser.parse_args()
    found: dict[str, dict[str, Any]]
    found = read().get("parts", {}).get("long_context", {}).get("means", {})
    for means in args.means:
        ranks = MEANS[means][1]
        spec_of(means, 8192)  # writes the model
        rows = found.setdefault(means, {})
        with ProcessPoolExecutor(ranks, multiprocessing.get_context("spawn")) as pool:
            for length in args.lengths + args.planned:
                row: dict[str, Any] = {"planned": pool.submit(planned, means, length).result()}
                if length in args.lengths:
                    with socket.socket() as one:
                        one.bind(("127.0.0.1", 0))
                        port = one.getsockname()[1]
                    asked = [pool.submit(real, means, length, r, port) for r in range(ranks)]
                    row |= asked[0].result()
                rows[str(length)] = row
                print(means, length, json.dumps(row), flush=True)
        found[means] = {length: rows[length] for length in sorted(rows, key=int)}
        keep("long_context", {"means": {name: found[name] for name in MEANS if name in found}})


if __name__ == "__main__":
    main()
