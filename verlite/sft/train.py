"""Supervised training on prompts and responses, with the training engine of reinforcement learning and without Ray.

One process, or several under torchrun: every rank reads all examples and takes its share of each batch.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tensordict import TensorDict
from torch import Tensor

from verlite.config.sft import SFTConfig
from verlite.config.show import console
from verlite.data.sampler import PromptSampler
from verlite.engine.folder import load_tokenizer
from verlite.engine.fsdp import Counts, TrainEngine
from verlite.engine.micro import MicroBatching
from verlite.engine.process_group import single_process_group
from verlite.protocol.data import DataProto
from verlite.protocol.ragged import pad
from verlite.sft.data import Example, read_examples
from verlite.trainer.tracking import MetricsFile


def sft_loss(
    rows: TensorDict, outputs: dict[str, Tensor], counts: Counts
) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean over the step's response tokens of -log p(token | what stands before it); this micro-batch's part of it."""
    mask = rows["response_mask"]
    return -(outputs["log_probs"] * mask).sum() / counts.tokens, {"train/tokens": mask.sum()}


def batch_of(examples: list[Example]) -> DataProto:
    """Examples as a batch: prompts padded on the left to P, responses on the right to R; response_mask [B, R] is 1 on the response."""
    prompts, responses = [prompt for prompt, _ in examples], [response for _, response in examples]
    p, r = max(map(len, prompts), default=1), max(map(len, responses), default=1)
    response_mask = pad([[1] * len(ids) for ids in responses], r, torch.int64)
    attention_mask = torch.cat(
        [pad([[1] * len(ids) for ids in prompts], p, torch.int64, "left"), response_mask], dim=1
    )
    padded = pad(responses, r, torch.int64)
    return DataProto.from_dict(
        {
            "input_ids": torch.cat([pad(prompts, p, torch.int64, "left"), padded], dim=1),
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0),
            "responses": padded,
            "response_mask": response_mask,
        }
    )


def train(config: SFTConfig) -> Path:
    """Train, and return the folder of the trained model. Every rank calls it; rank 0 writes and prints.

    Raises DataError or ValueError, before the first step, for files and values that cannot be used.
    """
    data, trainer = config.data, config.trainer
    device = (
        trainer.device
        if trainer.device != "auto"
        else "cuda"
        if torch.cuda.is_available()
        else "cpu"
    )
    with world(device):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        out = console()
        out.quiet = rank > 0
        tokenizer = load_tokenizer(config.model)
        examples = read_examples(data.train_files, tokenizer, data)
        held_out = read_examples(data.val_files, tokenizer, data) if data.val_files else []
        sampler = PromptSampler(len(examples), data.train_batch_size, trainer.seed, data.shuffle)
        total = trainer.total_training_steps or trainer.total_epochs * sampler.steps_per_epoch
        out.print(
            f"{len(examples)} examples, {sum(len(r) for _, r in examples)} tokens to learn; {total} steps of {data.train_batch_size}"
        )
        engine = TrainEngine(
            config.model,
            config.fsdp_config,
            config.optim,
            total_training_steps=total,
            grad_clip=config.grad_clip,
            device=device if device == "cpu" else f"cuda:{torch.cuda.current_device()}",
            seed=trainer.seed,
        )
        micro = MicroBatching(max_tokens=data.max_token_len_per_gpu)
        run_dir = Path(trainer.default_local_dir).expanduser()
        run_dir.mkdir(parents=True, exist_ok=True)
        log = MetricsFile(run_dir / "metrics.jsonl") if rank == 0 else None
        with _progress(out, total) as progress:
            for step in range(1, total + 1):
                mine = [examples[i] for i in sampler.next_batch()[rank::ranks]]
                found = engine.update(batch_of(mine), micro, 1.0, sft_loss)
                engine.step_schedule()
                metrics = {
                    "train/loss": found["loss"],
                    "train/grad_norm": found["grad_norm"],
                    "train/lr": found["lr"],
                }
                metrics |= {"train/tokens": found["train/tokens"], "train/epoch": sampler.epoch}
                if (
                    held_out
                    and trainer.test_freq > 0
                    and (step % trainer.test_freq == 0 or step == total)
                ):
                    metrics["val/loss"] = validation_loss(engine, held_out[rank::ranks], micro)
                if log is not None:
                    log.write(step, metrics)
                progress(step, metrics)
        if log is not None:
            log.close()
        engine.save_pretrained(run_dir / "huggingface", tokenizer)
        out.print(
            f"metrics       {run_dir / 'metrics.jsonl'}\nHugging Face  {run_dir / 'huggingface'}",
            highlight=False,
        )
        return run_dir / "huggingface"


def validation_loss(engine: TrainEngine, examples: list[Example], micro: MicroBatching) -> float:
    """Mean over all ranks' response tokens of -log p. `examples` are this rank's; maybe none."""
    batch = batch_of(examples)
    log_probs = engine.forward(batch, micro)["log_probs"]
    sums = torch.stack([-log_probs.double().sum(), batch.batch["response_mask"].sum().double()]).to(
        engine.device
    )
    dist.all_reduce(sums)
    return float(sums[0] / sums[1])


@contextmanager
def world(device: str) -> Iterator[None]:
    """torch.distributed as torchrun has laid it out, or this process alone."""
    if "WORLD_SIZE" not in os.environ:
        with single_process_group():
            yield
        return
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _progress(out, total: int):
    """A live line on a terminal; ten lines over the run elsewhere too."""
    bar = Progress(
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(24),
        TimeRemainingColumn(),
        TextColumn("{task.fields[loss]}"),
        console=out,
        transient=True,
        disable=not out.is_terminal or out.quiet,
    )
    task = bar.add_task("", total=total, loss="")

    def show(step: int, metrics: dict[str, float]) -> None:
        loss = f"loss {metrics['train/loss']:.3f}"
        bar.update(task, completed=step, loss=loss)
        if "val/loss" in metrics or step % max(1, total // 10) == 0 or step == total:
            parts = [
                f"step {step}/{total}",
                loss,
                f"grad {metrics['train/grad_norm']:.2f}",
                f"lr {metrics['train/lr']:.2g}",
            ]
            parts += [f"val loss {metrics['val/loss']:.3f}"] if "val/loss" in metrics else []
            out.print("  ".join(parts), highlight=False)

    with bar:
        yield show
