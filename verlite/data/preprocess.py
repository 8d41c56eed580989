"""What every script in data_preprocess/ does: find the original files, turn each example into a verl row, write whole files."""

import argparse
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verlite.data.dataset import DataError

SPLITS = ("train", "test")
EXAMPLES_SHOWN = 3

MakeRow = Callable[[dict[str, Any], str, int], dict[str, Any]]
"""(example, split, index) -> row. Raises ValueError or KeyError for an example that cannot be used."""


@dataclass(frozen=True)
class Source:
    """A data set on the hub."""

    repo: str
    """Name of the data set; also the rows' data_source."""
    revision: str
    """Commit, so that everybody trains on the same rows."""
    folder: str
    """Folder of the parquet files inside."""


def main(description: str, source: Source, default_dir: str, make_row: MakeRow, example_files: bool = False) -> None:
    """Run a script: verl's options in, train.parquet and test.parquet out, summary and examples printed.

    `example_files` also writes each split's first row as {split}_example.json. Exits with one line for a file or example
    that cannot be used; nothing is written unless all splits are good.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_save_dir", "--local_dir", default=default_dir, help=f"where the parquet files go (default {default_dir})")
    parser.add_argument("--local_dataset_path", help=f"folder with train and test .jsonl or .parquet (default {source.repo} from the hub)")
    parser.add_argument("--hdfs_dir", help="not supported: copy the folder yourself with hdfs dfs -put")
    arguments = parser.parse_args()
    if arguments.hdfs_dir:
        parser.error(f"--hdfs_dir is not supported; copy the files with: hdfs dfs -put {arguments.local_save_dir} {arguments.hdfs_dir}")
    try:
        folder = Path(arguments.local_dataset_path).expanduser() if arguments.local_dataset_path else _download(source)
        rows = {split: _rows(folder, source, split, make_row) for split in SPLITS}
        target = Path(arguments.local_save_dir).expanduser()
        for split, made in rows.items():
            path = target / f"{split}.parquet"
            size = write_parquet(made, path)
            longest = max(sum(len(message["content"]) for message in row["prompt"]) for row in made)
            print(f"{path}: {len(made)} rows, longest prompt {longest} characters, {size} bytes")
            if example_files:
                write_json(made[0], target / f"{split}_example.json")
    except (DataError, OSError) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    for row in rows["train"][:EXAMPLES_SHOWN]:
        print(json.dumps(row, indent=2, ensure_ascii=False))


def read_examples(folder: Path, source: Source, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Examples of one split with the place each comes from, as file and line (.jsonl, .json) or row (.parquet).

    Looked for in this order: split.jsonl, split.parquet, split/**/*.json (one example a file, in the order of their names),
    then the hub's split-*.parquet in the folder or in source.folder. Raises DataError.
    """
    patterns = [f"{split}.jsonl", f"{split}.parquet", f"{split}/**/*.json", f"{split}-*.parquet", f"{source.folder}/{split}-*.parquet"]
    for pattern in patterns:
        files = sorted(folder.glob(pattern))
        for file in files:
            yield from _read_parquet(file) if file.suffix == ".parquet" else _read_json(file)
        if files:
            return
    raise DataError(f"{folder} has none of {', '.join(patterns)}" if folder.is_dir() else f"--local_dataset_path={folder} is not a folder")


def write_parquet(rows: list[dict[str, Any]], path: Path) -> int:
    """Write rows to `path`, which is there as a whole or not at all; returns its size in bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return _replace(path, lambda temporary: pq.write_table(pa.Table.from_pylist(rows), temporary))


def write_json(value: Any, path: Path) -> int:
    """Write one JSON value in the same way."""
    return write_text(json.dumps(value, indent=4, ensure_ascii=False), path)


def write_text(text: str, path: Path) -> int:
    """Write a text file in the same way."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return _replace(path, lambda temporary: temporary.write_text(text, encoding="utf-8", newline=""))


def _replace(path: Path, write: Callable[[Path], Any]) -> int:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path.stat().st_size


def _rows(folder: Path, source: Source, split: str, make_row: MakeRow) -> list[dict[str, Any]]:
    rows = []
    for index, (where, example) in enumerate(read_examples(folder, source, split)):
        try:
            rows.append(make_row(example, split, index))
        except KeyError as error:
            raise DataError(f"{where}: the example has no {error}; it has {', '.join(example) or 'nothing'}") from error
        except (ValueError, TypeError, AttributeError) as error:
            raise DataError(f"{where}: {error}") from error
    if not rows:
        raise DataError(f"{folder}: the {split} split has no examples")
    return rows


def _read_json(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """One example a line; a .json file is one example over all its lines."""
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: not UTF-8 text: {error}") from error
    for number, line in enumerate([text] if file.suffix == ".json" else text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{file}:{number}"
        try:
            example = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{where}: not JSON: {error}") from error
        if not isinstance(example, Mapping):
            raise DataError(f"{where}: a {type(example).__name__}, expected an object with the example's fields")
        yield where, dict(example)


def _read_parquet(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        table = pq.read_table(file)
    except pa.ArrowInvalid as error:
        raise DataError(f"{file} cannot be read as parquet: {error}") from error
    for number, example in enumerate(table.to_pylist()):
        yield f"{file} row {number}", example


def _download(source: Source) -> Path:
    from huggingface_hub import snapshot_download

    print(f"downloading {source.repo} at {source.revision[:8]} from the hub; --local_dataset_path takes a folder instead")
    patterns = [f"{source.folder}/{split}-*.parquet" for split in SPLITS]
    try:
        return Path(snapshot_download(source.repo, repo_type="dataset", revision=source.revision, allow_patterns=patterns))
    except OSError as error:  # the hub client's own errors are OSErrors too
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{source.repo} cannot be downloaded ({reason}); give its files with --local_dataset_path") from error
