"""Datasets of prompts from files, read, checked and tokenized before training starts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from verlite import tables
from verlite.data.custom import own_rows
from verlite.data.prompts import PromptTooLong, build_prompt, build_prompts, truncate
from verlite.hub import HubError, local_file
from verlite.importing import OwnCodeError
from verlite.spec.roles import DataSpec

Message = dict[str, str]
OPTIONAL_COLUMNS = ("ability", "extra_info")
AT_ONCE = 1024
"""Number of rows that are tokenized together."""


class DataError(ValueError):
    """A data file cannot be used. The message names the file, the row or column, and the remedy."""


@dataclass(frozen=True)
class PromptRow:
    """A prompt and the inputs of its reward function."""

    index: int
    """Position in the dataset, counting kept rows from 0."""
    prompt_ids: list[int]
    """Token ids of the prompt, at most data.max_prompt_length."""
    messages: list[Message]
    """The chat as written in the file."""
    data_source: str
    """Name of the data source, which selects the scorer."""
    ground_truth: Any
    """reward_model.ground_truth of the row."""
    teacher_prompt_ids: list[int] | None = None
    """Token ids of the prompt that the teacher reads. None: those of the policy."""
    ability: str | None = None
    """Kind of task, for information only."""
    extra_info: dict[str, Any] = field(default_factory=dict)
    """Other inputs of the reward function, such as split and index."""


@dataclass(frozen=True)
class Lengths:
    """The distribution of lengths in tokens."""

    shortest: int
    median: int
    p90: int
    """At least 90% are not longer."""
    longest: int

    @classmethod
    def of(cls, lengths: Sequence[int] | np.ndarray) -> "Lengths":
        """Return the distribution of at least one length. Each number is one of them."""
        levels = np.quantile(lengths, (0, 0.5, 0.9, 1), method="inverted_cdf")
        return cls(*map(int, levels))

    def __str__(self) -> str:
        return f"{self.shortest} to {self.longest} (median {self.median}, p90 {self.p90})"


@dataclass(frozen=True)
class DatasetReport:
    """How many rows were loaded, dropped and truncated."""

    split: str
    """train or val."""
    files: list[str]
    """Files read, in order."""
    rows: int
    """Rows in the files."""
    kept: int
    """Rows in the dataset."""
    dropped: int
    """Rows dropped because they are too long (data.filter_overlong_prompts)."""
    truncated: int
    """Rows truncated to data.max_prompt_length (data.truncation)."""
    lengths: Lengths
    """Tokens of the selected rows' prompts, before filtering and truncation; with
    data.teacher_prompt_key of the longer of both."""
    limit: int
    """data.max_prompt_length."""
    in_files: int = 0
    """Rows in the files, if only the first ones were read; else 0."""
    unused: Sequence[str] = ()
    """Files without a row that data.*_max_samples selects."""

    def __str__(self) -> str:
        chosen = self.kept + self.dropped
        words = [f"{self.split}: {self.kept} prompts from {', '.join(self.files)}"]
        if self.in_files:
            words.append(f"tried on the first {self.rows} of {self.in_files} rows")
        if chosen < self.rows:
            named = ", ".join(self.unused[:3])
            if len(self.unused) > 3:
                named += f" and {len(self.unused) - 3} more"
            unused = f", none of {named}" if named else ""
            words.append(
                f"{chosen} of {self.rows} rows chosen by data.{self.split}_max_samples{unused}"
            )
        if self.dropped:
            words.append(f"{self.dropped}{self._share(self.dropped)} dropped for their length")
        if self.truncated:
            words.append(f"{self.truncated}{self._share(self.truncated)} cut to the limit")
        return "; ".join(words) + f"; prompt tokens {self.lengths}, limit {self.limit}"

    def _share(self, count: int) -> str:
        return f" ({share(count, self.kept + self.dropped)})"


def share(part: int, whole: int) -> str:
    """Return a share as text: 12%, 0.3%."""
    percent = 100 * part / whole
    return f"{percent:.0f}%" if percent >= 1 else f"{percent:.1g}%"


class RowFiles:
    """The rows of one split's files, read and checked.

    No prompt is built yet, so neither a tokenizer nor torch is needed.

    Raises:
        DataError: a file is missing, unreadable or empty, a column is missing, or a row does not
            have the format that `data_preprocess` writes.
    """

    def __init__(
        self,
        files: str | Sequence[str],
        spec: DataSpec,
        split: str,
        first: int | None = None,
        tokenizer: Callable[[], Any] | None = None,
    ) -> None:
        """Read the files; of each only the `first` rows, or all (None).

        `tokenizer` loads the tokenizer, for a data set of the user's that is written for verl.
        """
        self.names = [files] if isinstance(files, str) else list(files)
        """The files, or the user's data set."""
        if not self.names:
            raise DataError(f"data.{split}_files is empty: name at least one file")
        self.source_key = spec.reward_fn_key
        self.prompt_keys = [spec.prompt_key]
        """Columns of prompts: the policy's and, if it differs, the teacher's."""
        if split == "train" and spec.teacher_prompt_key is not None:
            self.prompt_keys.append(spec.teacher_prompt_key)
        columns = [*self.prompt_keys, self.source_key, "reward_model"]
        if spec.custom_cls.path is not None:
            files = [str(find_file(name)) for name in self.names]
            read = [_own(spec, files, split, columns, first, tokenizer)]
            self.names = [f"{spec.custom_cls.name} ({', '.join(self.names)})"]
        else:
            read = [_read(name, columns, first) for name in self.names]
        self.tables = [table for table, _ in read]
        self.in_files = sum(count for _, count in read)
        """Rows in the files, read or not."""
        checks = {
            **dict.fromkeys(self.prompt_keys, _messages_problem),
            self.source_key: _source_problem,
            "reward_model": _reward_model_problem,
        }
        for file, table in enumerate(self.tables):
            for column, problem_of in checks.items():
                for row, value in enumerate(table[column].to_pylist()):
                    problem = problem_of(value)
                    if problem:
                        raise DataError(
                            f"{self.name(file, row)}: column {column!r} {problem}, "
                            "as data_preprocess/ writes it"
                        )

    def name(self, file: int, row: int) -> str:
        """Return file and row, for messages."""
        return f"{self.names[file]} row {row}"

    def data_sources(self) -> list[str]:
        """The names of all data sources in the files, sorted."""
        return sorted(
            {
                source
                for table in self.tables
                for source in table[self.source_key].unique().to_pylist()
            }
        )

    def without_answer(self) -> str | None:
        """Return the name of the first row whose reward_model.ground_truth is null, if any."""
        for file, table in enumerate(self.tables):
            answers = pc.struct_field(table["reward_model"], "ground_truth")
            row = pc.index(answers.is_null(), True).as_py()
            if row >= 0:
                return self.name(file, row)
        return None

    def answers(self, count: int) -> list["Answer"]:
        """Return the answers of the first rows, at most `count` of them."""
        rows = [row for table in self.tables for row in table.slice(0, count).to_pylist()][:count]
        return [
            Answer(
                row[self.source_key],
                row["reward_model"]["ground_truth"],
                row.get("extra_info") or {},
            )
            for row in rows
        ]


@dataclass(frozen=True)
class Answer:
    """The answer of a row and the inputs of its reward function."""

    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]


class PromptDataset:
    """The prompts of one split. All rows are checked and tokenized when the dataset is created.

    Token ids are stored as one flat int32 array, so a prompt is tokenized only once. `split` is
    train or val, and decides whether data.train_max_samples or data.val_max_samples applies.

    Raises:
        DataError: as RowFiles; or a prompt is too long and data.truncation=error; or no row is
        left.
    """

    def __init__(
        self,
        files: str | Sequence[str] | RowFiles,
        tokenizer: Any,
        spec: DataSpec,
        split: str,
        longest: tuple[str, int] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Read and tokenize the files.

        Args:
            files: parquet, .jsonl or .json files, or rows that were read before.
            tokenizer: builds the prompts.
            spec: how rows become prompts.
            split: train or val.
            longest: the key that limits prompts and its value. None: data.max_prompt_length.
            tools: JSON schemas of tools for the chat template.
        """
        self._files = files if isinstance(files, RowFiles) else RowFiles(files, spec, split)
        self._tables = self._files.tables
        self._name = self._files.name
        every_row = [
            (file, row) for file, table in enumerate(self._tables) for row in range(table.num_rows)
        ]
        rows = _choose(every_row, spec, split)
        used = {file for file, _ in rows}
        template_kwargs = {
            **({"tools": list(tools)} if tools else {}),
            **spec.apply_chat_template_kwargs,
        }
        made = [
            self._tokenize(tokenizer, template_kwargs, rows, column)
            for column in self._files.prompt_keys
        ]
        key, limit = longest or ("data.max_prompt_length", spec.max_prompt_length)
        lengths = np.array([max(map(len, prompts)) for prompts in zip(*made, strict=True)])
        too_long = lengths > limit
        if spec.filter_overlong_prompts:
            kept = np.flatnonzero(~too_long)
            rows = [rows[i] for i in kept]
            made = [[prompts[i] for i in kept] for prompts in made]
            if not rows:
                raise DataError(
                    f"data.{split}_files: all {len(lengths)} prompts have more than {key}={limit} "
                    f"tokens, the shortest {lengths.min()}, so data.filter_overlong_prompts leaves "
                    f"none. Raise {key}"
                )
        elif spec.truncation != "error":
            made = [
                [
                    np.asarray(truncate(prompt.tolist(), limit, spec.truncation), dtype=np.int32)
                    for prompt in prompts
                ]
                for prompts in made
            ]
        elif too_long.any():
            first = int(too_long.argmax())
            raise DataError(
                f"{self._name(*rows[first])}: {PromptTooLong(lengths[first], limit)} by {key}; "
                f"{too_long.sum()} of {len(rows)} prompts "
                f"({share(too_long.sum(), len(rows))}) are too long; prompt tokens "
                f"{Lengths.of(lengths)}. Raise {key} or drop such prompts with "
                "data.filter_overlong_prompts=True, or cut them with data.truncation=left, "
                "right or middle"
            )
        self._rows = rows
        self.flat = [
            (np.concatenate(prompts), np.cumsum([0] + [len(prompt) for prompt in prompts]))
            for prompts in made
        ]
        """Of each prompt of a row: the token ids of all rows, one after the other, int32; and where
        each row begins there, with the end, [len + 1]."""
        self.report = DatasetReport(
            split=split,
            files=self._files.names,
            rows=len(every_row),
            kept=len(rows),
            dropped=len(lengths) - len(rows),
            truncated=0 if spec.filter_overlong_prompts else int(too_long.sum()),
            lengths=Lengths.of(lengths),
            limit=limit,
            in_files=self._files.in_files if len(every_row) < self._files.in_files else 0,
            unused=[name for file, name in enumerate(self._files.names) if file not in used],
        )

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, i: int) -> PromptRow:
        """Return row i of the kept rows, 0 <= i < len."""
        file, row = self._rows[i]
        values = self._tables[file].slice(row, 1).to_pylist()[0]
        return PromptRow(
            index=i,
            prompt_ids=self.prompt_ids(i).tolist(),
            teacher_prompt_ids=self._of(1, i).tolist() if len(self.flat) > 1 else None,
            messages=_without_nulls(values[self._files.prompt_keys[0]]),
            data_source=values[self._files.source_key],
            ground_truth=values["reward_model"]["ground_truth"],
            ability=values.get("ability"),
            extra_info=values.get("extra_info") or {},
        )

    __getitem__ = row

    def prompt_ids(self, i: int) -> np.ndarray:
        """Return the token ids of row i: [P], int32."""
        return self._of(0, i)

    def _of(self, prompt: int, i: int) -> np.ndarray:
        ids, starts = self.flat[prompt]
        return ids[starts[i] : starts[i + 1]]

    def where(self, i: int) -> str:
        """Return file and row of row i, for messages."""
        return self._name(*self._rows[i])

    def data_sources(self) -> list[str]:
        """The names of all data sources in the files, sorted."""
        return self._files.data_sources()

    def _tokenize(
        self,
        tokenizer: Any,
        template_kwargs: Mapping[str, Any],
        rows: list[tuple[int, int]],
        column: str,
    ) -> list[np.ndarray]:
        columns = [table[column].to_pylist() for table in self._tables]
        prompts = []
        for start in range(0, len(rows), AT_ONCE):
            part = rows[start : start + AT_ONCE]
            messages = [_without_nulls(columns[file][row]) for file, row in part]
            try:
                made = build_prompts(tokenizer, messages, template_kwargs=template_kwargs)
            except Exception:
                # A chat template may raise anything. Find the row, so that the message names it.
                made = [
                    self._alone(tokenizer, template_kwargs, place, one)
                    for place, one in zip(part, messages, strict=True)
                ]
            for (file, row), ids in zip(part, made, strict=True):
                if not ids:
                    raise DataError(f"{self._name(file, row)}: the prompt has no tokens")
                prompts.append(np.asarray(ids, dtype=np.int32))
        return prompts

    def _alone(
        self,
        tokenizer: Any,
        template_kwargs: Mapping[str, Any],
        place: tuple[int, int],
        messages: Sequence[Mapping[str, str]],
    ) -> list[int]:
        try:
            return build_prompt(tokenizer, messages, template_kwargs=template_kwargs)
        except Exception as error:
            raise DataError(
                f"{self._name(*place)}: the chat template failed: {type(error).__name__}: {error}"
            ) from error


def refuse_foreign_tokens(data: PromptDataset, vocab_size: int) -> None:
    """Refuse prompts with tokens that the model does not have: ids from `vocab_size` on.

    Raises:
        DataError: names the first such prompt.
    """
    ids, starts = data.flat[0]
    foreign = np.flatnonzero(ids >= vocab_size)
    if not len(foreign):
        return
    row = int(np.searchsorted(starts, foreign[0], side="right")) - 1
    where = f"{data.where(row)}: the prompt"
    raise foreign_token(where, int(ids[foreign[0]]), vocab_size, "actor_rollout_ref.model.")


def foreign_token(where: str, token: int, vocab_size: int, section: str) -> DataError:
    """Return the error for a token that the model does not have. section: keys of the model."""
    return DataError(
        f"{where} has token id {token}, but the model has "
        f"{vocab_size} tokens, ids 0 to {vocab_size - 1}: the tokenizer belongs to another model. "
        f"Correct {section}tokenizer_path or {section}path"
    )


def overlap_note(train: PromptDataset, validation: PromptDataset) -> str | None:
    """Return a warning if validation prompts are also training prompts, else None."""
    seen = {train.prompt_ids(i).tobytes() for i in range(len(train))}
    shared = [i for i in range(len(validation)) if validation.prompt_ids(i).tobytes() in seen]
    if not shared:
        return None
    return (
        f"{len(shared)} of {len(validation)} validation prompts are also training prompts "
        f"(the first: {validation.where(shared[0])}), so validation measures memory in part"
    )


def _read(name: str, required: list[str], first: int | None) -> tuple[pa.Table, int]:
    """Return the first rows of a file (None: all), and how many rows it has."""
    path = find_file(name)
    if not path.exists():
        raise DataError(
            f"{name} does not exist: make it with data_preprocess/, "
            "or correct data.train_files or data.val_files"
        )
    if not path.is_file():
        raise DataError(f"{name} is not a file: name parquet, jsonl or json files")

    def choose(available: list[str], rows: int) -> list[str]:
        if rows == 0:
            raise DataError(f"{name} has no rows")
        missing = [column for column in required if column not in available]
        if missing:
            raise DataError(
                f"{name} has no column {', '.join(map(repr, missing))}; "
                f"its columns are {', '.join(available) or 'none'}"
            )
        optional = [column for column in OPTIONAL_COLUMNS if column in available]
        return list(dict.fromkeys(required + optional))

    try:
        return tables.read_chosen(path, choose, first)
    except tables.TableError as error:
        raise DataError(f"{name} {error}") from error


def find_file(name: str) -> Path:
    """Return the path of a file here, or of the copy of a file on the hub. Raises DataError."""
    try:
        return local_file(name)
    except HubError as error:
        raise DataError(f"{name} {error}") from error


def _own(
    spec: DataSpec,
    files: list[str],
    split: str,
    required: list[str],
    first: int | None,
    tokenizer: Callable[[], Any] | None,
) -> tuple[pa.Table, int]:
    """Return the first rows of the user's data set (None: all), and how many it has."""
    name = f"data.custom_cls.name={spec.custom_cls.name}"
    try:
        rows, count = own_rows(spec, files, split, first, tokenizer)
    except OwnCodeError as error:
        raise DataError(str(error)) from error
    if not rows:
        raise DataError(f"{name} has no rows for {split}")
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise DataError(
                f"{name}: {split} row {number} is {_short(row)}, expected a mapping of columns "
                "(docs/data.md)"
            )
        missing = [column for column in required if column not in row]
        if missing:
            has = ", ".join(map(str, row)) or "nothing"
            raise DataError(f"{name}: {split} row {number} has no {missing[0]!r}; it has {has}")
    optional = [column for column in OPTIONAL_COLUMNS if any(column in row for row in rows)]
    columns = list(dict.fromkeys(required + optional))
    try:
        return tables.from_rows([{c: row.get(c) for c in columns} for row in rows]), count
    except tables.TableError as error:
        raise DataError(f"{name}: {split} {error}") from error


def _choose(rows: list[tuple[int, int]], spec: DataSpec, split: str) -> list[tuple[int, int]]:
    """Return the rows that data.{split}_max_samples selects.

    With data.shuffle, training rows are a random choice. Otherwise they are the first rows.
    """
    limit = spec.train_max_samples if split == "train" else spec.val_max_samples
    if limit == 0:
        raise DataError(f"data.{split}_max_samples=0 leaves no prompt; -1 takes all")
    if limit < 0 or limit >= len(rows):
        return rows
    if split != "train" or not spec.shuffle:
        return rows[:limit]
    # The order of the files is kept, because the sampler decides the order of use.
    chosen = np.random.default_rng(spec.seed).choice(len(rows), limit, replace=False)
    return [rows[i] for i in np.sort(chosen)]


def _messages_problem(messages: Any) -> str | None:
    if not isinstance(messages, list) or not messages:
        return f"is {_short(messages)}, expected a list of messages {{role, content}}"
    for message in messages:
        if (
            not isinstance(message, Mapping)
            or not isinstance(message.get("role"), str)
            or not isinstance(message.get("content"), str)
        ):
            return f"has the message {_short(message)}, expected role and content, both text"
    if all(message["role"] == "assistant" for message in messages):
        return "has only messages of the assistant, expected a question of the user"
    return None


def _source_problem(source: Any) -> str | None:
    if isinstance(source, str) and source:
        return None
    return f"is {source!r}, expected the name of the data source"


def _reward_model_problem(reward_model: Any) -> str | None:
    good = isinstance(reward_model, Mapping) and "ground_truth" in reward_model
    return None if good else f"is {_short(reward_model)}, expected {{style, ground_truth}}"


def _short(value: Any, limit: int = 100) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "..."


def _without_nulls(messages: list[dict[str, Any]]) -> list[Message]:
    """Remove null entries of messages.

    Parquet gives every message the columns of all messages, and a template must not see them.
    """
    return [
        {key: value for key, value in message.items() if value is not None} for message in messages
    ]
