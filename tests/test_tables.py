"""Rows of text files: what is read, and what is said of wrong files."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verlite.tables import TableError, outline, read

ROWS = [
    {"q": 'a, "b"\nc', "date": "2024-01-01", "n": 1, "chat": [{"role": "user", "content": "é"}]},
    {"q": "", "date": "007", "n": None, "chat": [], "late": "x"},
]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet", ".data"])
def test_rows_are_the_same_in_every_format(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows{suffix}"
    expected = [{"late": None, **row} for row in ROWS]
    if suffix == ".json":
        path.write_text(json.dumps(ROWS))
    elif suffix == ".jsonl":
        path.write_text("\ufeff" + "\n\n".join(map(json.dumps, ROWS)) + "\n")
    else:
        pq.write_table(pa.Table.from_pylist(expected), path)
    assert read(path).to_pylist() == expected
    assert read(path, ["n", "q"]).column_names == ["n", "q"]
    schema, rows = outline(path)
    assert set(schema.names) == {"q", "date", "n", "chat", "late"} and rows == 2


def test_csv_is_text(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes('\ufeffq,date,n\r\n"a, ""b""\nc",2024-01-01,007\r\n\r\né,,1e3\r\n'.encode())
    assert read(path).to_pylist() == [
        {"q": 'a, "b"\nc', "date": "2024-01-01", "n": "007"},
        {"q": "é", "date": "", "n": "1e3"},
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"", "the first line must name each column"),
        ("a.csv", b"q,q\n1,2\n", "each once"),
        ("a.csv", b"q,\n1,2\n", "each once"),
        ("a.csv", b"q,a\n1,2\n3\n", "line 3 has 1 fields, the header 2"),
        ("a.csv", b'q,a\n"1,2\n', "cannot be read as csv"),
        ("a.csv", b"q\n\xff\n", "Save it as CSV UTF-8"),
        ("a.jsonl", b'{"q": 1}\n{"q": \n', "line 2"),
        ("a.jsonl", b"[1]\n", "line 1 is a list, not an object"),
        ("a.jsonl", b'{"q": 1}\n{"q": "x"}\n', "column 'q' has values of different types"),
        ("a.json", b'{"q": 1}', "an object, not a list"),
        ("a.json", b"[" * 100_000, "nested too deeply"),
        ("a.json", b'[{"q": 99999999999999999999999999}]', "column 'q'"),
        ("a.parquet", b"PAR1 not", "cannot be read as parquet"),
        ("a.parquet", b'{"q": 1}\n', "does not begin as such a file does"),
        ("a.jsonl", b"PAR1 \xff", "is a parquet file: name it a.parquet"),
    ],
)
def test_wrong_files(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    for reader in (read, outline):
        with pytest.raises(TableError) as error:
            reader(path)
        assert message in str(error.value)
    with pytest.raises(TableError):
        read(tmp_path / f"absent{path.suffix}")
    (tmp_path / f"folder{path.suffix}").mkdir()
    with pytest.raises(TableError):
        outline(tmp_path / f"folder{path.suffix}")
