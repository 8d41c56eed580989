"""Prefixes that samples share: updates and log-probs that compute them once, against the same rows
with every sample alone.

python recipes/benchmark/trees.py [WORKLOAD ...] [--rounds 3]

One thread; CPU seconds of this process, in alternating rounds, so that other processes matter
little. The floor is the FLOPs of the matrix products of the distinct tokens (shared) or of all
(flat), at the rate of one large product in the same round.
"""

import argparse
import dataclasses
import os

os.environ["OMP_NUM_THREADS"] = "1"

import random
import statistics
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from report import keep, read
from training import loss
from workload import model_of

from verlite.algorithms.packing import pack
from verlite.algorithms.prefix_tree import sort_by_prefix, token_keys
from verlite.controller.node import free_listener
from verlite.engine.fsdp import TrainEngine
from verlite.engine.micro import MicroBatching
from verlite.protocol.data import DataProto
from verlite.spec.roles import FSDPSpec, ModelSpec, OptimSpec

MICRO = MicroBatching(max_tokens=4096)
Tokens = list[int]
Row = tuple[Tokens, Tokens, Tokens]
"""Context, response, and response mask of a sample."""


def tokens(rng: random.Random, count: int) -> Tokens:
    return [rng.randint(3, 127) for _ in range(count)]


def groups(
    rng: random.Random, prompts: int, samples: int, prompt: int, answer: Callable[[], int]
) -> Iterator[Row]:
    """Yield the samples of single prompts."""
    for _ in range(prompts):
        context = tokens(rng, prompt)
        for _ in range(samples):
            response = tokens(rng, answer())
            yield context, response, [1] * len(response)


def lognormal(rng: random.Random) -> int:
    """Return the length of an answer: median 64, and one of 13 is over 200."""
    return min(512, max(1, int(rng.lognormvariate(4.159, 0.8))))


def search(rng: random.Random, prompts: int, samples: int) -> Iterator[Row]:
    """Yield samples that search twice. The instructions, 192 tokens, are those of all prompts, and
    a question has 64. A response has two turns of 32 tokens with 100 to 200 tokens of passages
    after each, and an answer of 32."""
    instructions = tokens(rng, 192)
    for _ in range(prompts):
        context = instructions + tokens(rng, 64)
        for _ in range(samples):
            mask = []
            for _ in range(2):
                mask += [1] * 32 + [0] * rng.randint(100, 200)
            mask += [1] * 32
            yield context, tokens(rng, len(mask)), mask


def agent(rng: random.Random, samples: int) -> Iterator[Row]:
    """Yield the branches of agents with one task. The template leaves an answer's thoughts out of
    the next request, so each of the 8 turns is a branch: 64 tokens of thoughts and 32 of a call;
    the next turn reads the call and 64 tokens of its result."""
    task = tokens(rng, 256)
    for _ in range(samples):
        history = task
        for _ in range(8):
            call = tokens(rng, 32)
            yield history, tokens(rng, 64) + call, [1] * 96
            history = history + call + tokens(rng, 64)


def workloads(rng: random.Random) -> dict[str, tuple[str, list[Row]]]:
    """Return words and rows of each workload."""
    return {
        "w25p": (
            "8 prompts of 512 tokens x 8 answers of 64 to 128",
            list(groups(rng, 8, 8, 512, lambda: rng.randint(64, 128))),
        ),
        "w25t": (
            "4 prompts of 64 tokens x 8 answers of lognormal length",
            list(groups(rng, 4, 8, 64, lambda: lognormal(rng))),
        ),
        "w25s": (
            "4 questions of 256 tokens, 192 of them instructions, x 8 samples that search twice",
            list(search(rng, 4, 8)),
        ),
        "w25g": (
            "4 agents with one task of 256 tokens, each 8 turns that are branches",
            list(agent(rng, 4)),
        ),
        "10%": (
            "2 prompts of 16 tokens x 8 answers of 126",
            list(groups(rng, 2, 8, 16, lambda: 126)),
        ),
        "5%": ("2 prompts of 8 tokens x 8 answers of 132", list(groups(rng, 2, 8, 8, lambda: 132))),
    }


PREDICTED = {"w25p": 0.30, "w25t": 0.67, "w25s": 0.69, "w25g": 0.31, "10%": 0.96, "5%": 1.0}
"""CPU seconds of an update over those of the flat rows, as predicted before measuring: the share of
the tokens, plus 3 to 4 hundredths for copies of keys and values and for masks (w25s: and 2 for
instructions that each micro-batch computes)."""


def batch_of(rows: list[Row]) -> DataProto:
    """Return rows, padded on both sides."""
    left, right = (max(len(row[side]) for row in rows) for side in (0, 1))
    ids = [[0] * (left - len(c)) + c + a + [0] * (right - len(a)) for c, a, _ in rows]
    real = [[0] * (left - len(c)) + [1] * len(c + a) + [0] * (right - len(a)) for c, a, _ in rows]
    mask = torch.tensor(real)
    trained = torch.tensor([own + [0] * (right - len(own)) for _, _, own in rows])
    generator = torch.Generator().manual_seed(0)
    return DataProto.from_dict(
        {
            "input_ids": torch.tensor(ids),
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
            "response_mask": trained,
            "advantages": torch.randn(len(rows), 1, generator=generator) * trained,
        }
    )


def measure(engine: TrainEngine, rows: list[Row], rounds: int) -> dict:
    """Return median CPU seconds and their ratios."""
    batch = batch_of(rows)
    t = batch.batch
    keys = token_keys(pack(t["input_ids"], t["attention_mask"], t["position_ids"]))
    flat = sum(map(len, keys))
    distinct = flat - sum(sort_by_prefix(keys)[1])
    model = engine.model_config
    calls: dict[str, Callable[[], object]] = {
        "update": lambda: engine.update(batch, MICRO, 1.0, loss),
        "log_prob": lambda: engine.forward(batch, MICRO, 1.0),
    }

    def run(call: Callable[[], object], shared: bool) -> float:
        engine.model_config = dataclasses.replace(model, share_prefixes=shared)
        return cpu_seconds(call)

    found: dict = {"tokens": flat, "distinct": distinct, "rounds": rounds}
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    rates = []
    for number in range(rounds):
        rates.append(gemm_rate())
        for name, call in calls.items():
            order = (True, False) if number % 2 else (False, True)
            seconds = {shared: run(call, shared) for shared in order}
            pairs[name].append((seconds[True], seconds[False]))
            print(
                f"  {name}: {seconds[True]:.2f} s shared, {seconds[False]:.2f} s flat", flush=True
            )
    engine.model_config = model
    parameters = sum(p.numel() for p in engine.parameters)
    for name, own in pairs.items():
        passes = 6 if name == "update" else 2
        found[name] = {
            "shared_seconds": statistics.median(a for a, _ in own),
            "flat_seconds": statistics.median(b for _, b in own),
            "shared_floor": passes * parameters * distinct / statistics.median(rates),
            "flat_floor": passes * parameters * flat / statistics.median(rates),
            "vs_flat": statistics.median(a / b for a, b in own),
            "all": own,
        }
    return found


def cpu_seconds(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


def gemm_rate() -> float:
    """Return the FLOPs of a large matrix product per CPU second."""
    a = torch.randn(1024, 1024)
    return 2 * 1024**3 / min(cpu_seconds(lambda: torch.mm(a, a)) for _ in range(20))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made = workloads(random.Random(0))
    parser.add_argument("names", nargs="*", metavar="WORKLOAD", help=", ".join(made))
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with free_listener("127.0.0.1") as listener:
        port = listener.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    model = ModelSpec(path=str(model_of("w25")), enable_gradient_checkpointing=False)
    engine = TrainEngine(model, FSDPSpec(), OptimSpec(lr=1e-5), total_training_steps=1000)
    engine.update(batch_of(made["5%"][1][:2]), MICRO, 1.0, loss)  # Adam's moments
    for name in args.names or made:
        words, rows = made[name]
        print(f"{name}: {words}", flush=True)
        found = {"words": words, "predicted": PREDICTED[name]} | measure(engine, rows, args.rounds)
        ratios = [f"{call} {found[call]['vs_flat']:.3f}" for call in ("update", "log_prob")]
        print("  of flat:", *ratios, flush=True)
        measured = read().get("parts", {}).get("trees", {}).get("workloads", {})
        keep("trees", {"workloads": measured | {name: found}})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
