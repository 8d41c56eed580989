"""Examples of files, as main_sft and main_dpo make them."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from verlite.sft import data as sft
from verlite.sft import dpo


def read_examples(
    files: str | Sequence[str], tokenizer: Any, data: Any, max_rows: int = -1, of: Any = sft
) -> list[sft.Example]:
    """Return the examples of the files' first rows; max_rows=-1: of all."""
    read = sft.read_files(files, partial(of.columns, data=data), max_rows)
    return sft.tokenized(read, partial(of.row_examples, tokenizer=tokenizer, data=data))


read_pairs = partial(read_examples, of=dpo)
