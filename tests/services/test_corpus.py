"""Corpus files: valid formats, and errors of invalid ones."""

import gzip
from pathlib import Path

import pytest

from tests.services.passages import write
from verlite.http.server import ServiceError
from verlite.services.index import Corpus, read_corpus


def read(path: Path) -> Corpus:
    return read_corpus(path, lambda items, **shown: items)


LINES = [
    '{"id": "x7", "contents": "\\"One\\"\\nfirst"}',
    "",
    '{"contents": "second, ünïcode"}',
    '{"id": 30, "title": "Three\\nlines", "text": "third", "url": "http://x"}',
]
READ = [
    {"id": "x7", "contents": '"One"\nfirst'},
    {"id": "1", "contents": "second, ünïcode"},
    {"id": "30", "contents": '"Three lines"\nthird'},
]


@pytest.mark.parametrize("ending", ["", "\n", "\r\n", "\n\n"])
def test_both_row_formats_with_and_without_ids(tmp_path: Path, ending: str) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(LINES) + ending, encoding="utf-8", newline="")
    corpus = read(path)
    assert [corpus[row] for row in range(len(corpus))] == READ
    assert list(corpus.contents()) == [passage["contents"] for passage in READ]


def test_gzipped_corpus_is_read(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(LINES).encode()))
    corpus = read(path)
    assert [corpus[row] for row in range(len(corpus))] == READ


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": "1", "contents": "cut', "not JSON: Unterminated string starting at"),
        ('["a list"]', "a list, expected an object"),
        (
            '{"id": "1", "text": "no title"}',
            "has neither contents nor title and text; it has id, text",
        ),
        ("{}", "has neither contents nor title and text; it has nothing"),
        ('{"contents": 5}', "contents is 5, expected text"),
        ('{"contents": " \\n"}', 'contents is " \\n", expected text'),
        ('{"title": null, "text": "x"}', "title is null, expected text"),
        ('{"id": 1.5, "contents": "x"}', "id is 1.5, expected text or a whole number"),
        ('{"id": true, "contents": "x"}', "id is true, expected text or a whole number"),
        ('{"contents": "\\ud83d"}', "contents has an unpaired surrogate, which is not a character"),
    ],
)
def test_error_names_the_bad_line(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path / "corpus.jsonl", [LINES[0], "", line, LINES[2]])
    with pytest.raises(ServiceError) as error:
        read(path)
    assert str(error.value).startswith(f"{path}:3: {message}")


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_empty_corpus_is_an_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text(text)
    with pytest.raises(ServiceError, match=r"corpus\.jsonl: has no passages; each line is one"):
        read(path)


def test_incomplete_gzip_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(LINES * 100).encode())[:-20])
    with pytest.raises(
        ServiceError, match=r"corpus\.jsonl\.gz: cannot be unpacked: Compressed file ended"
    ):
        read(path)
