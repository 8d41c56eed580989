"""Parquet files of prompts with the responses to learn, read, checked and tokenised once."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verlite.config.sft import SFTDataConfig
from verlite.data.dataset import DataError
from verlite.data.prompts import build_prompt

Example = tuple[list[int], list[int]]
"""(prompt ids, response ids with the end-of-sequence token). The loss is on the response alone."""


def read_examples(files: str | Sequence[str], tokenizer: Any, data: SFTDataConfig) -> list[Example]:
    """Every row of the files as token ids.

    The prompt is built as in reinforcement learning (data.prompts.build_prompt): through the chat template where the tokenizer has
    one. The response is encoded by itself, as a model that generates would write it, and ends with the end-of-sequence token.

    Raises DataError for a file that is missing, unreadable or empty, a missing column, a row of another form, an example that is
    too long under data.truncation=error, or one whose prompt alone leaves no room for a response.
    """
    examples = []
    for path in [
        Path(file).expanduser() for file in ([files] if isinstance(files, str) else files)
    ]:
        table = _read(path, [data.prompt_key, data.response_key])
        columns = table[data.prompt_key].to_pylist(), table[data.response_key].to_pylist()
        for row, (prompt, response) in enumerate(zip(*columns, strict=True)):
            try:
                examples.append(_example(prompt, response, tokenizer, data))
            except ValueError as error:
                raise DataError(f"{path} row {row}: {error}") from error
    if not examples:
        raise DataError("data.train_files is empty: name at least one parquet file")
    return examples


def _example(prompt: Any, response: Any, tokenizer: Any, data: SFTDataConfig) -> Example:
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if (
        not isinstance(prompt, list)
        or not prompt
        or not all(isinstance(m, dict) and isinstance(m.get("content"), str) for m in prompt)
    ):
        raise ValueError(
            f"column {data.prompt_key!r} is {str(prompt)[:100]!r}, expected text or a list of messages {{role, content}}"
        )
    if not isinstance(response, str):
        raise ValueError(f"column {data.response_key!r} is {str(response)[:100]!r}, expected text")
    messages = [
        {name: value for name, value in message.items() if value is not None} for message in prompt
    ]
    prompt_ids = build_prompt(tokenizer, messages, template_kwargs=data.apply_chat_template_kwargs)
    response_ids = [*tokenizer.encode(response, add_special_tokens=False), tokenizer.eos_token_id]
    length = len(prompt_ids) + len(response_ids)
    if not prompt_ids:
        raise ValueError("the prompt has no tokens")
    if length > data.max_length:
        if data.truncation == "error":
            raise ValueError(
                f"{length} tokens, data.max_length={data.max_length} allows no more; raise it, or set data.truncation=right"
            )
        response_ids = response_ids[: max(0, data.max_length - len(prompt_ids))]
        if not response_ids:
            raise ValueError(
                f"the prompt's {len(prompt_ids)} tokens leave no room for a response in data.max_length={data.max_length}"
            )
    return prompt_ids, response_ids


def _read(path: Path, columns: list[str]) -> pa.Table:
    if not path.is_file():
        raise DataError(f"{path} does not exist: correct data.train_files or data.val_files")
    try:
        table = pq.read_table(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path} cannot be read as parquet: {error}") from error
    for column in columns:
        if column not in table.column_names:
            present = ", ".join(table.column_names) or "none"
            raise DataError(
                f"{path} has no column {column!r}; its columns are {present} (data.prompt_key, data.response_key)"
            )
    if table.num_rows == 0:
        raise DataError(f"{path} has no rows")
    return table
