"""verl.utils.dataset.rl_dataset and verl.experimental.dataset.sampler.

verlite reads the messages of a row and tokenizes them itself. `RLHFDataset` therefore neither drops
nor truncates prompts; data.filter_overlong_prompts and data.truncation do so afterwards.
"""

import copy
import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from verlite import tables
from verlite.chat_template import limited
from verlite.compat.tensors import compute_position_id_with_mask, postprocess_data
from verlite.protocol.data import object_array

Row = dict[str, Any]


def collate_fn(data_list: Sequence[Row]) -> dict[str, torch.Tensor | np.ndarray]:
    """Return tensors stacked, [B, ...], and other entries as object arrays, [B]."""
    columns = {name: [row[name] for row in data_list] for name in data_list[0]}
    return {
        name: torch.stack(values)
        if all(isinstance(value, torch.Tensor) for value in values)
        else object_array(values)
        for name, values in columns.items()
    }


class Rows(list[Row]):
    """The rows of a file, with the methods of datasets.Dataset that data sets for verl use."""

    @property
    def column_names(self) -> list[str]:
        return list(self[0]) if self else []

    def __getitem__(self, item: Any) -> Any:
        """Return a row, copied because callers change it, or a column."""
        if isinstance(item, str):
            return [row[item] for row in self]
        return copy.deepcopy(super().__getitem__(item))

    def select(self, indices: Iterable[int]) -> "Rows":
        return Rows(self[int(i)] for i in indices)

    def filter(
        self, function: Callable[..., bool], fn_kwargs: Row | None = None, **options: Any
    ) -> "Rows":
        _refuse(options)
        return Rows(row for row in self if function(row, **(fn_kwargs or {})))

    def map(
        self, function: Callable[..., Row], fn_kwargs: Row | None = None, **options: Any
    ) -> "Rows":
        _refuse(options)
        return Rows({**row, **function(row, **(fn_kwargs or {}))} for row in self)


IGNORED = ("num_proc", "desc", "load_from_cache_file", "keep_in_memory")
"""Arguments of datasets' methods that change no row."""


def _refuse(options: Row) -> None:
    """Raise ValueError for arguments of datasets' methods that these do not have."""
    others = [name for name, value in options.items() if value and name not in IGNORED]
    if others:
        raise ValueError(f"verlite's rows in place of datasets' have no argument {others[0]}")


class MadeIds(list[int]):
    """Token ids of a row's messages. `made` is a copy, which shows whether a class has changed the
    ids or, as with verl's own newest one, the messages only."""

    def __init__(self, ids: Iterable[int]) -> None:
        super().__init__(ids)
        self.made = list(self)


class RLHFDataset(Dataset[Row]):
    """Rows of parquet, json and jsonl files, with verl's attributes and fields.

    Each row has its columns and `raw_prompt` (the messages), `raw_prompt_ids`, `input_ids`,
    `attention_mask`, `position_ids` (all three [max_prompt_length], padded left), `index`,
    `tools_kwargs` and `interaction_kwargs`.
    """

    def __init__(
        self,
        data_files: str | Sequence[str],
        tokenizer: Any,
        config: Any,
        processor: Any = None,
        max_samples: int = -1,
    ) -> None:
        """Read the files, at most the first `max_samples` rows (-1: all)."""
        self.data_files = [data_files] if isinstance(data_files, str) else list(data_files)
        self.original_data_files = list(self.data_files)
        self.tokenizer = tokenizer
        self.processor = processor
        self.max_samples = max_samples
        self.config = config
        self.prompt_key = config.get("prompt_key", "prompt")
        self.image_key = config.get("image_key", "images")
        self.video_key = config.get("video_key", "videos")
        self.max_prompt_length = config.get("max_prompt_length", 1024)
        self.truncation = config.get("truncation", "error")
        self.return_raw_chat = config.get("return_raw_chat", True)
        self.return_full_prompt = config.get("return_full_prompt", False)
        self.filter_overlong_prompts = config.get("filter_overlong_prompts", False)
        self.apply_chat_template_kwargs = dict(config.get("apply_chat_template_kwargs", None) or {})
        self.need_tools_kwargs = config.get("need_tools_kwargs", False)
        self.shuffle = config.get("shuffle", False)
        self.seed = config.get("seed", None)
        self.serialize_dataset = False
        self.num_workers = 1
        self._download()
        self._read_files_and_tokenize()

    def _download(self, use_origin_parquet: bool = False) -> None:
        """Do nothing: the files are local, copied from the hub before if needed."""

    def _read_files_and_tokenize(self) -> None:
        rows = Rows()
        for file in self.data_files:
            path = Path(file).expanduser()
            columns = tables.outline(path)[0].names
            rows.extend(tables.read(path, columns).to_pylist())
        self.dataframe: Any = rows
        if 0 < self.max_samples < len(rows):
            self.dataframe = rows.select(range(self.max_samples))
        self.dataframe = self.maybe_filter_out_long_prompts(self.dataframe)

    def maybe_filter_out_long_prompts(self, dataframe: Any = None) -> Any:
        """Return the rows unchanged: verlite drops long prompts itself."""
        return dataframe

    def resume_dataset_state(self) -> None:
        """Do nothing: the files are read again."""

    def __len__(self) -> int:
        return len(self.dataframe)

    def _build_messages(self, example: Row, key: str | None = None) -> list[dict[str, Any]]:
        """Return the messages of a row. Raises ValueError if it has images or videos."""
        for column in (self.image_key, self.video_key):
            if example.get(column):
                raise ValueError(f"the row has {column!r}; verlite trains on text only")
        messages: list[dict[str, Any]] = example[key or self.prompt_key]
        return messages

    def __getitem__(self, item: int) -> Row:
        row: Row = dict(self.dataframe[item])
        own = inspect.signature(self._build_messages).parameters
        more = {"key": self.prompt_key} if "key" in own else {}
        messages = self._build_messages(row, **more)
        with limited(self.tokenizer):
            text = self.tokenizer.apply_chat_template(
                messages,
                add_generation_prompt=True,
                tokenize=False,
                **self.apply_chat_template_kwargs,
            )
        encoded = self.tokenizer(text, return_tensors="pt", add_special_tokens=False)
        ids, mask = encoded["input_ids"], encoded["attention_mask"]
        row["raw_prompt"] = messages
        row["raw_prompt_ids"] = MadeIds(ids[0].tolist())
        kept: Any = "left" if self.truncation == "error" else self.truncation
        pad = self.tokenizer.pad_token_id or 0
        ids, mask = postprocess_data(ids, mask, self.max_prompt_length, pad, True, kept)
        row["input_ids"], row["attention_mask"] = ids[0], mask[0]
        row["position_ids"] = compute_position_id_with_mask(mask)[0]
        extra: Row = row.get("extra_info") or {}
        row["extra_info"] = extra
        row["index"] = extra.get("index", 0)
        row["tools_kwargs"] = extra.get("tools_kwargs", {})
        row["interaction_kwargs"] = extra.get("interaction_kwargs", {})
        return row


class AbstractSampler(Sampler[int]):
    """An order of the training rows: iterating gives the row numbers of one epoch."""

    @abstractmethod
    def __init__(self, data_source: Sized, data_config: Any) -> None:
        pass

    def __iter__(self) -> Iterator[int]:
        raise NotImplementedError


class AbstractCurriculumSampler(AbstractSampler):
    """A sampler that is updated after each step, which verlite does not support."""

    @abstractmethod
    def update(self, batch: Any) -> None:
        pass
