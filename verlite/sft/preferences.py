"""Read files of preferences: a prompt, a better response and a worse one."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from verlite.config.dpo import DPODataConfig
from verlite.sft.data import (
    TEXT_OR_CHAT,
    Example,
    Messages,
    Row,
    answer,
    fit,
    messages_of,
    prompt_of,
    read_rows,
    require,
)


def read_pairs(
    files: str | Sequence[str], tokenizer: Any, data: DPODataConfig, max_rows: int = -1
) -> list[Example]:
    """Return two examples for each row of the files: the better one, then the worse one.

    Prompts and responses become tokens as those of main_sft.

    Raises:
        DataError: as `read_rows`.
    """

    def examples_of(row: Row) -> list[Example]:
        return [
            fit(answer(prompt, response, tokenizer, data), data)
            for prompt, response in _answers(row, data)
        ]

    return read_rows(files, partial(columns, data=data), examples_of, max_rows)


def columns(path: Path, present: list[str], data: DPODataConfig) -> list[str]:
    """Return the columns of a file that `read_pairs` reads. Raises DataError if it has not all of
    them."""
    required = [data.chosen_key, data.rejected_key]
    require(path, present, required, "Set data.chosen_key and data.rejected_key.")
    return [*required, *([data.prompt_key] if data.prompt_key in present else [])]


def _answers(row: Row, data: DPODataConfig) -> list[tuple[Messages, str]]:
    """Return prompt and response of both sides of a row."""
    sides = [_side(row[column], column) for column in (data.chosen_key, data.rejected_key)]
    if data.prompt_key in row:
        prompt = prompt_of(row, data)
        return [(prompt, response) for _, response in sides]
    (before, _), (other, _) = sides
    if not before or before != other:
        raise ValueError(
            f"there is no prompt: neither a column {data.prompt_key!r}, nor the same messages "
            f"before the responses in {data.chosen_key!r} and {data.rejected_key!r}"
        )
    return sides


def _side(value: Any, column: str) -> tuple[Messages, str]:
    """Return the messages before a response, none for text, and the response."""
    if isinstance(value, str):
        return [], value
    messages = messages_of(value, column, ["role", "content"], TEXT_OR_CHAT)
    if messages[-1]["role"] != "assistant":
        raise ValueError(f"column {column!r}: the last message is not the assistant's")
    return messages[:-1], messages[-1]["content"]
