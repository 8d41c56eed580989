"""CPU seconds and memory of the driver for one GRPO step, without Ray, by samples and ranks.

python recipes/benchmark/driver.py [--samples 4096 16384 65536] [--ranks 1000] [--before CHECKOUT]

The functions are those of a step with old and reference log-probs: requests, division of the rows
among the ranks, what is pickled for each rank and read from its answer, advantages, metrics, and
the choice of samples to keep. The ranks' answers are made here, with an object in place of Ray's
references to tokens. Response lengths are log-normal, 8 samples share a prompt. What Ray adds for
each message is in controller.py.

Each measurement is a process of its own. --before measures another checkout of verlite, too.
"""

import argparse
import json
import os
import pickle
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from uuid import UUID

T = TypeVar("T")
GROUP = 8
LONGEST = 8192
PHASES = ("old_log_prob", "ref", "update_actor")


def measure(samples: int, ranks: int) -> dict[str, Any]:
    """Return the CPU seconds of each part of a step, and the process's peak memory."""
    import numpy as np
    import torch
    from ray import cloudpickle

    from verlite.config.compile import advantage_spec
    from verlite.config.plan import Micro, Updates
    from verlite.config.schema import Config, DataConfig, ModelConfig
    from verlite.controller.columns import Ref
    from verlite.controller.dispatch import join_rows, split_rows
    from verlite.data.dataset import PromptRow
    from verlite.protocol.data import DataProto, near_equal_bounds
    from verlite.protocol.fields import check_stage
    from verlite.rewards.result import RewardResult
    from verlite.rollout.types import Status, Trajectory
    from verlite.trainer import batch as batches
    from verlite.trainer import command, metrics
    from verlite.trainer.samples import choose_rows
    from verlite.trainer.stages import rollout, update
    from verlite.trainer.stages.advantage import advantages_by_row, with_columns_of
    from verlite.workers.rollout import KEPT, DecodedResponse, as_columns

    if hasattr(command, "_few_collections"):
        seldom = command._few_collections()  # as long as this name is there
        seldom.__enter__()
    config = Config(data=DataConfig(train_files="x"), reward=Config().reward)
    config.actor_rollout_ref.model = ModelConfig(path="x")
    config.actor_rollout_ref.rollout.n = GROUP
    config.algorithm.adv_estimator = "grpo"
    prompts = samples // GROUP
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(np.log(LONGEST / 8), 1, samples).clip(1, LONGEST).astype(int)
    of_prompts = rng.integers(50, 500, prompts)
    data = [
        PromptRow(i, [1] * int(length), [{"role": "user", "content": "?"}], "sums", "1")
        for i, length in enumerate(of_prompts)
    ]
    run: Any = SimpleNamespace(
        config=config,
        train_data=SimpleNamespace(row=data.__getitem__),
        plan=SimpleNamespace(
            sequence_parallel={"actor": 1},
            placement={"actor": list(range(ranks))},
            needs_greedy_baseline=False,
        ),
        metrics={},
        step=1,
        version=1,
        advantage=advantage_spec(config),
        kl=SimpleNamespace(value=0.0),
    )
    seconds: dict[str, float] = {}

    def part(name: str, call: Callable[..., T], *args: Any) -> T:
        began = time.process_time()
        result = call(*args)
        seconds[name] = seconds.get(name, 0.0) + time.process_time() - began
        return result

    def send(batch: DataProto) -> list[DataProto]:
        pieces = part("split", split_rows, batch, ranks)
        part("count bytes", lambda: sum(piece.nbytes for piece in pieces))
        part("write", lambda: [cloudpickle.dumps(piece, protocol=5) for piece in pieces])
        return pieces

    def receive(answers: list[DataProto], batch: DataProto) -> DataProto:
        sent = [cloudpickle.dumps(answer, protocol=5) for answer in answers]
        del answers
        read = part("read", lambda: [pickle.loads(answer) for answer in sent])
        part("count bytes", lambda: sum(answer.nbytes for answer in read))
        joined: DataProto = part("join", join_rows, read, batch)
        return joined

    def kept(batch: DataProto, number: int, names: tuple[str, ...]) -> DataProto:
        """Return a rank's answer with references in place of these columns."""
        chunk = UUID(int=number)  # it stands for Ray's reference
        columns = {name: [Ref(chunk, name, i) for i in range(len(batch))] for name in names}
        return batch.with_non_tensor(**columns)

    def sampled(number: int, start: int, stop: int) -> DataProto:
        rows = [
            Trajectory([1], [1], [1], [0.0], Status.DONE, None, [(1, 1)], 1)
            for _ in range(start, stop)
        ]
        scores = {i: RewardResult(float(rng.integers(2))) for i in range(len(rows))}
        made = as_columns(rows, [DecodedResponse("text")] * len(rows), scores, 0.0, False, False)
        own = torch.from_numpy(lengths[start:stop])
        of_prompt = torch.from_numpy(of_prompts.repeat(GROUP)[start:stop])
        made = made.with_batch(response_length=own, sampled_tokens=own, prompt_length=of_prompt)
        return kept(made, number, tuple(n for n in KEPT if n in made.non_tensor_batch))

    uids = [f"1-{i}" for i in range(prompts)]
    seeds = batches.seeds(1, 1, 0, samples)
    requests = part("requests", rollout.requests_of, run, range(prompts), uids, seeds)
    asked = requests.select([], rollout.REQUEST_FIELDS)
    send(asked)
    bounds = near_equal_bounds(samples, ranks)
    answer = receive([sampled(i, *rows) for i, rows in enumerate(bounds)], asked)
    batch = requests.pop(non_tensor_batch_keys=["prompt_ids"])[1].union(answer)
    part("check", check_stage, "generate", requests, batch)
    batch = part("score", rollout.trained_samples, run, batch)
    batch = batch.with_meta(reward_error_rate=0.0)
    updates = Updates(prompts, 0, 1, 0, Micro(1, None), False, "token-mean")
    ids = batch.non_tensor_batch["uid"]
    index = part("mini-batches", batches.mini_batch_indices, ids, updates, [1, 1])
    batch = batch.with_batch(mini_batch_index=index, trained_tokens=batch.batch["sampled_tokens"])
    batch = batch.with_non_tensor(loss_mask=batch.non_tensor_batch["response_mask"])
    reads = {"old_log_prob": ("rollout_log_probs",), "update_actor": update._LOSS_FIELDS}
    writes = {"old_log_prob": ("old_log_probs",), "ref": ("ref_log_prob",)}
    for phase in PHASES:
        if phase == "update_actor":
            batch = part("advantages", advantages_by_row, run, batch)[0]
        columns = reads.get(phase, ())
        rows = part("balance", batches.to_ranks, run, batch, "actor", *columns)
        pieces = send(rows)
        if phase not in writes:
            continue
        sums = {"entropy_sums": torch.float64} if phase == "old_log_prob" else {}
        own = []
        for number, piece in enumerate(pieces):
            numbers = {name: torch.zeros(len(piece), dtype=kind) for name, kind in sums.items()}
            blank = piece.select([], [], []).with_batch(**numbers)
            own.append(kept(blank, number, writes[phase]))
        batch = with_columns_of(batch, receive(own, rows))
        part("check", check_stage, phase, batch, batch)
    part("metrics", metrics.batch_metrics, batch, 4096, LONGEST)
    scores, sources = batch.batch["scores"].tolist(), list(batch.non_tensor_batch["data_source"])
    part("choose samples", choose_rows, scores, sources, list(ids), GROUP, "1")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return {"seconds": seconds, "total": sum(seconds.values()), "peak_bytes": peak}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, nargs="*", default=[4096, 16384, 65536])
    parser.add_argument("--ranks", type=int, nargs="*", default=[1000])
    parser.add_argument("--before", type=Path, help="checkout of an earlier commit")
    parser.add_argument("--one", action="store_true", help="measure here, and print JSON")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.samples[0], args.ranks[0])))
        return
    from report import keep

    checkouts = {"now": Path(__file__).resolve().parents[2]}
    if args.before:
        checkouts = {"before": args.before.resolve(), **checkouts}
    rows = []
    for samples in args.samples:
        for ranks in args.ranks:
            row: dict[str, Any] = {"samples": samples, "ranks": ranks, "load": os.getloadavg()[0]}
            for which, checkout in checkouts.items():
                command = [sys.executable, __file__, "--one", "--samples", str(samples)]
                done = subprocess.run(
                    [*command, "--ranks", str(ranks)],
                    env=os.environ | {"PYTHONPATH": str(checkout)},
                    capture_output=True,
                    text=True,
                )
                if done.returncode:
                    raise SystemExit(done.stderr)
                row[which] = json.loads(done.stdout.splitlines()[-1])
            rows.append(row)
            print(json.dumps(row), flush=True)
    keep("driver", {"rows": rows})


if __name__ == "__main__":
    main()
