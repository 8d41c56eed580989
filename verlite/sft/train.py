"""Supervised fine-tuning on prompts and responses, with the engine of RL training but without Ray.

Runs as one process, or as several under torchrun. Every rank reads all examples and trains on its
share of each batch.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tensordict import TensorDict
from torch import Tensor

from verlite.config.load import dump
from verlite.config.sft import SFT, LoadedSFT, SFTConfig
from verlite.config.show import console
from verlite.data.sampler import PromptSampler
from verlite.engine.folder import load_tokenizer
from verlite.engine.fsdp import Counts, TrainEngine
from verlite.engine.micro import MicroBatching
from verlite.engine.process_group import process_group
from verlite.files import RetryingWriter, replace_file
from verlite.protocol.data import DataProto
from verlite.protocol.ragged import pad
from verlite.sft.data import Example, read_examples
from verlite.trainer.tracking import METRICS, Tracking

Metrics = dict[str, float]


def sft_loss(
    rows: TensorDict, outputs: dict[str, Tensor], counts: Counts
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return this micro-batch's part of the mean of -log p(token | context).

    The mean is over the response tokens of the whole optimizer step: `counts.tokens`.
    """
    mask = rows["response_mask"]
    loss = -(outputs["log_probs"] * mask).sum() / counts.tokens
    return loss, {"train/tokens": mask.sum()}


def build_batch(examples: list[Example]) -> DataProto:
    """Return examples as a batch of B rows.

    Prompts are padded on the left to P tokens, responses on the right to R tokens.
    response_mask [B, R] int64 is 1 on the response.
    """
    prompts = [prompt for prompt, _ in examples]
    responses = [response for _, response in examples]
    prompt_width = max(map(len, prompts), default=1)
    width = max(map(len, responses), default=1)
    prompt_mask = pad([[1] * len(ids) for ids in prompts], prompt_width, torch.int64, "left")
    response_mask = pad([[1] * len(ids) for ids in responses], width, torch.int64)
    attention_mask = torch.cat([prompt_mask, response_mask], dim=1)
    padded_prompts = pad(prompts, prompt_width, torch.int64, "left")
    padded_responses = pad(responses, width, torch.int64)
    return DataProto.from_dict(
        {
            "input_ids": torch.cat([padded_prompts, padded_responses], dim=1),
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0),
            "responses": padded_responses,
            "response_mask": response_mask,
        }
    )


def train(loaded: LoadedSFT) -> Path:
    """Train, and return the folder of the trained model.

    Every rank calls this function. Rank 0 writes and prints.

    Raises:
        DataError, ValueError: a file or value cannot be used. Raised before the first step.
    """
    config = loaded.config
    data = config.data
    trainer = config.trainer
    device = trainer.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    with process_group(device):
        rank = dist.get_rank()
        ranks = dist.get_world_size()
        out = console()
        out.quiet = rank > 0
        tokenizer = load_tokenizer(config.model)
        examples = read_examples(data.train_files, tokenizer, data, data.train_max_samples)
        held_out = []
        if data.val_files:
            held_out = read_examples(data.val_files, tokenizer, data, data.val_max_samples)
        sampler = PromptSampler(len(examples), data.train_batch_size, trainer.seed, data.shuffle)
        total = trainer.total_training_steps or trainer.total_epochs * sampler.steps_per_epoch
        tokens = sum(len(response) for _, response in examples)
        out.print(f"{len(examples)} examples, {tokens} response tokens")
        out.print(f"{total} steps of {data.train_batch_size} examples")
        engine = TrainEngine(
            config.model,
            config.fsdp_config,
            config.optim,
            total_training_steps=total,
            grad_clip=config.grad_clip,
            device=device if device == "cpu" else f"cuda:{torch.cuda.current_device()}",
            seed=trainer.seed,
            sequence_parallel=config.ulysses_sequence_parallel_size,
        )
        micro = micro_batching(config)
        run_dir = Path(trainer.default_local_dir).expanduser()
        run_dir.mkdir(parents=True, exist_ok=True)
        log = None
        writer = RetryingWriter(lambda text: out.print(text, markup=False, highlight=False))
        if rank == 0:
            text = dump(loaded, SFT)
            replace_file(run_dir / "config.yaml", text)
            log = Tracking(
                trainer.logger,
                run_dir,
                trainer.project_name,
                trainer.experiment_name,
                yaml.safe_load(text),
                writer,
            )
        with _progress(out, total) as show_step:
            for step in range(1, total + 1):
                mine = [examples[i] for i in sampler.next_batch()[rank::ranks]]
                result = engine.update(build_batch(mine), micro, 1.0, sft_loss)
                engine.step_schedule()
                metrics = {
                    "train/loss": result["loss"],
                    "train/grad_norm": result["grad_norm"],
                    "train/lr": result["lr"],
                    "train/tokens": result["train/tokens"],
                    "train/epoch": sampler.epoch,
                }
                is_due = trainer.test_freq > 0 and step % trainer.test_freq == 0
                if held_out and (is_due or step == total):
                    metrics["val/loss"] = validation_loss(engine, held_out[rank::ranks], micro)
                if log is not None:
                    log.log(step, metrics)
                show_step(step, metrics)
        if log is not None:
            log.finish()
        writer.close()
        target = run_dir / "huggingface"
        engine.save_pretrained(target, tokenizer)
        out.print(f"metrics       {run_dir / METRICS}", highlight=False)
        out.print(f"Hugging Face  {target}", highlight=False)
        return target


def micro_batching(config: SFTConfig) -> MicroBatching:
    """Return how a device's examples are split into passes.

    Devices that share passes have the tokens of all of them in one.
    """
    data = config.data
    if data.by_examples():
        return MicroBatching(size=data.micro_batch_size_per_gpu)
    tokens = data.max_token_len_per_gpu * config.ulysses_sequence_parallel_size
    return MicroBatching(max_tokens=tokens)


def validation_loss(engine: TrainEngine, examples: list[Example], micro: MicroBatching) -> float:
    """Return the mean of -log p over the response tokens of all ranks.

    Args:
        examples: this rank's examples; may be empty.
    """
    batch = build_batch(examples)
    log_probs = engine.forward(batch, micro)["log_probs"]
    loss_sum = -log_probs.double().sum()
    token_count = batch.batch["response_mask"].sum().double()
    sums = torch.stack([loss_sum, token_count]).to(engine.device)
    dist.all_reduce(sums)
    return float(sums[0] / sums[1])


@contextmanager
def _progress(out: Console, total: int) -> Iterator[Callable[[int, Metrics], None]]:
    """Show a progress bar on a terminal, and print about ten lines during the run everywhere."""
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

    def show_step(step: int, metrics: Metrics) -> None:
        loss = f"loss {metrics['train/loss']:.3f}"
        bar.update(task, completed=step, loss=loss)
        is_tenth = step % max(1, total // 10) == 0 or step == total
        if is_tenth or "val/loss" in metrics:
            line = f"step {step}/{total}  {loss}"
            line += f"  grad {metrics['train/grad_norm']:.2f}  lr {metrics['train/lr']:.2g}"
            if "val/loss" in metrics:
                line += f"  val loss {metrics['val/loss']:.3f}"
            out.print(line, highlight=False)

    with bar:
        yield show_step
