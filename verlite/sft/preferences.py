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
    chat_or_text,
    fit,
    messages_of,
    prompt_of,
    read_files,
    require,
    tokenized,
)


def row_examples(row: Row, tokenizer: Any, data: DPODataConfig) -> list[Example]:
    """Return two examples of a row: the better one, then the worse one.

    Prompts and responses become tokens as those of main_sft. Raises ValueError: the row has the
    wrong form, or an example is too long.
    """
    return [
        fit(answer(prompt, response, tokenizer, data), data)
        for prompt, response in _answers(row, data)
    ]


def read_pairs(
    files: str | Sequence[str], tokenizer: Any, data: DPODataConfig, max_rows: int = -1
) -> list[Example]:
    """Return the examples of the files' first rows, as `data.read_examples`."""
    read = read_files(files, partial(columns, data=data), max_rows)
    return tokenized(read, partial(row_examples, tokenizer=tokenizer, data=data))


def columns(path: Path, present: list[str], data: DPODataConfig) -> list[str]:
    """Return the columns of a file that `read_pairs` reads. Raises DataError if it has not all of
    them."""
    required = [data.chosen_key, data.rejected_key]
    require(path, present, required, "Set data.chosen_key and data.rejected_key.")
    return [*required, *([data.prompt_key] if data.prompt_key in present else [])]


def _answers(row: Row, data: DPODataConfig) -> list[tuple[Messages, str]]:
    """Return prompt and response of both sides of a row."""
    sides = [_side(row[column], column) for column in (data.chosen_key, data.rejected_key)]
    (before, better), (other, worse) = sides
    if data.prompt_key in row:
        prompt = prompt_of(row, data)
        before = _with_all_turns(prompt, before, data.chosen_key, data)
        other = _with_all_turns(prompt, other, data.rejected_key, data)
        if before != other:
            raise ValueError(
                f"the messages before the responses in {data.chosen_key!r} and "
                f"{data.rejected_key!r} are different: both must answer one prompt"
            )
        return [(before, better), (before, worse)]
    if not before or before != other:
        raise ValueError(
            f"there is no prompt: neither a column {data.prompt_key!r}, nor the same messages "
            f"before the responses in {data.chosen_key!r} and {data.rejected_key!r}"
        )
    return sides


def _with_all_turns(
    prompt: Messages, before: Messages, column: str, data: DPODataConfig
) -> Messages:
    """Return the prompt and the messages before a response as one, each turn once."""
    if not before or prompt[-len(before) :] == before:
        return prompt
    if prompt in (before[: len(prompt)], before[-len(prompt) :]):
        return before
    raise ValueError(
        f"column {column!r}: {len(before)} messages before the response neither begin nor end with "
        f"those of column {data.prompt_key!r}. Write the response alone, or the whole conversation"
    )


def _side(value: Any, column: str) -> tuple[Messages, str]:
    """Return the messages before a response, none for text, and the response."""
    value = chat_or_text(value)
    if isinstance(value, str):
        return [], value
    messages = messages_of(value, column, ["role", "content"], TEXT_OR_CHAT)
    if messages[-1]["role"] != "assistant":
        raise ValueError(f"column {column!r}: the last message is not the assistant's")
    if messages[-1].get("tool_calls"):
        raise ValueError(f"column {column!r}: the last message has tool_calls, expected text")
    return messages[:-1], messages[-1]["content"]
