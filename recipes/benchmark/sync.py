"""The parts of a weight sync (export into buckets, two fingerprints, load) compared with one plain
copy of the same bytes.

python recipes/benchmark/sync.py [--rounds 5] [--models w25 w128] [--engines hf vllm]

Runs in one process with the workers' calls. The parts add up to the whole sync, except for the
engine's wake-up, which does not exist on CPUs.
"""

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from machine import gemm_flops, seconds
from report import keep
from workload import BUILD, VOCABULARY, model_in, model_of

from verlite.config.schema import FSDPConfig, ModelConfig, RolloutConfig
from verlite.engine.fsdp import TrainEngine
from verlite.rollout.batched import BatchedEngine
from verlite.rollout.build import build_engine
from verlite.weights.buckets import read_buckets, write_buckets
from verlite.weights.fingerprint import tensor_fingerprint

MODELS = {
    "w25": lambda: model_of("w25"),
    "w128": lambda: model_in(
        BUILD / "w128",
        vocab_size=VOCABULARY,
        max_position_embeddings=1024,
        hidden_size=1024,
        num_hidden_layers=11,
        intermediate_size=2816,
        num_attention_heads=16,
        num_key_value_heads=8,
    ),
}


class Copy:
    """Copies as many bytes with one thread into allocated memory."""

    def __init__(self, size: int) -> None:
        self.source, self.target = (
            torch.ones(size, dtype=torch.uint8),
            torch.zeros(size, dtype=torch.uint8),
        )

    def __call__(self) -> None:
        self._with_one_thread(lambda: self.target.copy_(self.source))

    def fresh(self) -> None:
        """Copy into newly allocated memory, as every export does."""
        self._with_one_thread(self.source.clone)

    def _with_one_thread(self, call: Callable[[], object]) -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        call()
        torch.set_num_threads(threads)


def sync(
    trainer: TrainEngine, engine: BatchedEngine, version: int, bucket_bytes: int, dtype: torch.dtype
) -> dict[str, float]:
    """Return the seconds of one sync's parts, in order, and its bytes."""
    results: dict[str, Any] = {}
    hashed = 0.0

    def hashing(*args: Any) -> int:
        nonlocal hashed
        began = time.perf_counter()
        found = tensor_fingerprint(*args)
        hashed += time.perf_counter() - began
        return found

    def timed(call: Callable[[], object], name: str) -> float:
        return seconds(lambda: results.__setitem__(name, call()))

    found = {"trainer_fingerprint": timed(lambda: trainer.fingerprint(dtype), "expected")}
    found["export"] = timed(
        lambda: write_buckets(trainer.export(dtype, snapshot=False), bucket_bytes), "buckets"
    )
    buckets = results["buckets"]
    with mock.patch("verlite.rollout.engines.vllm_worker.tensor_fingerprint", hashing):
        whole = timed(
            lambda: engine.load_weights(read_buckets(buckets.paths), version, results["expected"]),
            "load",
        )
        while_loading, hashed = hashed, 0.0
        again = timed(engine.fingerprint, "again")  # the same work as inside load_weights
        while_loading -= hashed  # vLLM's weights are summed as they are packed
    found["engine_fingerprint"] = again + while_loading
    found["load"] = whole - found["engine_fingerprint"]
    found["release"] = timed(buckets.close, "closed")
    return found | {"bytes": buckets.bytes}


def measure(name: str, engine: str, rounds: int) -> dict:
    """Return medians; syncs and copies alternate, and the first of each is not counted.

    Run it in a separate process, because vLLM destroys the process group when it ends.
    """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model, rollout = ModelConfig(path=str(MODELS[name]())), RolloutConfig(enforce_eager=True)
    trainer = TrainEngine(model, FSDPConfig(), device="cpu")
    built = build_engine(engine, model, rollout, 256, torch.device("cpu"), 0)
    copy = Copy(sum(parameter.nbytes for parameter in trainer.parameters))
    syncs, copies, fresh = [], [], []
    for version in range(rounds + 1):
        syncs.append(sync(trainer, built, version, rollout.sync_bucket_mb << 20, torch.float32))
        copies.append(seconds(copy))
        fresh.append(seconds(copy.fresh))
    built.close()
    syncs, copies, fresh = syncs[1:], copies[1:], fresh[1:]
    parts = [part for part in syncs[0] if part != "bytes"]
    wholes = [sum(one[part] for part in parts) for one in syncs]
    return {
        "bytes": syncs[0]["bytes"],
        "copy_seconds": statistics.median(copies),
        "fresh_copy_seconds": statistics.median(fresh),
        "seconds": statistics.median(wholes),
        "parts": {part: statistics.median(one[part] for one in syncs) for part in parts},
        "vs_memcpy": statistics.median(
            whole / one for whole, one in zip(wholes, copies, strict=True)
        ),
        "vs_fresh_memcpy": statistics.median(
            whole / one for whole, one in zip(wholes, fresh, strict=True)
        ),
        "fingerprint_share": statistics.median(
            (one["trainer_fingerprint"] + one["engine_fingerprint"]) / whole
            for whole, one in zip(wholes, syncs, strict=True)
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--engines", nargs="+", choices=("hf", "vllm"), default=["hf", "vllm"])
    args = parser.parse_args()
    found = {}
    for name in args.models:
        for engine in args.engines:
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                found[f"{name}, {engine}"] = pool.submit(
                    measure, name, engine, args.rounds
                ).result()
    kept = {"rounds": args.rounds, "gemm_flops": gemm_flops(), "syncs": found}
    keep("sync", kept)
    print(json.dumps(kept, indent=1))


if __name__ == "__main__":
    main()
