"""Tables of rows from files: parquet, .jsonl, .json (a list of objects) and .csv.

Text stays text: a CSV column, or a date or a number in quotes, is not converted.
"""

import csv
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verlite.files import kind_of, one_line, parse_json, read_bytes

if TYPE_CHECKING:
    import pyarrow as pa

TEXT_SUFFIXES = (".jsonl", ".json", ".csv")
"""Any other file is read as parquet."""

PARQUET = b"PAR1"
"""First bytes of a parquet file."""


class TableError(ValueError):
    """A file cannot be read as a table. The message has no file name."""


def outline(path: Path) -> tuple["pa.Schema", int]:
    """Return columns and number of rows. Parquet files are not read beyond their footer.

    Raises:
        TableError: the file cannot be read.
    """
    if path.suffix in TEXT_SUFFIXES:
        table = read(path)
        return table.schema, table.num_rows
    import pyarrow as pa
    import pyarrow.parquet as pq

    _must_be_parquet(path)
    try:
        metadata = pq.read_metadata(path)
        return metadata.schema.to_arrow_schema(), metadata.num_rows
    except (pa.ArrowException, ValueError, OSError) as error:  # ValueError: a name is not UTF-8
        raise TableError(_reason("parquet", error)) from error


def read(
    path: Path,
    columns: list[str] | None = None,
    as_dictionary: bool = False,
    rows: int | None = None,
) -> "pa.Table":
    """Read the rows of a file.

    Args:
        path: the file.
        columns: the columns to read; None: all.
        as_dictionary: parquet only: read each distinct value of a column once.
        rows: read only so many, the first ones; None: all.

    Raises:
        TableError: the file cannot be read.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if path.suffix in TEXT_SUFFIXES:
        table = from_rows([row for _, row in located_rows(path)]).slice(0, rows)
        return table if columns is None else table.select(columns)
    _must_be_parquet(path)
    try:
        if rows is None:
            dictionary = columns if as_dictionary else None
            table = pq.read_table(path, columns=columns, read_dictionary=dictionary)
        else:
            table = _first_of_parquet(path, columns, rows)
        table.validate(full=True)  # finds text that is not UTF-8
        return table
    except (pa.ArrowException, ValueError, OSError) as error:  # ValueError: a name is not UTF-8
        raise TableError(_reason("parquet", error)) from error


def read_chosen(
    path: Path, choose: Callable[[list[str], int], list[str]], rows: int | None = None
) -> tuple["pa.Table", int]:
    """Read the columns that are chosen among those of a file, once. Return how many rows it has.

    Args:
        choose: (names of all columns, number of rows) -> the columns to read. It may raise.
        rows: as in `read`.

    Raises:
        TableError: the file cannot be read.
    """
    if path.suffix in TEXT_SUFFIXES:
        table = from_rows([row for _, row in located_rows(path)])
        return table.select(choose(table.column_names, table.num_rows)).slice(0, rows), len(table)
    schema, count = outline(path)
    return read(path, choose(schema.names, count), rows=rows), count


def _first_of_parquet(path: Path, columns: list[str] | None, rows: int) -> "pa.Table":
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        batches = []
        for batch in file.iter_batches(batch_size=max(1, min(rows, 4096)), columns=columns):
            batches.append(batch)
            if sum(map(len, batches)) >= rows:
                break
        schema = batches[0].schema if batches else file.schema_arrow
    return pa.Table.from_batches(batches, schema).slice(0, rows)


def head(path: Path, column: str, count: int) -> list[Any]:
    """Return the first `count` values of a column.

    Raises:
        TableError: the file cannot be read.
        KeyError: it does not have the column.
    """
    if column not in outline(path)[0].names:
        raise KeyError(column)
    return list(read(path, [column], rows=count)[column].to_pylist())


def _must_be_parquet(path: Path) -> None:
    """Raise TableError if a file does not begin like a parquet file."""
    try:
        with path.open("rb") as file:
            start = file.read(len(PARQUET))
    except OSError:
        return  # reading says why
    if start != PARQUET:
        raise TableError(
            "cannot be read as parquet: it does not begin as such a file does, and its suffix is "
            f"none of {', '.join(TEXT_SUFFIXES)}"
        )


def located_rows(path: Path, single: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, row) of each row; the place is such as "row 0", or "line 1" in a .jsonl file.

    Unlike in a table, a column may have values of different types.

    Args:
        path: the file.
        single: a .json file may have one row, in place of a list of rows.

    Raises:
        TableError: the file cannot be read.
    """
    if path.suffix not in TEXT_SUFFIXES:
        yield from ((f"row {number}", row) for number, row in enumerate(read(path).to_pylist()))
        return
    kind = path.suffix.removeprefix(".")
    try:
        content = read_bytes(path, None).removeprefix(b"\xef\xbb\xbf")
        if content.startswith(PARQUET):
            raise TableError(f"is a parquet file: name it {path.stem}.parquet")
        for place, value in _values(kind, content, single):
            if not isinstance(value, dict):
                found = kind_of(value)
                raise TableError(f"cannot be read as {kind}: {place} is {found}, not an object")
            yield place, value
    except TableError:
        raise
    except (OSError, ValueError) as error:
        raise TableError(_reason(kind, error)) from error


def _values(kind: str, content: bytes, single: bool) -> Iterator[tuple[str, Any]]:
    """Yield (place, value) of a text file's values."""
    if kind == "jsonl":
        for number, line in enumerate(content.split(b"\n"), start=1):
            if line.strip():
                try:
                    yield f"line {number}", parse_json(line)
                except ValueError as error:
                    raise TableError(f"cannot be read as jsonl: line {number}: {error}") from error
        return
    values = rows_of_csv(content.decode()) if kind == "csv" else parse_json(content)
    if single and isinstance(values, dict):
        values = [values]
    if not isinstance(values, list):
        raise TableError(f"cannot be read as json: {kind_of(values)}, not a list")
    yield from ((f"row {number}", value) for number, value in enumerate(values))


def rows_of_csv(text: str) -> list[dict[str, str]]:
    """Return the rows of a CSV file with a header line, each as {column: text}.

    Spaces around the names of columns do not count.

    Raises:
        TableError: a header is missing, empty or there twice, a row has another number of fields,
            fields are not separated with commas, or a quote does not end.
    """
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))  # 131,072 characters by default
    lines = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = [name.strip() for name in next(lines, [])]
        if len(header) == 1 and any(separator in header[0] for separator in ";\t|"):
            raise TableError(
                "cannot be read as csv: fields must be separated with commas; the first line is "
                f"{header[0]!r:.200}"
            )
        if not header or not all(header) or len(set(header)) < len(header):
            raise TableError(
                "cannot be read as csv: the first line must name each column, each once: "
                f"{json.dumps(header, ensure_ascii=False)}"
            )
        rows = []
        for fields in lines:
            if not fields:
                continue
            if len(fields) != len(header):
                raise TableError(
                    f"cannot be read as csv: line {lines.line_num} has {len(fields)} fields, "
                    f"the header {len(header)}"
                )
            rows.append(dict(zip(header, fields, strict=True)))
        return rows
    except csv.Error as error:
        raise TableError(f"cannot be read as csv: line {lines.line_num}: {error}") from error


def from_rows(rows: list[Any]) -> "pa.Table":
    """Return a table of mappings. Raises TableError: a column has values of different types."""
    import pyarrow as pa

    names = dict.fromkeys(name for row in rows for name in row)
    columns = {}
    for name in names:
        try:
            columns[name] = pa.array([row.get(name) for row in rows])
        except (pa.ArrowException, OverflowError, ValueError, TypeError) as error:
            raise TableError(f"column {name!r} has values of different types: {error}") from error
    return pa.table(columns)


def _reason(kind: str, error: Exception) -> str:
    remedy = ". Save it as CSV UTF-8" if kind == "csv" and isinstance(error, UnicodeError) else ""
    reason = f"{type(error).__name__}: {one_line(error).rstrip('.')}"
    return f"cannot be read as {kind} ({reason}){remedy}"
