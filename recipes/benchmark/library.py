"""Library functions on large batches in one process: estimators, the clipped loss, DataProto,
balancing; and two workers.

python recipes/benchmark/library.py [--rounds 7]
"""

import argparse
import json
import pickle
import statistics
import tempfile
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
import torch
from machine import copy_rate, gemm_flops, seconds
from report import keep

from verlite.algorithms.advantages import AdvantageInputs, compute_advantages, place_scores
from verlite.algorithms.aggregation import token_weights
from verlite.algorithms.balancing import karmarkar_karp, workload
from verlite.algorithms.losses import PolicyLossInputs, policy_loss
from verlite.controller.cluster import connect
from verlite.controller.dispatch import register
from verlite.controller.placement import reserve
from verlite.controller.worker import Worker
from verlite.controller.worker_group import ready, spawn
from verlite.protocol.data import DataProto, near_equal_bounds, object_array

ROWS, WIDTHS, SAMPLES = 1024, (2048, 4096), 8


def inputs(width: int) -> AdvantageInputs:
    """Return ragged responses of up to `width` tokens, scored at their end, in groups of
    SAMPLES."""
    generator = torch.Generator().manual_seed(0)
    mask = (
        torch.arange(width)[None] < torch.randint(1, width + 1, (ROWS, 1), generator=generator)
    ).long()
    return AdvantageInputs(
        token_level_rewards=place_scores(torch.randn(ROWS, generator=generator), mask),
        response_mask=mask,
        uid=object_array([str(row // SAMPLES) for row in range(ROWS)]),
        values=torch.randn(ROWS, width, generator=generator) * mask,
        gamma=0.99,
        lam=0.95,
    )


def clipped_loss(width: int) -> Callable[[], object]:
    """Run the loss forward and backward."""
    generator = torch.Generator().manual_seed(0)
    mask = inputs(width).response_mask
    old, advantages = (torch.randn(ROWS, width, generator=generator) for _ in range(2))
    new = (old + 0.1 * torch.randn(ROWS, width, generator=generator)).requires_grad_()
    tokens = int(mask.sum())

    def call() -> None:
        weights = token_weights(mask, "token-mean", tokens=tokens, sequences=ROWS)
        loss, _ = policy_loss(
            "vanilla",
            PolicyLossInputs(
                log_prob=new,
                old_log_prob=old,
                advantages=advantages,
                response_mask=mask,
                weights=weights,
                tokens=tokens,
            ),
        )
        torch.autograd.grad(loss, new)

    return call


def calls() -> dict[str, Callable[[], object]]:
    """Return the timed functions by name."""
    found: dict[str, Callable[[], object]] = {}
    for width in WIDTHS:
        batch = inputs(width)
        for name in ("gae", "grpo", "reinforce_plus_plus"):
            found[f"{name} {ROWS} x {width}"] = lambda name=name, batch=batch: compute_advantages(
                name, batch
            )
        found[f"clipped loss, forward and backward {ROWS} x {width}"] = clipped_loss(width)
    data = DataProto.from_dict(
        {f"column{i}": torch.randn(ROWS, 4096) for i in range(10)},
        {"uid": [str(i) for i in range(ROWS)]},
    )
    parts = [data[start:stop] for start, stop in near_equal_bounds(len(data), 8)]
    dumped = pickle.dumps(data, protocol=5)
    lengths = np.random.default_rng(0).integers(1, 8192, 8192)
    return found | {
        f"DataProto of {data.nbytes >> 20} MiB: repeat x 8": lambda: data.repeat(8),
        "DataProto: concat of 8": lambda: DataProto.concat(parts),
        "DataProto: serialise": lambda: pickle.dumps(data, protocol=5),
        "DataProto: load": lambda: pickle.loads(dumped),
        "balancing 8192 lengths over 64 ranks, equal counts": lambda: karmarkar_karp(
            workload(lengths), 64, equal_size=True
        ),
        "balancing 8192 lengths over 64 ranks": lambda: karmarkar_karp(workload(lengths), 64),
    }


class Echo(Worker):
    """Return the argument."""

    @register("split")
    def echo(self, batch: DataProto) -> DataProto:
        return batch


def workers(rounds: int) -> dict[str, float]:
    """Measure milliseconds to start Ray and two workers, and to send 64 MiB there and back."""
    found, clusters, pair = {}, [], []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:

        def start() -> None:
            pair.append(
                spawn(
                    Echo,
                    reserve(clusters[0], {"echo": [0, 1]}, devices_per_node=2, kind="cpu"),
                    "echo",
                )
            )
            ready(pair[0])

        found["starting Ray"] = 1e3 * seconds(
            lambda: clusters.append(stack.enter_context(connect(folder, address="local", slots=2)))
        )
        found["starting 2 workers"] = 1e3 * seconds(start)
        batch = DataProto.from_dict({"column": torch.randn(ROWS, (64 << 20) // 4 // ROWS)})
        pair[0].echo(batch)
        found["64 MiB to 2 workers and back"] = 1e3 * statistics.median(
            seconds(lambda: pair[0].echo(batch)) for _ in range(rounds)
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    found = {}
    for name, call in calls().items():
        call()
        found[name] = 1e3 * statistics.median(seconds(call) for _ in range(rounds))
    found |= workers(rounds)
    measured = {
        "gemm_flops": gemm_flops(),
        "copy_bytes_per_s": copy_rate(256 << 20),
        "milliseconds": found,
    }
    keep("library", measured)
    print(json.dumps(measured, indent=1))


if __name__ == "__main__":
    main()
