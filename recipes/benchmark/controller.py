"""Cost of controller calls to 2, 8, 32 and 64 workers, their start, the driver's cost of calls to
1,000 ranks, and the bytes that pass through the driver per sample.

python recipes/benchmark/controller.py [--workers 2 8 32 64] [--samples 1024] [--longest 8192]
[--rounds 9] [--ranks 1000] [--new-processes 16]

Workers are processes with a small share of a CPU that ignore their input. Plain Ray calls to the
same actors, alternating with verlite's, measure the cost of Ray itself. Sample lengths are
log-normal: half are below an eighth of the longest.

The driver's cost of a call to 1,000 ranks is measured with 1,000 ranks that are few processes: each
process answers for many ranks. So the driver sends, receives and joins as much as with 1,000
processes, but the time of the call itself has no meaning. The same messages without verlite, in
turns, are Ray's part of it.

Workers import what an actor of a run imports. They are forks of one process, as in a run on a
machine without GPUs. --new-processes 16 starts 16 of them as forks, and then 16 as processes of
their own, as on a cluster that the run has joined. --workers without values leaves the rest out.
"""

import argparse
import copy
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import psutil
import torch
from machine import seconds
from report import keep, read

from verlite.controller.cluster import Cluster, connect
from verlite.controller.dispatch import register, split_rows
from verlite.controller.placement import reserve
from verlite.controller.worker import Worker
from verlite.controller.worker_group import WorkerGroup, group, ready, spawn
from verlite.controller.worker_handle import process_infos
from verlite.controller.worker_start import prestart
from verlite.protocol.data import DataProto, object_array

CALLS = {"nothing": 3, "make": 1, "take": 1}
"""Calls in one GRPO step: export, load and release take no batch; generate returns samples; update
takes them."""
PROMPT = 256
IMPORTED = ("verlite.workers.actor", "verlite.engine.fsdp")
KEPT = ("prompt_ids", "response_ids", "response_mask", "rollout_log_probs")


class Idle(Worker):
    """A worker that only receives and returns data."""

    @register("all")
    def nothing(self) -> None:
        """A call without a batch."""

    @register("split", keep_remote=KEPT)
    def make(self, asked: DataProto) -> DataProto:
        """Return samples of the given lengths. Tokens stay on the worker; a few numbers per row are
        sent back."""
        lengths = asked.batch["response_length"].tolist()
        numbers = {name: torch.zeros(len(asked)) for name in ("raw_scores", "reward_seconds")}
        return DataProto.from_dict(
            numbers | {"sampled_tokens": asked.batch["response_length"]},
            {
                "prompt_ids": [np.zeros(PROMPT, np.int32) for _ in lengths],
                "response_ids": [np.zeros(length, np.int32) for length in lengths],
                "response_mask": [np.ones(length, np.int8) for length in lengths],
                "rollout_log_probs": [np.zeros(length, np.float32) for length in lengths],
                "status": ["done"] * len(asked),
                "reward_parts": [{"acc": 1.0} for _ in lengths],
            },
        )

    @register("split")
    def take(self, batch: DataProto) -> dict[str, float]:
        """Fetch the tokens of the rows, as an update does before it computes."""
        return {"tokens": float(sum(len(ids) for ids in batch.non_tensor_batch["response_ids"]))}


def lengths(samples: int, longest: int) -> np.ndarray:
    """Return response lengths in tokens."""
    drawn = np.random.default_rng(0).lognormal(np.log(longest / 8), 1.0, samples)
    return drawn.clip(1, longest).astype(np.int64)


def asked(response_lengths: np.ndarray) -> DataProto:
    """Return the driver's batch before generation."""
    count = len(response_lengths)
    numbers = {
        "response_length": torch.from_numpy(response_lengths),
        "prompt_length": torch.full((count,), PROMPT),
    }
    return DataProto.from_dict(
        numbers, {"uid": object_array([str(row // 8) for row in range(count)])}
    )


def made(idle: Idle, wanted: DataProto) -> DataProto:
    """Return the driver's batch after generation, reordered so that rows go to other workers than
    the ones that produced them."""
    batch = wanted.union(idle.make(wanted)).with_batch(advantages=torch.zeros(len(wanted), 1))
    workers, order = len(group(idle)), np.random.default_rng(1).permutation(len(wanted))
    return batch.select(non_tensor_batch_keys=KEPT).with_meta(
        assignment=[part.tolist() for part in np.array_split(order, workers)]
    )


def carried(*values: object) -> int:
    """Return the bytes that the driver sends or receives for these values: their pickled size
    without referenced data."""
    import ray

    return sum(len(ray.cloudpickle.dumps(value, protocol=5)) for value in values)


def start(cluster: Cluster, workers: int) -> tuple[Idle, dict[str, float]]:
    """Start the workers, and measure seconds, CPU seconds of the driver, of a worker, and of all
    workers with the process that they are forks of, and the bytes that a worker has for itself."""
    cpu_before, began = time.process_time(), time.perf_counter()
    placement = reserve(
        cluster, {"idle": list(range(workers))}, devices_per_node=workers, kind="cpu"
    )
    prestart(placement, "idle", *IMPORTED)
    idle = spawn(Idle, placement, "idle")
    ready(idle)
    found = {
        "start_seconds": time.perf_counter() - began,
        "start_driver_cpu": time.process_time() - cpu_before,
    }
    processes = [
        psutil.Process(info.process.pid) for info in process_infos(group(idle).workers) if info
    ]
    found["start_worker_cpu"] = statistics.median(cpu_seconds(one) for one in processes)
    parents = {one.ppid(): one.parent() for one in processes}.values()
    servers = [one for one in parents if one and "worker_fork" in " ".join(one.cmdline())]
    found["start_cpu"] = sum(map(cpu_seconds, [*processes, *servers]))
    found["worker_bytes"] = statistics.median(one.memory_full_info().uss for one in processes)
    return idle, found


def cpu_seconds(process: psutil.Process) -> float:
    """Return the CPU time of a process so far, in all its threads."""
    times = process.cpu_times()
    return float(times.user + times.system)


def stop(cluster: Cluster) -> None:
    """End the workers and free their devices."""
    import ray

    cluster.supervisor.stop_all()
    ray.util.remove_placement_group(cluster.reserved.pop())


def measure(
    cluster: Cluster, workers: int, samples: int, longest: int, rounds: int
) -> dict[str, float]:
    """Measure the start of the workers and milliseconds per kind of call; medians over alternating
    rounds."""
    import ray

    idle, found = start(cluster, workers)
    handles = [worker.actor for worker in group(idle).workers]
    # Two rows for each of 64 workers, as long as w25's; and the batch of a large step.
    small, large = asked(np.full(128, 128)), asked(lengths(samples, longest))
    of_small, of_large = made(idle, small), made(idle, large)
    found["driver_bytes"] = carried(large, idle.make(large), of_large)
    calls: dict[str, Callable[[], object]] = {
        "ray": lambda: ray.get([handle.process_info.remote() for handle in handles]),
        "nothing": idle.nothing,
        "make": lambda: idle.make(small),
        "take": lambda: idle.take(of_small),
        "make_large": lambda: idle.make(large),
        "take_large": lambda: idle.take(of_large),
    }
    for call in calls.values():
        call()
    times = [{name: seconds(call) for name, call in calls.items()} for _ in range(rounds)]
    found |= {f"{name}_ms": 1e3 * statistics.median(one[name] for one in times) for name in calls}
    for name, call in calls.items():
        found[f"{name}_driver_cpu_ms"] = 1e3 * min(driver_cpu(call) for _ in range(3))
    found["driver_bytes_now"] = psutil.Process().memory_info().rss
    stop(cluster)
    return found


def compare_starts(workers: int) -> dict[str, Any]:
    """Start the workers as forks of one process and as processes of their own, each on a new Ray.

    The seconds contain the imports of the process that is forked.
    """
    found: dict[str, Any] = {"workers": workers, "load": os.getloadavg()[0]}
    for name, preload in (("forks", IMPORTED), ("new_processes", ())):
        with (
            tempfile.TemporaryDirectory() as folder,
            connect(folder, address="local", num_cpus=workers, preload=preload) as cluster,
        ):
            _, found[name] = start(cluster, workers)
            stop(cluster)
        print(f"{workers} workers, {name}: {found[name]}", file=sys.stderr, flush=True)
    return found


def driver_cpu(call: Callable[[], object]) -> float:
    """Return the seconds of CPU time that this process spends in a call, in all its threads."""
    began = time.process_time()
    call()
    return time.process_time() - began


def many_ranks(workers: WorkerGroup, ranks: int) -> WorkerGroup:
    """Return a group of more ranks than processes: rank i is process i modulo their number."""
    many = copy.copy(workers)
    handles = workers.workers
    many.workers = [replace(handles[i % len(handles)], rank=i) for i in range(ranks)]
    return many


def measure_ranks(cluster: Cluster, processes: int, ranks: int, longest: int) -> dict[str, Any]:
    """Measure the driver's CPU time of the calls to `ranks` ranks, one row of a batch for each."""
    import ray

    idle, _ = start(cluster, processes)
    many = many_ranks(group(idle), ranks)
    wanted = asked(lengths(ranks, longest))
    samples = wanted.union(many.submit("make", wanted).result())
    batch = samples.select(non_tensor_batch_keys=KEPT)
    calls: dict[str, Callable[[], object]] = {
        "nothing": lambda: many.submit("nothing").result(),
        "make": lambda: many.submit("make", wanted).result(),
        "take": lambda: many.submit("take", batch).result(),
    }
    parts = {"nothing": [()] * ranks}
    parts |= {
        n: [(p,) for p in split_rows(b, ranks)] for n, b in (("make", wanted), ("take", batch))
    }

    def plain(name: str) -> object:
        """Ray's own cost of the same messages."""
        sent = zip(many.workers, parts[name], strict=True)
        return ray.get([worker.actor.call.remote(name, *part) for worker, part in sent])

    found: dict[str, Any] = {"ranks": ranks, "processes": processes}
    for name, call in calls.items():
        took = [(driver_cpu(call), driver_cpu(partial(plain, name))) for _ in range(5)]
        own, of_ray = (1e3 * statistics.median(times) for times in zip(*took, strict=True))
        found |= {f"{name}_driver_cpu_ms": own, f"{name}_ray_cpu_ms": of_ray}
    for who in ("driver", "ray"):
        found[f"{who}_cpu_ms_per_step"] = sum(
            count * found[f"{name}_{who}_cpu_ms"] for name, count in CALLS.items()
        )
    found["driver_bytes_now"] = psutil.Process().memory_info().rss
    stop(cluster)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, nargs="*", default=[2, 8, 32, 64])
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--longest", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ranks", type=int, default=1000, help="0: leave this part out")
    parser.add_argument("--new-processes", type=int, default=16, help="0: leave this part out")
    args = parser.parse_args()
    if args.workers:
        keep("controller", measure_calls(args))
    if args.new_processes:
        keep("controller_starts", compare_starts(args.new_processes))
    print(json.dumps(read()["parts"], indent=1))


def measure_calls(args: argparse.Namespace) -> dict[str, Any]:
    """Measure calls for each number of workers, and the driver's cost of many ranks."""
    found = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        connect(folder, address="local", num_cpus=max(args.workers), preload=IMPORTED) as cluster,
    ):
        for count in args.workers:
            found[str(count)] = measure(cluster, count, args.samples, args.longest, args.rounds)
            print(f"{count} workers: {found[str(count)]}", file=sys.stderr, flush=True)
        ranks = args.ranks and measure_ranks(
            cluster, min(4, max(args.workers)), args.ranks, args.longest
        )
    most = found[str(max(args.workers))]
    kept = {
        "rounds": args.rounds,
        "samples": args.samples,
        "longest": args.longest,
        "mean_tokens": float(lengths(args.samples, args.longest).mean()),
        "workers": found,
        "ranks": ranks,
        "driver_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
        "driver_bytes_per_sample": most["driver_bytes"] / args.samples,
        "calls_ms_per_step": sum(count * most[f"{name}_ms"] for name, count in CALLS.items()),
    }
    if "64" in found and (step := read().get("parts", {}).get("step_w25")):
        kept["step_seconds"] = step["seconds"]
        kept["dispatch_overhead_64"] = kept["calls_ms_per_step"] / 1e3 / step["seconds"]
    return kept


if __name__ == "__main__":
    main()
