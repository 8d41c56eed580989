"""Read files of training examples, check every row, and tokenize it once."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from verlite import tables
from verlite.config.plan import files_of
from verlite.config.sft import RowsConfig, SFTDataConfig
from verlite.data.dataset import DataError, find_file
from verlite.data.prompts import build_prompt
from verlite.sft import conversation

MESSAGES = "messages"
"""Column of conversations that is found without data.messages_key."""
TEXT_OR_CHAT = "text or a list of messages {role, content}"
Row = dict[str, Any]
Messages = list[dict[str, Any]]
Columns = Callable[[Path, list[str]], list[str]]
"""(file, its columns) -> those that are read. Raises DataError if it has not all of them."""


@dataclass(frozen=True)
class Example:
    """One row of training data as token ids.

    prompt: the tokens before the first trained one.
    response: the rest.
    mask: for each token of the response 1 if it is trained, else 0.
    """

    prompt: list[int]
    response: list[int]
    mask: list[int]

    @property
    def trained_tokens(self) -> int:
        """Number of tokens in the loss."""
        return sum(self.mask)


ExamplesOf = Callable[[Row], list[Example]]
"""A row -> its examples. Raises ValueError if the row has the wrong form."""


@dataclass(frozen=True)
class RowFile:
    """The rows of a file that were read, with the columns that training needs."""

    path: Path
    rows: pa.Table | list[Row]
    used: int
    """Rows of the file that training uses, read or not."""

    def as_written(self) -> list[Row]:
        """Return the rows, without the null entries that a table adds to mappings."""
        if isinstance(self.rows, list):
            return self.rows
        return [
            {name: _without_nulls(value) for name, value in row.items()}
            for row in self.rows.to_pylist()
        ]


def read_files(
    files: str | Sequence[str] | None,
    columns_of: Columns,
    limit: int = -1,
    first: int | None = None,
) -> list[RowFile]:
    """Read each file once.

    Args:
        limit: number of rows that training uses, the first ones; -1: all.
        first: number of these that are read; None: all.

    Raises:
        DataError: a file is missing, unreadable or empty, or `columns_of` raises it.
    """
    found: list[RowFile] = []
    left = first
    for file in files_of(files):
        path = find_file(file)
        rows, count = _read(path, columns_of, left)
        used = count if limit < 0 else min(count, limit - sum(one.used for one in found))
        found.append(RowFile(path, rows[:used], used))
        left = None if left is None else left - len(found[-1].rows)
    if not found:
        raise DataError("data.train_files is empty: name at least one file")
    return found


def tokenized(files: Sequence[RowFile], examples_of: ExamplesOf) -> list[Example]:
    """Return the examples of all rows, in order. Raises DataError if `examples_of` raises a
    ValueError about a row."""
    examples: list[Example] = []
    for file in files:
        for number, row in enumerate(file.as_written()):
            try:
                examples += examples_of(row)
            except ValueError as error:
                raise DataError(f"{file.path} row {number}: {error}") from error
    return examples


def row_examples(row: Row, tokenizer: Any, data: SFTDataConfig) -> list[Example]:
    """Return the example of a row as token ids.

    A row is a prompt and a response, or a conversation (`conversation.tokenize`). The prompt is
    built as in RL training (data.prompts.build_prompt), with the tokenizer's chat template if it
    has one. The response is tokenized separately, as a model would generate it, and the
    end-of-sequence token is appended.

    Raises:
        ValueError: the row has the wrong form, or the example is too long.
    """
    if data.prompt_key in row and data.response_key in row:
        return [fit(_pair(row, tokenizer, data), data)]
    return [fit(_conversation(row, data.messages_key or MESSAGES, tokenizer, data), data)]


def columns(path: Path, present: list[str], data: SFTDataConfig) -> list[str]:
    """Return the columns of a file that training reads. Raises DataError if it has not all
    of them."""
    key = data.messages_key
    if key is None and MESSAGES in present and data.prompt_key not in present:
        key = MESSAGES
    required = [data.prompt_key, data.response_key] if key is None else [key]
    remedy = "Set data.prompt_key and data.response_key, or data.messages_key."
    require(path, present, required, remedy)
    return [*required, *([data.tools_key] if data.tools_key in present else [])]


def require(path: Path, present: list[str], required: list[str], remedy: str) -> None:
    """Raise DataError if a file lacks one of these columns."""
    for column in required:
        if column not in present:
            raise DataError(
                f"{path} has no column {column!r}. Its columns: {', '.join(present) or 'none'}. "
                f"{remedy}"
            )


def _pair(row: Row, tokenizer: Any, data: SFTDataConfig) -> Example:
    """Return the example of a row with a prompt and a response."""
    response = _entry(row[data.response_key], data.response_key, data.response_dict_keys)
    if not isinstance(response, str):
        raise ValueError(f"column {data.response_key!r} is {str(response)[:100]!r}, expected text")
    return answer(prompt_of(row, data), response, tokenizer, data, tools_of(row, data))


def prompt_of(row: Row, data: RowsConfig) -> Messages:
    """Return a row's prompt. Text is one message of the user."""
    prompt = chat_or_text(_entry(row[data.prompt_key], data.prompt_key, data.prompt_dict_keys))
    chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return messages_of(chat, data.prompt_key, ["role", "content"], TEXT_OR_CHAT)


def tools_of(row: Row, data: RowsConfig) -> list[Any]:
    """Return the tools that the chat template shows to the model; [] if a row has none."""
    tools = from_json(row.get(data.tools_key))
    if tools and not isinstance(tools, list):
        raise ValueError(
            f"column {data.tools_key!r} is {str(tools)[:100]!r}, "
            "expected a list of JSON schemas, or that as JSON text. If it is something else, set "
            "data.tools_key to a name that no column has"
        )
    return tools or []


def answer(
    prompt: Messages, response: str, tokenizer: Any, data: RowsConfig, tools: Sequence[Any] = ()
) -> Example:
    """Return the example of a prompt and its response, which is trained."""
    calls = any(message.get("tool_calls") for message in prompt)
    if (tools or calls) and tokenizer.chat_template is None:
        remedy = "Set model.custom_chat_template"
        if tools:
            remedy += ". If these are no tools, set data.tools_key to a name that no column has"
        raise ValueError(
            f"the row has {f'column {data.tools_key!r}' if tools else 'tool_calls'}, which only a "
            f"chat template can write, and the tokenizer has none. {remedy}"
        )
    options = dict(data.apply_chat_template_kwargs) | ({"tools": list(tools)} if tools else {})
    if tokenizer.eos_token_id is None:
        raise ValueError(
            "the tokenizer has no end-of-sequence token, which ends every response. Set eos_token "
            "in its tokenizer_config.json, or train on conversations (data.messages_key) with a "
            "chat template that ends the turns"
        )
    with conversation.applying_template():
        prompt_ids = build_prompt(tokenizer, prompt, template_kwargs=options)
    if not prompt_ids:
        raise ValueError("the prompt has no tokens")
    response_ids = tokenizer.encode(response, add_special_tokens=False)
    response_ids = [*response_ids, tokenizer.eos_token_id]
    return Example(prompt_ids, response_ids, [1] * len(response_ids))


def _entry(value: Any, column: str, names: Sequence[str] | None) -> Any:
    """Return the entry of a row's mapping that the names lead to, outermost first."""
    for name in names or ():
        if not isinstance(value, dict) or name not in value:
            found = f"it has {', '.join(value)}" if isinstance(value, dict) else "not a mapping"
            raise ValueError(f"column {column!r} has no entry {name!r}: {found}")
        value = value[name]
    return value


def messages_of(value: Any, column: str, fields: Sequence[str], expected: str) -> Messages:
    """Return chat messages without their null fields. Each has these fields, which are text; one
    that calls tools needs no content."""
    messages = value
    if isinstance(value, list):
        messages = [
            {name: entry for name, entry in message.items() if entry is not None}
            if isinstance(message, dict)
            else message
            for message in value
        ]
    is_chat = isinstance(messages, list) and all(
        isinstance(message, dict)
        and all(
            isinstance(message.get(name), str)
            or (name == "content" and message.get("tool_calls") and name not in message)
            for name in fields
        )
        for message in messages
    )
    if not messages or not is_chat:
        raise ValueError(f"column {column!r} is {str(value)[:100]!r}, expected {expected}")
    return list(messages)


def _conversation(row: Row, key: str, tokenizer: Any, data: SFTDataConfig) -> Example:
    """Return the example of a row with a conversation. What follows its last turn is left out."""
    expected = "a list of messages {role, content}, or that as JSON text"
    messages = messages_of(from_json(row[key]), key, ["role"], expected)
    tools = tools_of(row, data)
    ids, mask = conversation.tokenize(tokenizer, messages, tools, data.apply_chat_template_kwargs)
    first = mask.index(1)
    end = len(mask) - mask[::-1].index(1)
    if first == 0:
        raise ValueError("its first token is trained, but no token before it predicts it")
    return Example(ids[:first], ids[first:end], mask[first:end])


def from_json(value: Any) -> Any:
    """Return the value of JSON text, and any other value as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def chat_or_text(value: Any) -> Any:
    """Return the messages of JSON text, and any other value, such as the text [1, 2], as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    decoded = from_json(value)
    is_chat = isinstance(decoded, list) and any(
        isinstance(entry, dict) and "role" in entry and entry.keys() & {"content", "tool_calls"}
        for entry in decoded
    )
    return decoded if is_chat else value


def _without_nulls(value: Any) -> Any:
    """Return a value without the null entries of mappings, at any depth."""
    if isinstance(value, dict):
        return {name: _without_nulls(entry) for name, entry in value.items() if entry is not None}
    if isinstance(value, list):
        return [_without_nulls(entry) for entry in value]
    return value


def fit(example: Example, data: RowsConfig) -> Example:
    """Return an example of at most data.max_length tokens."""
    length = len(example.prompt) + len(example.response)
    if length > data.max_length and data.truncation == "error":
        raise ValueError(
            f"the example has {length} tokens, more than data.max_length={data.max_length}. "
            "Raise it, or set data.truncation=right"
        )
    room = max(0, data.max_length - len(example.prompt))
    if room == 0:
        raise ValueError(
            f"the prompt has {len(example.prompt)} tokens; with data.max_length={data.max_length} "
            "no token is left for the response. Raise it, or leave out the row"
        )
    return Example(example.prompt, example.response[:room], example.mask[:room])


def _read(path: Path, columns_of: Columns, first: int | None) -> tuple[pa.Table | list[Row], int]:
    """Return the first rows of a file (None: all), and how many it has.

    Rows of text are no table, which would give the arguments of all tool calls one order, and
    those of one name one type: 1 would become 1.0 if another row has 1.5.
    """
    if path.is_dir():
        raise DataError(f"{path} is a folder. Name the files in data.train_files or val_files.")
    if not path.is_file():
        raise DataError(f"{path} does not exist. Correct data.train_files or data.val_files.")

    def choose(names: list[str], rows: int) -> list[str]:
        if rows == 0:
            raise DataError(f"{path} has no rows")
        return columns_of(path, names)

    try:
        if path.suffix in tables.TEXT_SUFFIXES:
            rows = [row for _, row in tables.located_rows(path)]
            chosen = choose(list(dict.fromkeys(name for row in rows for name in row)), len(rows))
            return [{name: row.get(name) for name in chosen} for row in rows[:first]], len(rows)
        return tables.read_chosen(path, choose, first)
    except tables.TableError as error:
        raise DataError(f"{path} {error}") from error
