"""The controller alone: what calls to 2, 8, 32 and 64 workers cost, and what passes through the driver for each sample.

python recipes/benchmark/controller.py [--workers 2 8 32 64] [--samples 1024] [--longest 8192] [--rounds 9]

Workers are processes with a small share of a CPU that do nothing with what they get. A plain Ray call to the same actors, in turns with
ours, says what Ray itself costs. Samples have log-normal lengths: half are below an eighth of the longest.
"""

import argparse
import json
import resource
import statistics
import tempfile
from collections.abc import Callable

import numpy as np
import torch
from machine import seconds
from report import keep, read

from verlite.controller.cluster import Cluster, connect
from verlite.controller.dispatch import register
from verlite.controller.placement import reserve
from verlite.controller.worker import Worker
from verlite.controller.worker_group import group, ready, spawn
from verlite.protocol.data import DataProto, object_array

CALLS = {"nothing": 6, "take": 2}
"""In one GRPO step: export, offload, wake, load, wake and release take no batch; generate and update do."""
PROMPT = 256


class Idle(Worker):
    """Takes calls and does nothing."""

    @register("all")
    def nothing(self) -> None:
        """A call without a batch."""

    @register("split")
    def take(self, batch: DataProto) -> DataProto:
        """A call with a batch; a number for each row comes back."""
        return DataProto.from_dict({"number": torch.zeros(len(batch))})


def lengths(samples: int, longest: int) -> np.ndarray:
    """Of responses, in tokens."""
    drawn = np.random.default_rng(0).lognormal(np.log(longest / 8), 1.0, samples)
    return drawn.clip(1, longest).astype(np.int64)


def step_batch(samples: int, longest: int) -> DataProto:
    """The columns that an update takes, as the driver holds them."""
    response = torch.arange(longest)[None] < torch.from_numpy(lengths(samples, longest))[:, None]
    attention = torch.cat([torch.ones(samples, PROMPT, dtype=torch.bool), response], 1).long()
    tensors = {
        "input_ids": attention, "attention_mask": attention.clone(), "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
        "response_mask": response.long(), "rollout_log_probs": response.float(), "advantages": response.float(),
    }  # fmt: skip
    return DataProto.from_dict(tensors, {"uid": object_array([str(row // 8) for row in range(samples)])})


def carried(*values: object) -> int:
    """Bytes that the driver sends or gets for these values: what they are pickled to, without what references stand for."""
    import ray

    return sum(len(ray.cloudpickle.dumps(value, protocol=5)) for value in values)


def measure(cluster: Cluster, workers: int, samples: int, longest: int, rounds: int) -> dict[str, float]:
    """Seconds to start so many workers, and milliseconds of each kind of call; medians of rounds in turn."""
    import ray

    found: dict[str, float] = {}
    placement = reserve(cluster, {"idle": list(range(workers))}, devices_per_node=workers, kind="cpu")
    idle: list[Idle] = []

    def start() -> None:
        idle.append(spawn(Idle, placement, "idle"))
        ready(idle[0])

    found["start_seconds"] = seconds(start)
    handles = [member.handle for member in group(idle[0]).members]
    # Two rows for each of 64 workers, as long as w25's; and the batch of a large step.
    small, large = step_batch(128, 128), step_batch(samples, longest)
    calls: dict[str, Callable[[], object]] = {
        "ray": lambda: ray.get([handle.presence.remote() for handle in handles]),
        "nothing": idle[0].nothing,
        "take": lambda: idle[0].take(small),
        "take_large": lambda: idle[0].take(large),
    }
    for call in calls.values():
        call()
    times = [{name: seconds(call) for name, call in calls.items()} for _ in range(rounds)]
    found |= {f"{name}_ms": 1e3 * statistics.median(one[name] for one in times) for name in calls}
    cluster.supervisor.end_all()
    ray.util.remove_placement_group(cluster.reserved.pop())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 8, 32, 64])
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--longest", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    batch = step_batch(args.samples, args.longest)
    with tempfile.TemporaryDirectory() as folder, connect(folder, address="local", num_cpus=max(args.workers)) as cluster:
        found = {str(count): measure(cluster, count, args.samples, args.longest, args.rounds) for count in args.workers}
    most = found[str(max(args.workers))]
    kept = {
        "rounds": args.rounds, "samples": args.samples, "longest": args.longest,
        "mean_tokens": float(lengths(args.samples, args.longest).mean()),
        "workers": found,
        "driver_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
        "driver_bytes_per_sample": carried(batch, torch.zeros(args.samples)) / args.samples,
        "calls_ms_per_step": sum(count * most[f"{name}_ms"] for name, count in CALLS.items()),
    }  # fmt: skip
    if "64" in found and (step := read().get("parts", {}).get("step_w25")):
        kept["step_seconds"] = step["seconds"]
        kept["dispatch_overhead_64"] = kept["calls_ms_per_step"] / 1e3 / step["seconds"]
    keep("controller", kept)
    print(json.dumps(kept, indent=1))


if __name__ == "__main__":
    main()
