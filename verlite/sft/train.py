"""Supervised fine-tuning: its loss; the loop and the validation, which DPO has too.

Runs as one process, or as several under torchrun, with the engine of RL training but without Ray.
Every rank reads all examples and trains on its share of each batch.
"""

import itertools
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from verlite.config import commands
from verlite.config.sft import TuningConfig
from verlite.control.commands import Do
from verlite.control.machine import Machine
from verlite.engine.fsdp import Counts, TrainEngine
from verlite.engine.micro import MicroBatching
from verlite.files import RetryingWriter
from verlite.protocol.data import DataProto
from verlite.protocol.ragged import pad
from verlite.sft.data import Example, columns, row_examples
from verlite.sft.run import Loaded, Run, Task, finalize, open_run, save
from verlite.trainer.preflight import SFT
from verlite.trainer.stop import Stop

VALIDATION_ROWS = 512
"""Examples of a rank that are in memory as one batch in a validation."""
LINE_S = 5.0
"""Steps can take milliseconds, and a line for each would hide everything else."""
KEPT = 16
"""Examples of a validation that are kept: those with the lowest scores."""
FIRST_ROWS = 8
"""Examples of the first batch whose text is kept."""


def run_to_end(loaded: Loaded, task: Task, stop: Stop) -> int:
    """Do all checks, train, and return the exit code.

    Raises:
        REFUSED, AlreadyComplete, KeyboardInterrupt, or what ended the run.
    """
    with open_run(loaded, task, stop) as run:
        train(run)
        return stop.decide(finalize(run))


def train(run: Run) -> None:
    """Train until the last step or until a stop is requested."""
    for step in run.steps():
        rows = run.sampler.next_batch()
        if step == 1:
            show_first(run, rows[:FIRST_ROWS])
        update(run, rows)
        finish_step(run)


def update(run: Run, rows: list[int]) -> None:
    """Take one optimizer step on these examples, each rank on its share."""
    mine = run.places(rows[run.rank :: run.ranks])
    references = [run.references[i] for i in mine] if run.task.reference else None
    with run.stopwatch("update_model"), run.display.phase("update_model"):
        result = run.engine.update(
            build_batch([run.examples[i] for i in mine], references),
            micro_batching(run.config, run.task.size),
            1.0,
            run.task.loss(run.config),
            dump_dir=run.run_dir / "nonfinite" / f"step_{run.step}",
        )
        run.engine.step_schedule()
    examples = [run.examples[i] for i in run.places(rows)]
    run.metrics |= {f"train/{name}": value for name, value in result.items()} | {
        "train/epoch": run.sampler.epoch,
        "perf/total_num_tokens": sum(len(e.prompt) + len(e.response) for e in examples),
    }


def finish_step(run: Run) -> None:
    """Validate and save if they are due, then write and print the step's metrics."""
    run.stopwatch.end_step()
    seconds = run.stopwatch.seconds["step"]
    tokens = run.metrics["perf/total_num_tokens"]
    run.metrics["perf/time_per_step"] = seconds
    run.metrics["perf/throughput"] = tokens / (seconds * run.ranks)
    run.tell(Machine.step_finished)
    following = run.tell(Machine.step_measured)
    if following is Do.VALIDATE:
        with run.stopwatch("testing"), run.display.phase("testing"):
            validate(run)
        following = run.tell(Machine.validated)
    run.metrics |= run.stopwatch.metrics()
    if following is Do.SAVE:
        save(run)
        run.metrics |= run.stopwatch.metrics()
    # A validation cannot be given up, so it counts as a part of the step.
    spent = run.stopwatch.seconds
    seconds += spent.get("testing", 0.0)
    run.tell(Machine.step_ends, seconds, spent.get("save_checkpoint", 0.0))
    if run.tracking is not None:
        run.tracking.log(run.step, run.metrics)
        show_step(run)


def show_step(run: Run) -> None:
    """Print the line of a step: of the first, the last, one with a validation, and of others not
    more often than every LINE_S seconds."""
    now = time.monotonic()
    is_edge = run.step in (run.stop.machine.resumed_step + 1, run.total_steps)
    if is_edge or "val/loss" in run.metrics or now - run.last_line >= LINE_S:
        run.display.step(run.step, run.metrics)
        run.last_line = now
    else:
        run.display.advance(run.step)


def sft_loss(
    rows: TensorDict, outputs: dict[str, Tensor], counts: Counts
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return this micro-batch's part of the mean of -log p(token | context).

    The mean is over the trained tokens of the whole optimizer step: `counts.tokens`.
    """
    mask = rows["response_mask"]
    loss = -(outputs["log_probs"] * mask).sum() / counts.tokens
    return loss, {"tokens": mask.sum()}


def micro_batching(config: TuningConfig, together: int = 1) -> MicroBatching:
    """Return how a device's rows are split into passes. together: examples of a row.

    Devices that share passes have the tokens of all of them in one.
    """
    data = config.data
    if data.by_examples():
        return MicroBatching(size=data.micro_batch_size_per_gpu, together=together)
    tokens = data.max_token_len_per_gpu * config.ulysses_sequence_parallel_size
    return MicroBatching(max_tokens=tokens, together=together)


def validate(run: Run) -> None:
    """Compute the metrics of the held-out examples, and keep those with the lowest scores."""
    sums = log_prob_sums(run.engine, run.held_out, micro_batching(run.config))
    metrics, scores = run.task.judge(run.config, run.held_out, sums, run.held_out_references)
    run.metrics |= {f"val/{name}": value for name, value in metrics.items()}
    _keep(run, f"val_step_{run.step}", range(len(scores)), run.held_out, scores)


def show_first(run: Run, rows: list[int]) -> None:
    """Keep the text of the first examples, with their scores before training."""
    places = run.places(rows)
    first = [run.examples[i] for i in places]
    references = [run.references[i] for i in places] if run.references else []
    sums = log_prob_sums(run.engine, first, micro_batching(run.config))
    _, scores = run.task.judge(run.config, first, sums, references)
    _keep(run, "step_1", rows, first, scores)


def _keep(
    run: Run, name: str, rows: Sequence[int], examples: list[Example], scores: list[float]
) -> None:
    if run.rank == 0:
        path = run.run_dir / "rollouts" / f"{name}.jsonl"
        keep_samples(run.writer, path, run.tokenizer, rows, run.task.sources, examples, scores)


def judge(
    config: TuningConfig, examples: list[Example], sums: list[float], references: list[float]
) -> tuple[dict[str, float], list[float]]:
    """Return the loss, and each example's mean log-prob of the trained tokens."""
    pairs = zip(sums, examples, strict=True)
    return {"loss": mean_loss(sums, examples)}, [s / e.trained_tokens for s, e in pairs]


TASK = Task(
    kind=SFT,
    columns=columns,
    examples_of=row_examples,
    sources=("sft",),
    loss=lambda config: sft_loss,
    judge=judge,
    command=commands.SFT,
)
"""`verlite.main_sft`."""


def mean_loss(sums: list[float], examples: list[Example]) -> float:
    """Return the mean of -log p from each example's sum of log-probs."""
    return -math.fsum(sums) / sum(example.trained_tokens for example in examples)


def log_prob_sums(
    engine: TrainEngine, examples: list[Example], micro: MicroBatching
) -> list[float]:
    """Return the sum of log-probs of each example's trained tokens, in float64.

    All ranks must call it, each with all examples. Each computes its share.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    size = VALIDATION_ROWS * ranks
    found: list[float] = []
    for start in range(0, len(examples), size):
        part = examples[start : start + size]
        batch = build_batch(part[rank::ranks])
        own = engine.forward(batch, micro)["log_probs"].double().sum(1).tolist()
        by_rank: list[Any] = [own]
        if ranks > 1:
            by_rank = [None] * ranks
            dist.all_gather_object(by_rank, own)
        found += [by_rank[row % ranks][row // ranks] for row in range(len(part))]
    return found


def build_batch(examples: list[Example], references: Sequence[float] | None = None) -> DataProto:
    """Return examples as a batch of B rows.

    Prompts are padded on the left to P tokens, responses on the right to R tokens.
    response_mask [B, R] int64 is 1 on the tokens that are trained. With references, the sums of the
    examples' log-probs at the start of the run, they are ref_log_prob_sums [B] float64.
    """
    prompts = [example.prompt for example in examples]
    responses = [example.response for example in examples]
    prompt_width = max(map(len, prompts), default=1)
    width = max(map(len, responses), default=1)
    prompt_mask = pad([[1] * len(ids) for ids in prompts], prompt_width, torch.int64, "left")
    present = pad([[1] * len(ids) for ids in responses], width, torch.int64)
    attention_mask = torch.cat([prompt_mask, present], dim=1)
    padded_prompts = pad(prompts, prompt_width, torch.int64, "left")
    padded_responses = pad(responses, width, torch.int64)
    fields = {
        "input_ids": torch.cat([padded_prompts, padded_responses], dim=1),
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0),
        "responses": padded_responses,
        "response_mask": pad([example.mask for example in examples], width, torch.int64),
    }
    if references is not None:
        fields["ref_log_prob_sums"] = torch.tensor(references, dtype=torch.float64)
    return DataProto.from_dict(fields)


def keep_samples(
    writer: RetryingWriter,
    path: Path,
    tokenizer: Any,
    numbers: Sequence[int],
    sources: Sequence[str],
    examples: Sequence[Example],
    scores: Sequence[float],
) -> None:
    """Write the examples with the lowest scores, lowest first.

    numbers: row of the data of every len(sources) examples, which have these names.
    """
    found = sorted(range(len(examples)), key=scores.__getitem__)[:KEPT]
    lines = []
    for i in found:
        row, place = divmod(i, len(sources))
        record = _record(tokenizer, examples[i], sources[place], numbers[row], scores[i])
        lines.append(json.dumps(record))
    writer.replace(path, "".join(f"{line}\n" for line in lines).encode())


def _record(
    tokenizer: Any, example: Example, source: str, row: int, score: float
) -> dict[str, Any]:
    pieces = itertools.groupby(
        zip(example.response, example.mask, strict=True), key=lambda pair: pair[1]
    )
    transcript = [
        ["model" if trained else "context", tokenizer.decode([token for token, _ in pairs])]
        for trained, pairs in pieces
    ]
    return {
        "index": row,
        "data_source": source,
        "prompt": tokenizer.decode(example.prompt),
        "response": tokenizer.decode(example.response),
        "transcript": transcript,
        "score": score,
        "reward_parts": {},
        "status": "example",
        "ground_truth": "",
        "response_tokens": len(example.response),
        "trained_tokens": example.trained_tokens,
    }
