"""What the console says about failed rewards: once for each kind of failure, with the sample."""

from collections import Counter

import torch

from verlite.controller.columns import fetch
from verlite.files import one_line
from verlite.protocol.data import DataProto
from verlite.rollout.types import Status
from verlite.trainer.run import Run

_KINDS = 50
"""Most kinds that are shown: a service may name each failure in another way."""
_CHARACTERS = 500
"""Shown of a prompt, a response and a ground truth."""
_LINES = 12
"""Shown of a traceback, from its end: the line of the function that raised is there."""


def failed_rows(batch: DataProto) -> list[int]:
    """Return the rows whose sample is complete but has no reward."""
    completed = torch.from_numpy(batch.non_tensor_batch["status"] != Status.ERROR)
    rows: list[int] = (completed & ~batch.batch["valid"]).nonzero().flatten().tolist()
    return rows


def warn_of_new_kinds(run: Run, batch: DataProto) -> None:
    """Warn of each kind of failure that this process has not shown yet."""
    errors = batch.non_tensor_batch["error"]
    rows = failed_rows(batch)
    counts = Counter(errors[row] for row in rows)
    for row in rows:
        kind = errors[row]
        if kind in run.shown_failures or len(run.shown_failures) >= _KINDS:
            continue
        run.shown_failures.add(kind)
        run.display.warn(
            f"{counts[kind]} of {len(batch)} samples have no reward and are left out of the update "
            f"({one_line(kind, 100)}). Later ones count in reward/error_rate, without a message. "
            "The first:\n"
            f"{describe(run, batch, row)}"
        )


def describe(run: Run, batch: DataProto, row: int) -> str:
    """Return the prompt, the response, the ground truth and the failure of a row, as text."""
    columns = fetch(batch[row : row + 1], ("prompt_ids", "text")).non_tensor_batch
    parts = {
        "prompt": run.tokenizer.decode(columns["prompt_ids"][0]),
        "response": columns["text"][0],
        "ground truth": columns["ground_truth"][0],
    }
    lines = [f"  {name}: {one_line(part, _CHARACTERS)}" for name, part in parts.items()]
    failure = str(columns["reward_traceback"][0]).rstrip().splitlines()[-_LINES:]
    return "\n".join(lines + [f"  {one_line_kept(line)}" for line in failure])


def one_line_kept(line: str) -> str:
    """Return a line of a traceback with its indentation and without control characters."""
    indentation = len(line) - len(line.lstrip(" "))
    return " " * min(indentation, 20) + one_line(line)
