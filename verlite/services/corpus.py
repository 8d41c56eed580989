"""A corpus of passages: a .jsonl file on disk and the position of each passage in it."""

import gzip
import hashlib
import json
import mmap
import shutil
import tempfile
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from verlite.http.address import ServiceError

Track = Callable[..., Iterable[Any]]
"""track(items, description=..., total=...) -> the same items, with a progress bar."""


class Corpus:
    """Passages by row, counted from 0. Memory has only their positions; text is read on demand.

    `file` must stay open and must not be modified in place. `starts` has the offset of each passage
    in bytes.
    """

    def __init__(self, file: BinaryIO, starts: np.ndarray) -> None:
        self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.starts = starts

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, row: int) -> dict[str, str]:
        """Return {"id", "contents"} of one row."""
        start = int(self.starts[row])
        end = self._bytes.find(b"\n", start)
        return make_passage(self._bytes[start : end if end >= 0 else None], row)

    def contents(self) -> Iterator[str]:
        """Iterate over the text of all passages, in the order of rows."""
        return (self[row]["contents"] for row in range(len(self)))


def read_corpus(path: Path, track: Track, unpacked: Path | None = None) -> Corpus:
    """Check every line of a .jsonl or .jsonl.gz file and store its position.

    A compressed file is decompressed first, into the file `unpacked` or a temporary file.

    Raises:
        ServiceError: a line is not a passage, or there are no passages.
    """
    file = _unpack(path, unpacked) if path.suffix == ".gz" else open(path, "rb")
    starts, place = array("q"), 0
    for number, line in enumerate(
        track(file, description=f"reading {path.name}", total=None), start=1
    ):
        if line.strip():
            try:
                make_passage(line.rstrip(b"\r\n"), len(starts))
            except (ValueError, RecursionError) as error:
                raise ServiceError(f"{path}:{number}: {error}") from None
            starts.append(place)
        place += len(line)
    if not starts:
        raise ServiceError(
            f"{path}: has no passages; each line is one, "
            'as {"id": "0", "contents": "\\"Title\\"\\ntext"}'
        )
    return Corpus(file, np.frombuffer(starts, dtype=np.int64))


def _unpack(path: Path, unpacked: Path | None) -> BinaryIO:
    target = open(unpacked, "w+b") if unpacked else cast(BinaryIO, tempfile.TemporaryFile())
    try:
        with gzip.open(path) as packed:
            shutil.copyfileobj(packed, target, 1 << 20)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ServiceError(f"{path}: cannot be unpacked: {error}") from None
    target.flush()
    target.seek(0)
    return target


def make_passage(line: bytes, row: int) -> dict[str, str]:
    """Return {"id", "contents"} from a line {"id", "contents"} or {"id", "title", "text"}.

    The default id is the row.

    Raises:
        ValueError: the line is not a passage; the message has the reason.
    """
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"a {type(value).__name__}, expected an object")
    identity = value.get("id")
    if identity is None:
        identity = row
    elif isinstance(identity, bool) or not isinstance(identity, (str, int)):
        raise ValueError(f"id is {json.dumps(identity)}, expected text or a whole number")
    if "contents" in value:
        contents = _text(value, "contents")
    elif "title" in value and "text" in value:
        contents = f'"{" ".join(_text(value, "title").split())}"\n{_text(value, "text")}'
    else:
        raise ValueError(
            f"has neither contents nor title and text; it has {', '.join(value) or 'nothing'}"
        )
    return {"id": str(identity), "contents": contents}


def _text(value: dict[str, Any], key: str) -> str:
    text = value[key]
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{key} is {json.dumps(text)[:40]}, expected text")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{key} has an unpaired surrogate, which is not a character") from None
    return text


def fingerprint(path: Path) -> dict[str, Any]:
    """Return size in bytes and SHA-256 of a file, which identify a corpus."""
    with open(path, "rb") as file:
        return {
            "bytes": path.stat().st_size,
            "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
        }
