"""Read files of prompts and responses, check every row, and tokenize it once."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from verlite import tables
from verlite.config.sft import SFTDataConfig
from verlite.data.dataset import DataError
from verlite.data.prompts import build_prompt

Example = tuple[list[int], list[int]]
"""(prompt ids, response ids). The response ends with the end-of-sequence token."""


def read_examples(
    files: str | Sequence[str], tokenizer: Any, data: SFTDataConfig, max_rows: int = -1
) -> list[Example]:
    """Return the rows of the files as token ids.

    The prompt is built as in RL training (data.prompts.build_prompt), with the tokenizer's chat
    template if it has one. The response is tokenized separately, as a model would generate it.
    The end-of-sequence token is appended. max_rows: number of rows to read; -1: all.

    Raises:
        DataError: a file is missing, unreadable or empty; a column is missing; a row has the wrong
            form; or an example is too long.
    """
    examples: list[Example] = []
    for file in [files] if isinstance(files, str) else files:
        path = Path(file).expanduser()
        table = _read(path, [data.prompt_key, data.response_key])
        if max_rows >= 0:
            table = table.slice(0, max_rows - len(examples))
        prompts = table[data.prompt_key].to_pylist()
        responses = table[data.response_key].to_pylist()
        for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            try:
                prompt = _entry(prompt, data.prompt_key, data.prompt_dict_keys)
                response = _entry(response, data.response_key, data.response_dict_keys)
                examples.append(_example(prompt, response, tokenizer, data))
            except ValueError as error:
                raise DataError(f"{path} row {row}: {error}") from error
    if not examples:
        raise DataError("data.train_files is empty: name at least one file")
    return examples


def _entry(value: Any, column: str, names: Sequence[str] | None) -> Any:
    """Return the entry of a row's mapping that the names lead to, outermost first."""
    for name in names or ():
        if not isinstance(value, dict) or name not in value:
            found = f"it has {', '.join(value)}" if isinstance(value, dict) else "not a mapping"
            raise ValueError(f"column {column!r} has no entry {name!r}: {found}")
        value = value[name]
    return value


def _example(prompt: Any, response: Any, tokenizer: Any, data: SFTDataConfig) -> Example:
    messages = _messages(prompt, data.prompt_key)
    if not isinstance(response, str):
        raise ValueError(f"column {data.response_key!r} is {str(response)[:100]!r}, expected text")
    prompt_ids = build_prompt(tokenizer, messages, template_kwargs=data.apply_chat_template_kwargs)
    if not prompt_ids:
        raise ValueError("the prompt has no tokens")
    response_ids = tokenizer.encode(response, add_special_tokens=False)
    response_ids = [*response_ids, tokenizer.eos_token_id]
    length = len(prompt_ids) + len(response_ids)
    if length > data.max_length and data.truncation == "error":
        raise ValueError(
            f"the example has {length} tokens, more than data.max_length={data.max_length}. "
            "Raise it, or set data.truncation=right"
        )
    response_ids = response_ids[: max(0, data.max_length - len(prompt_ids))]
    if not response_ids:
        raise ValueError(
            f"the prompt has {len(prompt_ids)} tokens; with data.max_length={data.max_length} "
            "no token is left for the response"
        )
    return prompt_ids, response_ids


def _messages(prompt: Any, key: str) -> list[dict[str, Any]]:
    """Return a prompt as chat messages, without the null fields that parquet adds."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    is_chat = isinstance(prompt, list) and all(
        isinstance(message, dict) and isinstance(message.get("content"), str) for message in prompt
    )
    if not prompt or not is_chat:
        raise ValueError(
            f"column {key!r} is {str(prompt)[:100]!r}, "
            "expected text or a list of messages {role, content}"
        )
    return [
        {name: value for name, value in message.items() if value is not None} for message in prompt
    ]


def _read(path: Path, columns: list[str]) -> pa.Table:
    if path.is_dir():
        raise DataError(f"{path} is a folder. Name the files in data.train_files or val_files.")
    if not path.is_file():
        raise DataError(f"{path} does not exist. Correct data.train_files or data.val_files.")
    try:
        table = tables.read(path)
    except tables.TableError as error:
        raise DataError(f"{path} {error}") from error
    for column in columns:
        if column not in table.column_names:
            present = ", ".join(table.column_names) or "none"
            raise DataError(
                f"{path} has no column {column!r}. Its columns: {present}. "
                "Set data.prompt_key and data.response_key."
            )
    if table.num_rows == 0:
        raise DataError(f"{path} has no rows")
    return table
