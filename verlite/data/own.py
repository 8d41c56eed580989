"""Rows in verl's format from a table of prompts and answers."""

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verlite.data.dataset import DataError
from verlite.data.preprocess import make_rows, messages, read_file
from verlite.tables import TEXT_SUFFIXES

Row = dict[str, Any]


@dataclass(frozen=True)
class Columns:
    """Which columns become what.

    prompt: text, chat messages, or either as JSON text.
    answer: the ground truth.
    system: text of a system message in front of every prompt.
    template: format of prompts that are text, with {} for the text.
    source: data_source of every row. It selects the built-in reward function.
    """

    prompt: str
    answer: str
    system: str | None
    template: str | None
    source: str

    def row(self, example: Row, split: str, index: int) -> Row:
        """Return a row. Other columns with text or a number go to extra_info.

        Raises:
            ValueError, KeyError: the prompt or the answer is missing, empty or of another type.
        """
        chat = messages(example[self.prompt], self.template)
        if self.system is not None:
            if chat[0]["role"] == "system":
                raise ValueError(f"{self.prompt!r} has a system message; leave out --system")
            chat = [{"role": "system", "content": self.system}, *chat]
        if chat[-1]["role"] == "assistant":
            raise ValueError(
                f"{self.prompt!r} ends with a message of the assistant; a prompt ends before it"
            )
        others = {
            name: value
            for name, value in example.items()
            if name not in (self.prompt, self.answer, "split", "index")
            and isinstance(value, str | int | float)
        }
        return {
            "data_source": self.source,
            "prompt": chat,
            "ability": "",
            "reward_model": {"style": "rule", "ground_truth": self._truth(example[self.answer])},
            "extra_info": {"split": split, "index": index, **others},
        }

    def _truth(self, value: Any) -> str:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError(f"{self.answer!r} must be text or a number, not {value!r:.60}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{self.answer!r} is {value}, not a number to compare with")
        # A column of integers with gaps has floats in tables of pandas: 5.0 is the answer 5.
        whole = isinstance(value, float) and value.is_integer()
        text = str(int(value) if whole else value).strip()
        if not text:
            raise ValueError(f"{self.answer!r} is empty, so the reward has nothing to compare with")
        return text


def read_rows(files: Sequence[Path], columns: Columns) -> list[Row]:
    """Return the rows of the files, in order.

    Raises:
        DataError: a file or a row is invalid. The message names it.
    """
    for file in files:
        if not file.is_file():
            what = "is a folder" if file.is_dir() else "does not exist"
            raise DataError(f"{file} {what}. Name .csv, .jsonl, .json or .parquet files.")
        if file.suffix not in (*TEXT_SUFFIXES, ".parquet"):
            raise DataError(
                f"{file} has the suffix {file.suffix!r}. Name .csv, .jsonl, .json or .parquet "
                "files; save a spreadsheet as CSV UTF-8 with commas between fields."
            )
    examples = (example for file in files for example in read_file(file))
    return make_rows(examples, "train", columns.row, files[0])


def hold_out(rows: list[Row], count: int) -> tuple[list[Row], list[Row]]:
    """Return the rows without `count` random ones, and these. Equal prompts stay together.

    Raises:
        DataError: no row is left for training.
    """
    by_prompt: dict[str, list[int]] = {}
    for number, row in enumerate(rows):
        by_prompt.setdefault(str(row["prompt"]), []).append(number)
    groups = list(by_prompt.values())
    random.Random(0).shuffle(groups)
    held: set[int] = set()
    for group in groups:
        if len(held) >= count:
            break
        held.update(group)
    if len(held) == len(rows):
        raise DataError(f"--hold-out={count} leaves none of the {len(rows)} rows for training")
    for number in held:
        rows[number]["extra_info"]["split"] = "test"
    return (
        [row for number, row in enumerate(rows) if number not in held],
        [rows[number] for number in sorted(held)],
    )


def statistics(rows: list[Row]) -> list[str]:
    """Return lines about lengths, answers and repeated prompts."""
    lengths = sorted(sum(len(message["content"]) for message in row["prompt"]) for row in rows)
    answers = Counter(row["reward_model"]["ground_truth"] for row in rows)
    common, times = answers.most_common(1)[0]
    lines = [
        f"prompts: {lengths[0]} to {lengths[-1]} characters, median {lengths[len(lengths) // 2]}",
        f"answers: {len(answers)} different, the most common {common[:40]!r} in {times} rows",
    ]
    repeated = len(rows) - len({str(row["prompt"]) for row in rows})
    if repeated:
        lines.append(f"repeated prompts: {repeated}")
    return lines
