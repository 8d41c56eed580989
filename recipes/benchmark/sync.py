"""The parts of a weight sync (publishing, two fingerprints, load, log-prob probe) over every
transport, compared with one plain copy of the same bytes.

python recipes/benchmark/sync.py [--rounds 5] [--models w25 w128] [--engines hf vllm]
    [--transports shared_memory collective files ipc]

Runs in one process with the workers' calls. The parts add up to the whole sync, except for the
engine's wake-up, which does not exist on CPUs.
"""

import argparse
import json
import multiprocessing
import shutil
import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from itertools import count
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from machine import gemm_flops, seconds
from report import keep
from torch import Tensor
from workload import BUILD, model_of, w128

from verlite.engine.fsdp import TrainEngine
from verlite.rollout.batched import BatchedEngine, build_engine
from verlite.spec.roles import FSDPSpec, GenerationSpec, ModelSpec
from verlite.spec.weight_routes import CPU_STREAM_BYTES
from verlite.weights.buckets import BucketFiles
from verlite.weights.collective import WeightReceiver, WeightSender
from verlite.weights.files import FolderWriter, read_folder
from verlite.weights.fingerprint import sum_of_hashes
from verlite.weights.ipc import BucketStream, Publisher
from verlite.weights.probe import probe_limit
from verlite.weights.shared_memory import MemoryFiles
from verlite.weights.transport import publish

Named = Iterable[tuple[str, Tensor]]
LONGEST = 256  # tokens of a sequence of the engine

MODELS = {
    "w25": lambda: model_of("w25"),
    "w128": w128,
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


class SharedMemory:
    """One copy in memory, which the engine maps. The base of the other transports."""

    def __init__(self) -> None:
        self.bytes = 0
        self.pool = ThreadPoolExecutor(1)

    def publish(self, weights: Named, bucket_bytes: int, version: int) -> None:
        self.files = MemoryFiles()
        self.bytes = publish(weights, [self.files], bucket_bytes)

    def named(self) -> Named:
        return BucketFiles(tuple(self.files.paths))

    def release(self) -> None:
        self.files.close()


class Collective(SharedMemory):
    """A broadcast over gloo to a receiver in a thread, which keeps a copy in memory."""

    def __init__(self) -> None:
        super().__init__()
        cpu = torch.device("cpu")
        self.sender, self.receiver = WeightSender("127.0.0.1", 1, cpu), WeightReceiver(cpu)

    def publish(self, weights: Named, bucket_bytes: int, version: int) -> None:
        received = self.pool.submit(self.receiver.receive, self.sender.offer(), 1)
        self.bytes = publish(weights, [self.sender], bucket_bytes)
        self.files = received.result()


class Files(SharedMemory):
    """Files in a folder on a disk. A new version replaces the one before the last."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = BUILD / "weights"

    def publish(self, weights: Named, bucket_bytes: int, version: int) -> None:
        self.version = version
        writer = FolderWriter(self.folder, version, fingerprint=0)
        self.bytes = publish(weights, [writer], bucket_bytes)

    def named(self) -> Named:
        return read_folder(self.folder, self.version, fingerprint=0)

    def release(self) -> None:
        """Nothing: `publish` removes old versions."""


class Ipc(SharedMemory):
    """Two buffers, which the engine reads while a thread of the trainer fills them."""

    def publish(self, weights: Named, bucket_bytes: int, version: int) -> None:
        self.publisher = Publisher(torch.device("cpu"))
        self.published = self.pool.submit(publish, weights, [self.publisher], bucket_bytes)

    def named(self) -> Named:
        return BucketStream((self.publisher.address,))

    def release(self) -> None:
        self.bytes = self.published.result()
        self.publisher.close()


TRANSPORTS = {
    "shared_memory": SharedMemory,
    "collective": Collective,
    "files": Files,
    "ipc": Ipc,
}


def sync(
    trainer: TrainEngine,
    engine: BatchedEngine,
    version: int,
    bucket_bytes: int,
    dtype: torch.dtype,
    transport: SharedMemory | None = None,
) -> dict[str, float]:
    """Return the seconds of one sync's parts, in order, its bytes, and the probe's gap in nats.

    transport: shared_memory by default.
    """
    transport = transport or SharedMemory()
    results: dict[str, Any] = {}
    hashed = 0.0

    def hashing(*args: Any) -> int:
        nonlocal hashed
        began = time.perf_counter()
        found = sum_of_hashes(*args)
        hashed += time.perf_counter() - began
        return found

    def timed(call: Callable[[], object], name: str = "") -> float:
        return seconds(lambda: results.__setitem__(name, call()))

    found = {"trainer_fingerprint": timed(lambda: trainer.fingerprint(dtype), "expected")}
    limit = probe_limit(0.05, str(dtype).removeprefix("torch."))
    found["probe"] = timed(lambda: trainer.probe(limit, LONGEST), "probe")
    weights = trainer.export(dtype, snapshot=False, target=trainer.device)
    found["export"] = timed(lambda: transport.publish(weights, bucket_bytes, version))
    with mock.patch("verlite.rollout.engines.vllm_worker.sum_of_hashes", hashing):
        whole = timed(
            lambda: engine.load_weights(transport.named(), version, results["expected"]), "load"
        )
        while_loading, hashed = hashed, 0.0
        again = timed(engine.fingerprint, "again")  # the same work as inside load_weights
        while_loading -= hashed  # vLLM's weights are summed as they are packed
    found["engine_fingerprint"] = again + while_loading
    found["load"] = whole - found["engine_fingerprint"]
    engine.wake("kv_cache")
    found["probe"] += timed(lambda: engine.check_log_probs(results["probe"]), "gap")
    found["release"] = timed(transport.release)
    return found | {"bytes": transport.bytes, "gap": results["gap"].nats}


def measure(name: str, engine: str, transports: list[str], rounds: int) -> dict[str, dict]:
    """Return medians of each transport; syncs and copies alternate, and the first of each is not
    counted.

    Run it in a separate process, because vLLM destroys the process group when it ends.
    """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model, rollout = ModelSpec(path=str(MODELS[name]())), GenerationSpec(enforce_eager=True)
    trainer = TrainEngine(model, FSDPSpec(), device="cpu")
    built = build_engine(engine, model, rollout, LONGEST, torch.device("cpu"), 0)
    copy = Copy(sum(parameter.nbytes for parameter in trainer.parameters))
    syncs: dict[str, list[dict[str, float]]] = {transport: [] for transport in transports}
    made = {transport: TRANSPORTS[transport]() for transport in transports}
    for version in count():
        transport = transports[version % len(transports)]
        bucket_bytes = rollout.sync_bucket_mb << 20
        if transport == "ipc":
            bucket_bytes = min(bucket_bytes, CPU_STREAM_BYTES)
        one = sync(trainer, built, version, bucket_bytes, torch.float32, made[transport])
        one |= {"copy": seconds(copy), "fresh": seconds(copy.fresh)}
        syncs[transport].append(one)
        if version + 1 == (rounds + 1) * len(transports):
            break
    built.close()
    shutil.rmtree(BUILD / "weights", ignore_errors=True)  # of the transport files
    return {
        f"{name}, {engine}" + (f", {transport}" if transport != "ipc" else ""): medians(found[1:])
        for transport, found in syncs.items()
    }


def medians(syncs: list[dict[str, float]]) -> dict[str, Any]:
    """Return the medians of one transport's syncs, and those of ratios within each sync."""
    parts = [part for part in syncs[0] if part not in ("bytes", "gap", "copy", "fresh")]
    for one in syncs:  # the probe has its own limit: a share of a training step
        one["whole"] = sum(one[part] for part in parts if part != "probe")
        one["fingerprints"] = one["trainer_fingerprint"] + one["engine_fingerprint"]

    def median(part: str, of: str | None = None) -> float:
        return statistics.median(one[part] / (one[of] if of else 1.0) for one in syncs)

    return {
        "bytes": syncs[0]["bytes"],
        "copy_seconds": median("copy"),
        "fresh_copy_seconds": median("fresh"),
        "seconds": median("whole"),
        "parts": {part: median(part) for part in parts},
        "vs_memcpy": median("whole", "copy"),
        "vs_fresh_memcpy": median("whole", "fresh"),
        "fingerprint_share": median("fingerprints", "whole"),
        "probe_vs_memcpy": median("probe", "copy"),
        "probe_gap": max(one["gap"] for one in syncs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--engines", nargs="+", choices=("hf", "vllm"), default=["hf", "vllm"])
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=list(TRANSPORTS))
    args = parser.parse_args()
    found: dict[str, dict] = {}
    for name in args.models:
        for engine in args.engines:
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                found |= pool.submit(measure, name, engine, args.transports, args.rounds).result()
    kept = {"rounds": args.rounds, "gemm_flops": gemm_flops(), "syncs": found}
    keep("sync", kept)
    print(json.dumps(kept, indent=1))


if __name__ == "__main__":
    main()
