"""The training engine on one step's rows: an update and a log-prob pass, compared with a bare loop
and the lower bound by FLOPs.

python recipes/benchmark/training.py [--rounds 5] [--profile]

The bare loop runs transformers' model on rows of similar length, padded to the longest of each
micro-batch, with full logits, cross entropy and fused AdamW. Both do the same work on the same 128
rows, alternating.
"""

import argparse
import json
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
from machine import gemm_flops, seconds
from report import keep
from torch.nn import functional as F
from transformers import AutoModelForCausalLM
from workload import WORKLOADS, model_of

from verlite.controller.node import free_listener
from verlite.engine.fsdp import Counts, TrainEngine
from verlite.engine.micro import MicroBatching
from verlite.protocol.data import DataProto
from verlite.spec.roles import FSDPSpec, ModelSpec, OptimSpec

MICRO_BATCH_TOKENS = 2048
PROMPT = 5
END = 1 / 128  # probability that a token of the random model is the last


def rows(name: str) -> DataProto:
    """Return one step's samples of a model that generates random tokens."""
    workload, generator = WORKLOADS[name], torch.Generator().manual_seed(0)
    ends = torch.rand(workload.rows, generator=generator).log() / torch.log(torch.tensor(1 - END))
    lengths = ends.ceil().clamp(1, workload.new_tokens).long()
    real = torch.arange(int(lengths.max()))[None] < lengths[:, None]
    attention = torch.cat([torch.ones(workload.rows, PROMPT, dtype=torch.long), real.long()], 1)
    ids = torch.randint(3, 128, attention.shape, generator=generator) * attention
    advantages = torch.randn(workload.rows, 1, generator=generator) * real
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    return DataProto.from_dict(
        {
            "input_ids": ids,
            "attention_mask": attention,
            "position_ids": positions,
            "response_mask": real.long(),
            "advantages": advantages,
        }
    )


def loss(micro, outputs: dict, counts: Counts) -> tuple[torch.Tensor, dict]:
    """Policy gradient with a ratio of 1."""
    return -(
        outputs["log_probs"] * micro["advantages"] * micro["response_mask"]
    ).sum() / counts.tokens, {}


class Bare:
    """The bare loop."""

    def __init__(self, name: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            model_of(name), attn_implementation="sdpa"
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)

    def parts(self, batch: DataProto) -> list[torch.Tensor]:
        """Split rows, sorted by length, into micro-batches that fit with padding."""
        lengths, found = batch.batch["attention_mask"].sum(1), [[]]
        for row in lengths.argsort().tolist():
            if (len(found[-1]) + 1) * int(lengths[row]) > MICRO_BATCH_TOKENS:
                found.append([])
            found[-1].append(row)
        return [torch.tensor(part) for part in found]

    def log_probs(self, batch: DataProto, part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probs [b, r] of the responses and masked advantages."""
        t = batch.batch[part]
        width = int(t["attention_mask"].sum(1).max())
        ids, mask = t["input_ids"][:, :width], t["attention_mask"][:, :width]
        logits = self.model(input_ids=ids, attention_mask=mask).logits[:, PROMPT - 1 : -1]
        labels = ids[:, PROMPT:]
        return -F.cross_entropy(logits.transpose(1, 2), labels, reduction="none"), t["advantages"][
            :, : labels.shape[1]
        ]

    def update(self, batch: DataProto) -> None:
        tokens = int(batch.batch["response_mask"].sum())
        for part in self.parts(batch):
            log_probs, advantages = self.log_probs(batch, part)
            (-(log_probs * advantages).sum() / tokens).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def forward(self, batch: DataProto) -> None:
        for part in self.parts(batch):
            self.log_probs(batch, part)


def in_turns(
    ours: Callable[[], object], theirs: Callable[[], object], rounds: int
) -> tuple[float, float, float]:
    """Return the median seconds of both and the median of the pairs' ratios, without the first of
    each."""
    ours(), theirs()
    pairs = [(seconds(ours), seconds(theirs)) for _ in range(rounds)]
    return (
        *(statistics.median(column) for column in zip(*pairs, strict=True)),
        statistics.median(a / b for a, b in pairs),
    )


def measure(name: str, rounds: int) -> dict:
    """Run updates and log-prob passes of both, alternating."""
    engine, bare, batch, cut = (
        engine_of(name),
        Bare(name),
        rows(name),
        MicroBatching(max_tokens=MICRO_BATCH_TOKENS),
    )
    parameters, tokens = (
        sum(p.numel() for p in bare.model.parameters()),
        int(batch.batch["attention_mask"].sum()),
    )
    peak = gemm_flops()
    update, bare_update, update_ratio = in_turns(
        lambda: engine.update(batch, cut, 1.0, loss), lambda: bare.update(batch), rounds
    )
    forward, bare_forward, forward_ratio = in_turns(
        lambda: engine.forward(batch, cut, 1.0), lambda: bare.forward(batch), rounds
    )
    peak = statistics.median([peak, gemm_flops()])
    return {
        "tokens": tokens,
        "gemm_flops": peak,
        "update_seconds": update,
        "bare_update_seconds": bare_update,
        "update_speed_vs_bare": 1 / update_ratio,
        "update_vs_floor": update / (6 * parameters * tokens / peak),
        "log_prob_seconds": forward,
        "bare_log_prob_seconds": bare_forward,
        "log_prob_speed_vs_bare": 1 / forward_ratio,
        "log_prob_vs_floor": forward / (2 * parameters * tokens / peak),
    }


def engine_of(name: str) -> TrainEngine:
    """Build verlite's engine as an actor on one device does."""
    model = ModelSpec(path=str(model_of(name)), enable_gradient_checkpointing=False)
    return TrainEngine(model, FSDPSpec(), OptimSpec(lr=1e-5), total_training_steps=1000)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--profile", action="store_true", help="show where the time of one update goes instead"
    )
    args = parser.parse_args()
    with free_listener("127.0.0.1") as listener:
        port = listener.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    if args.profile:
        engine, batch, cut = (
            engine_of("w25"),
            rows("w25"),
            MicroBatching(max_tokens=MICRO_BATCH_TOKENS),
        )
        engine.update(batch, cut, 1.0, loss)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            engine.update(batch, cut, 1.0, loss)
        print(
            profile.key_averages().table(
                sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=60
            )
        )
    else:
        found = measure("w25", args.rounds)
        keep("training", found)
        print(json.dumps(found, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
