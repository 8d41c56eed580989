"""A step of main_sft, compared with a plain loop of torch and transformers and, where trl can be
imported, with TRL's SFTTrainer.

    python recipes/benchmark/sft.py [--rounds 4] [--steps 5] [--rows 16]

The plain loop pads each micro-batch to its longest example and steps with fused AdamW, as most
scripts do; SFTTrainer, with its default settings for passes, does the same. All train the same
model on the same batches, in turns, with the whole step counted; main_sft and SFTTrainer also
compute metrics. The first loss of each must be the same. Writes the median seconds of a step, and
the ratios of main_sft's to the others', to results.json.
"""

import argparse
import importlib.util
import json
import random
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from report import keep
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer
from workload import model_of

from verlite.config.commands import SFT
from verlite.config.load import compose
from verlite.data.sampler import PromptSampler
from verlite.main_sft import main as main_sft
from verlite.sft.data import Example, columns, read_files, row_examples, tokenized

MICRO_BATCH = 8
LONGEST = 200


def write_rows(path: Path, count: int) -> None:
    """Write prompts with responses of 10 to LONGEST characters, which are tokens here."""
    draw = random.Random(0)
    rows = []
    for _ in range(count):
        length = int(10 * (LONGEST / 10) ** draw.random())
        digits = "".join(draw.choices("0123456789", k=length))
        rows.append({"prompt": f"{digits[:4]}+{digits[-4:]}=", "response": digits})
    path.write_text("\n".join(map(json.dumps, rows)))


Result = tuple[list[float], float]
"""Seconds of each step, and the loss of the first."""


def ours(options: list[str], folder: Path) -> Result:
    """Train with main_sft, and check that it succeeded."""
    if main_sft([*options, f"trainer.default_local_dir={folder}"]) != 0:
        raise SystemExit("main_sft failed")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["timing_s/step"] for line in lines], lines[0]["train/loss"]


def plain(path: Path, batches: list[list[Example]]) -> Result:
    """Train with the plain loop."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    seconds = []
    losses = []
    for batch in batches:
        began = time.perf_counter()
        total = sum(example.trained_tokens for example in batch)
        losses.append(0.0)
        for start in range(0, len(batch), MICRO_BATCH):
            part = batch[start : start + MICRO_BATCH]
            width = max(len(example.prompt) + len(example.response) for example in part)
            ids = torch.zeros(len(part), width, dtype=torch.int64)
            labels = torch.full_like(ids, -100)
            present = torch.zeros_like(ids)
            for row, example in enumerate(part):
                tokens = torch.tensor(example.prompt + example.response)
                ids[row, : len(tokens)] = tokens
                present[row, : len(tokens)] = 1
                labels[row, len(example.prompt) : len(tokens)] = tokens[len(example.prompt) :]
            logits = model(input_ids=ids, attention_mask=present).logits[:, :-1]
            targets = labels[:, 1:].flatten()
            loss = F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum") / total
            loss.backward()
            losses[-1] += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
    return seconds, losses[0]


def trl(path: Path, batches: list[list[Example]], folder: Path) -> Result:
    """Train with TRL's SFTTrainer."""
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    seconds: list[float] = []

    class InOrder(SFTTrainer):
        def _get_train_sampler(self, *args: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            seconds.append(-time.perf_counter())

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            seconds[-1] += time.perf_counter()

    rows = [
        {
            "input_ids": example.prompt + example.response,
            "completion_mask": [0] * len(example.prompt) + example.mask,
        }
        for batch in batches
        for example in batch
    ]
    settings = SFTConfig(
        output_dir=str(folder),
        per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=max(1, len(batches[0]) // MICRO_BATCH),
        max_steps=len(batches),
        learning_rate=1e-5,
        completion_only_loss=True,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        max_length=None,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = InOrder(
        model=AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        args=settings,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(path),
        callbacks=[Clock()],
    )
    trainer.train()
    return seconds, trainer.state.log_history[0]["loss"]


def main(rounds: int, steps: int, rows: int) -> None:
    model = model_of("w25")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder / "rows.jsonl", rows * steps)
        options = [
            f"data.train_files={folder / 'rows.jsonl'}",
            f"model.path={model}",
            "model.enable_gradient_checkpointing=false",
            f"data.train_batch_size={rows}",
            "data.max_token_len_per_gpu=2048",
            "trainer.device=cpu",
            "trainer.total_epochs=1",
        ]
        config = compose(overrides=options, command=SFT).config
        tokenizer = AutoTokenizer.from_pretrained(model)
        files = read_files(config.data.train_files, partial(columns, data=config.data))
        examples = tokenized(files, partial(row_examples, tokenizer=tokenizer, data=config.data))
        order = PromptSampler(len(examples), rows, config.trainer.seed)
        batches = [[examples[row] for row in order.next_batch()] for _ in range(steps)]
        seconds: dict[str, list[float]] = {}
        losses: dict[str, float] = {}
        for number in range(rounds):
            found = {
                "verlite": ours(options, folder / f"run_{number}"),
                "loop": plain(model, batches),
            }
            if importlib.util.find_spec("trl"):
                found["trl"] = trl(model, batches, folder / f"trl_{number}")
            for name, (steps_s, loss) in found.items():
                seconds.setdefault(name, []).extend(steps_s[1:])  # the first one warms up
                losses[name] = loss
    if max(losses.values()) - min(losses.values()) > 1e-3:
        raise SystemExit(f"the peers do not train the same: first losses {losses}")
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    lengths = [len(example.prompt) + len(example.response) for example in examples]
    found = {
        "rounds": rounds,
        "examples": rows,
        "tokens": sum(lengths) / steps,
        "seconds": medians,
        "ratios": {
            name: medians["verlite"] / s for name, s in medians.items() if name != "verlite"
        },
        "first_losses": losses,
        "all": seconds,
    }
    keep("sft", found)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rows", type=int, default=16)
    chosen = parser.parse_args()
    main(chosen.rounds, chosen.steps, chosen.rows)
