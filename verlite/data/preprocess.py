"""Make data files: rows in verl's format from published data sets, or from a table of your own.

A script in data_preprocess/ finds the original files, converts each example to a row, and writes
parquet files atomically. `verlite data` does so with a table of prompts and answers (`Columns`).
"""

import argparse
import json
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verlite.data.dataset import DataError
from verlite.files import one_line, replace_file, replacing
from verlite.tables import TEXT_SUFFIXES, TableError, located_rows

SPLITS = ("train", "test")
EXAMPLES_SHOWN = 3

Example = tuple[str, dict[str, Any]]
"""(location, fields) of an example. The location is the file and the line or row."""

MakeRow = Callable[[dict[str, Any], str, int], dict[str, Any]]
"""(example, split, index) -> row. Raises ValueError or KeyError for an invalid example."""


@dataclass(frozen=True)
class Source:
    """A data set on the hub."""

    repo: str
    """Name of the data set; also the rows' data_source."""
    revision: str
    """Commit. It fixes the rows."""
    folder: str
    """Folder of the parquet files in the repository."""


def main(
    description: str,
    source: Source,
    default_dir: str,
    make_row: MakeRow,
    example_files: bool = False,
) -> None:
    """Run a script for one data set: write train.parquet and test.parquet. Options are verl's.

    Args:
        description: the help text.
        source: the data set on the hub.
        default_dir: default of --local_save_dir.
        make_row: converts an example.
        example_files: also write each split's first row as {split}_example.json.
    """
    parser = make_parser(
        description,
        default_dir,
        f"folder with train and test .jsonl or .parquet (default {source.repo} from the hub)",
    )

    def read(arguments: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
        if arguments.local_dataset_path:
            folder = Path(arguments.local_dataset_path).expanduser()
        else:
            folder = download(source, [f"{source.folder}/{split}-*.parquet" for split in SPLITS])
        return {
            split: make_rows(read_examples(folder, source, split), split, make_row, folder)
            for split in SPLITS
        }

    run(parser, read, example_files)


def make_parser(description: str, default_dir: str, files: str) -> argparse.ArgumentParser:
    """Return a parser with the options of all scripts.

    `files` describes the contents of --local_dataset_path.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--local_save_dir",
        "--local_dir",
        default=default_dir,
        help=f"where the parquet files go (default {default_dir})",
    )
    parser.add_argument("--local_dataset_path", help=files)
    parser.add_argument(
        "--hdfs_dir", help="not supported: copy the folder yourself with hdfs dfs -put"
    )
    return parser


def run(
    parser: argparse.ArgumentParser,
    read: Callable[[argparse.Namespace], Mapping[str, list[dict[str, Any]]]],
    example_files: bool = False,
) -> None:
    """Parse the command line, read all rows, write {split}.parquet, print a summary and examples.

    For an invalid file or example, prints one line and exits with code 1. Nothing is written unless
    all splits are valid.
    """
    arguments = parser.parse_args()
    if arguments.hdfs_dir:
        parser.error(
            "--hdfs_dir is not supported; copy the files with: "
            f"hdfs dfs -put {arguments.local_save_dir} {arguments.hdfs_dir}"
        )
    try:
        rows = read(arguments)
        target = Path(arguments.local_save_dir).expanduser()
        for split, split_rows in rows.items():
            path = target / f"{split}.parquet"
            print_written(path, split_rows, write_parquet(split_rows, path))
            if example_files:
                text = json.dumps(split_rows[0], indent=4, ensure_ascii=False)
                write_text(text, target / f"{split}_example.json")
    except (DataError, OSError) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    for row in next(iter(rows.values()))[:EXAMPLES_SHOWN]:
        print(json.dumps(row, indent=2, ensure_ascii=False))


def print_written(path: Path, rows: list[dict[str, Any]], size: int) -> None:
    """Print what a file of `size` bytes contains."""
    print(f"{path}: {_summary(rows)}, {size} bytes")


def _summary(rows: list[dict[str, Any]]) -> str:
    """Return the number of rows, by data source if there are several, and the longest prompt."""
    lengths = [sum(len(message["content"]) for message in row["prompt"]) for row in rows]
    counts = Counter(row["data_source"] for row in rows)
    sources = ", ".join(f"{name} {count}" for name, count in counts.items())
    by_source = f" ({sources})" if len(counts) > 1 else ""
    return f"{len(rows)} rows{by_source}, longest prompt {max(lengths)} characters"


def read_examples(folder: Path, source: Source, split: str) -> Iterator[Example]:
    """Yield the examples of one split. Raises DataError.

    The files are those of `find_files`, or the hub's parquet files in source.folder.
    """
    hub_files = f"{source.folder}/{split}-*.parquet"
    files = find_files(folder, split) or sorted(folder.glob(hub_files))
    if not files:
        raise nothing_found(folder, [split], [hub_files])
    for file in files:
        yield from read_file(file)


def find_files(folder: Path, split: str) -> list[Path]:
    """Return the files of one split, sorted by name, or an empty list.

    Searched in this order: split.jsonl, split.parquet, split.json (a list of examples),
    split/**/*.json (one example per file), then the hub's split-*.parquet.
    """
    found = (sorted(folder.glob(pattern)) for pattern in _patterns(split))
    return next((files for files in found if files), [])


def nothing_found(folder: Path, splits: Sequence[str], patterns: Sequence[str] = ()) -> DataError:
    """Return the error for a folder without files of these splits or patterns."""
    if folder.is_file():
        return DataError(f"--local_dataset_path={folder} is a file; give its folder")
    if not folder.is_dir():
        return DataError(f"--local_dataset_path={folder} does not exist")
    expected = [name for split in splits for name in _patterns(split)]
    return DataError(f"{folder} has none of {', '.join([*expected, *patterns])}")


def read_file(file: Path) -> Iterator[Example]:
    """Yield a file's examples with their line or row. Raises DataError.

    A .json file has one example or a list of examples.
    """
    try:
        for place, example in located_rows(file, single=True):
            yield f"{file} {place}", example
    except TableError as error:
        raise DataError(f"{file} {error}") from error


def make_rows(
    examples: Iterable[Example], split: str, make_row: MakeRow, folder: Path, first: int = 0
) -> list[dict[str, Any]]:
    """Return the rows of a folder's examples, numbered from `first`.

    Raises:
        DataError: an example is invalid (the message gives its location), or there are none.
    """
    rows = []
    for index, (where, example) in enumerate(examples, start=first):
        try:
            rows.append(make_row(example, split, index))
        except KeyError as error:
            raise DataError(
                f"{where}: the example has no {error}; it has {', '.join(example) or 'nothing'}"
            ) from error
        except (ValueError, TypeError, AttributeError) as error:
            raise DataError(f"{where}: {error}") from error
    if not rows:
        raise DataError(f"{folder}: the {split} split has no examples")
    return rows


def write_parquet(rows: list[dict[str, Any]], path: Path) -> int:
    """Write rows to `path` atomically. Return the size in bytes.

    Raises:
        DataError: a column cannot be stored, such as one with text in some rows and numbers in
            others.
    """
    try:
        table = pa.Table.from_pylist(rows)
    except (pa.ArrowException, ValueError, OverflowError) as error:
        raise DataError(
            f"{path} cannot be written: {one_line(error)}. The values of a column must all be text "
            "or all numbers of at most 64 bits, and text must be valid Unicode"
        ) from error
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        pq.write_table(table, file)
    return path.stat().st_size


def write_text(text: str, path: Path) -> int:
    """Write a text file atomically. Return the size in bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, text)
    return path.stat().st_size


def _patterns(split: str) -> list[str]:
    return [
        f"{split}.jsonl",
        f"{split}.parquet",
        f"{split}.json",
        f"{split}/**/*.json",
        f"{split}-*.parquet",
    ]


def download(source: Source, patterns: Sequence[str]) -> Path:
    """Download a data set's files that match the patterns, or use the hub's cache.

    Returns their folder. Raises DataError.
    """
    from huggingface_hub import snapshot_download

    print(
        f"downloading {source.repo} at {source.revision[:8]} from the hub; "
        "to use local files: --local_dataset_path FOLDER"
    )
    try:
        return Path(
            snapshot_download(
                source.repo,
                repo_type="dataset",
                revision=source.revision,
                allow_patterns=list(patterns),
            )
        )
    except OSError as error:  # the hub client's errors are OSErrors, too
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(
            f"{source.repo} cannot be downloaded ({reason}); "
            "give its files with --local_dataset_path FOLDER"
        ) from error


# Chat messages from the columns of other data sets

ROLES = ("system", "user", "assistant", "tool", "developer")
CHATML = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>|\Z)", re.DOTALL)

Message = dict[str, str]


def messages(value: Any, template: str | None = None) -> list[Message]:
    """Return the messages in a column's value.

    Args:
        value: a list of messages {role, content}, the same as JSON text, chatml text, or plain
            text, which becomes a user's message.
        template: format of plain text, with {} for the text.

    Raises:
        ValueError: the value is none of these, or empty.
    """
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            decoded = json.loads(value)
        except (json.JSONDecodeError, RecursionError):
            decoded = None  # text that begins with a bracket
        # A list of something else is text, such as [1, 2].
        if isinstance(decoded, list) and any(isinstance(entry, dict) for entry in decoded):
            value = decoded
    if isinstance(value, str):
        chatml = [{"role": role, "content": text} for role, text in CHATML.findall(value)]
        if chatml:
            return [message for message in chatml if message["content"]]
        if not value.strip():
            raise ValueError("the prompt is empty")
        return [{"role": "user", "content": template.replace("{}", value) if template else value}]
    if not isinstance(value, list) or not value:
        raise ValueError(f"the prompt must be messages or text, not {type(value).__name__}")
    return list(_checked(value))


def _checked(value: list[Any]) -> Iterator[Message]:
    for number, message in enumerate(value):
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise ValueError(f"message {number} is not {{role, content}}: {str(message)[:80]}")
        if message["role"] not in ROLES or not isinstance(message["content"], str):
            raise ValueError(f"message {number} has role {message['role']!r}: {str(message)[:80]}")
        yield {"role": message["role"], "content": message["content"]}


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
