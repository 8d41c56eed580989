"""Small files: atomic writes, reads that cannot hang or fill memory, and writes that are repeated
while a disk is full."""

import errno
import io
import json
import os
import re
import secrets
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import yaml

MAX_BYTES = 64 << 20
"""Largest small file that is read, and most that `RetryingWriter` keeps in memory."""

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Codes of a disk that is full, over its quota or its limit of file sizes, or broken."""
LINES_MAX_BYTES = 1 << 30
"""Largest file of JSON lines that is read."""


JSON_VALUES = 2_000_000
"""Most values of a JSON text from another program. Each may take 200 bytes of memory."""
JSON_DEPTH = 64
"""Deepest nesting of its lists and objects."""
_JSON_TEXT = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)


YAML_CHARACTERS = 1 << 20
"""Longest YAML from outside. A whole configuration has about 20,000 characters."""
YAML_DEPTH = 32
YAML_VALUES = 100_000
YAML_DIGITS = 400
_YAML_NUMBER = re.compile(r"[-+]?[0-9][\w:.+-]*")


def size_text(number: float) -> str:
    """Return a number of bytes with a unit that fits: 512 bytes, 3.1 KiB, 14.2 GiB."""
    if number < 1024:
        return f"{number:.0f} bytes"
    for unit in ("KiB", "MiB", "GiB"):
        number /= 1024
        if number < 1024:
            return f"{number:.1f} {unit}"
    return f"{number / 1024:,.1f} TiB"


def free_text(folder: Path) -> str:
    """Return how much space is free on the disk of a folder: 14.2 GiB, or "an unknown size"."""
    try:
        return size_text(shutil.disk_usage(folder).free)
    except OSError:
        return "an unknown size"


@contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Open a new file that takes the place of `path` when the block ends without an exception.

    After a crash `path` has its old content or the new one.

    Args:
        mode: permissions of the new file. The umask takes its part away.

    Raises:
        OSError: `path` is as it was before.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def replace_file(path: Path, content: str | bytes, mode: int = 0o666) -> None:
    """Replace a file's content atomically. Text is written as UTF-8. See `replacing`."""
    with replacing(path, mode) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def append(path: Path, content: bytes) -> None:
    """Append to a file and sync it. After an OSError the file ends where it ended before."""
    with open(path, "ab", buffering=0, opener=_open_at_once) as file:
        end = file.tell()
        try:
            left = memoryview(content)
            while left:
                left = left[file.write(left) :]
            os.fsync(file.fileno())
        except OSError:
            file.truncate(end)
            raise


def read_bytes(path: Path, limit: int | None = MAX_BYTES) -> bytes:
    """Read a regular file; a limit of None is none.

    Raises:
        OSError: it cannot be read, or is a folder, a pipe or a device.
        ValueError: it has more than `limit` bytes.
    """
    with open(path, "rb", opener=_open_at_once) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{path} is not a regular file")
        if limit is not None and status.st_size > limit:
            raise ValueError(f"{path} has {size_text(status.st_size)}, more than is read")
        return file.read(limit)


def read_text(path: Path) -> str:
    """Read a small regular file in UTF-8. Raises OSError or ValueError."""
    return read_bytes(path).decode()


def read_json(path: Path) -> Any:
    """Read a small JSON file. Raises OSError or ValueError."""
    return parse_json(read_bytes(path))


def parse_json(content: bytes) -> Any:
    """Parse JSON in UTF-8. Raises ValueError."""
    try:
        return json.loads(content.decode())
    except RecursionError as error:
        raise ValueError("the JSON is nested too deeply") from error


def read_json_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the objects of a file of JSON lines, and how many other lines it has: a run that was
    killed may have cut one.

    Raises:
        OSError, ValueError: it cannot be read, or has more than LINES_MAX_BYTES.
    """
    lines = [line for line in read_bytes(path, LINES_MAX_BYTES).split(b"\n") if line.strip()]
    objects = []
    for line in lines:
        with suppress(ValueError):
            value = parse_json(line)
            objects += [value] if isinstance(value, dict) else []
    return objects, len(lines) - len(objects)


_KINDS = {dict: "an object", list: "a list", str: "text", type(None): "null", bool: "a truth value"}


def kind_of(value: Any) -> str:
    """Return what a value is in the words of JSON, for messages; another one by its class."""
    if type(value) in (int, float):
        return "a number"
    return _KINDS.get(type(value), f"of the class {type(value).__name__}")


def parse_foreign_json(
    content: bytes | bytearray, values: int = JSON_VALUES, depth: int = JSON_DEPTH
) -> Any:
    """Parse JSON in UTF-8 from another program. Parsed JSON can have 30 times its size.

    Args:
        content: the text.
        values: most values, counting each list and object.
        depth: deepest nesting.

    Raises:
        ValueError: it is not JSON, or exceeds a limit.
    """
    text = content.decode("utf-8-sig")
    marks = text.count(",") + text.count("[") + text.count("{")
    if marks >= values or marks > depth:  # commas in texts do not count
        bare = _JSON_TEXT.sub("", text)
        marks = bare.count(",") + bare.count("[") + bare.count("{")
        if marks >= values:
            raise ValueError(f"the JSON has more than {values:,} values")
        level = 0
        for bracket in re.finditer(r"[\[\]{}]", bare):
            level += 1 if bracket[0] in "[{" else -1
            if level > depth:
                raise ValueError(f"the JSON is nested deeper than {depth} levels")
    return json.loads(text)


def check_yaml(text: str) -> None:
    """Refuse YAML from outside that takes far more time or memory than its text, before it is
    loaded.

    Aliases count as what they stand for: aliases of aliases can be 10**30 values. A number of more
    digits than Python prints ends whatever prints it.

    Raises:
        ValueError: it is not YAML, or exceeds a limit.
    """
    if len(text) > YAML_CHARACTERS:
        raise ValueError(f"it has more than {YAML_CHARACTERS:,} characters")
    values, anchors = [0], {}  # values of each open list or mapping
    names: list[str | None] = []
    try:
        for event in yaml.parse(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            if isinstance(event, yaml.CollectionStartEvent):
                values.append(1)
                names.append(event.anchor)
            elif isinstance(event, yaml.CollectionEndEvent):
                size = values.pop()
                values[-1] += size
                anchors[names.pop()] = size
            elif isinstance(event, yaml.AliasEvent):
                values[-1] += anchors.get(event.anchor, 1)
                if event.anchor in names:
                    raise ValueError("it has an alias of itself")
            elif isinstance(event, yaml.ScalarEvent):
                values[-1] += 1
                if len(event.value) > YAML_DIGITS and _YAML_NUMBER.fullmatch(event.value):
                    raise ValueError(f"it has a number of more than {YAML_DIGITS} digits")
            if len(values) > YAML_DEPTH:
                raise ValueError(f"it is nested deeper than {YAML_DEPTH} levels")
            if values[-1] > YAML_VALUES:
                raise ValueError(f"it has more than {YAML_VALUES:,} values, aliases included")
    except yaml.YAMLError as error:
        raise ValueError(one_line(error)) from error


def one_line(text: object, limit: int = 300) -> str:
    """Return text from a file or an error as one line of printable characters."""
    words = " ".join(str(text).split())
    printable = "".join(c if c.isprintable() else "?" for c in words[: limit + 1])
    return printable if len(printable) <= limit else f"{printable[:limit]} ..."


def _open_at_once(path: str, flags: int) -> int:
    """Open without waiting for the other end of a pipe."""
    return os.open(path, flags | os.O_NONBLOCK, 0o666)


def refused_by_disk(error: BaseException) -> bool:
    """Whether the operating system did not write. Libraries in Rust raise types of their own."""
    return isinstance(error, OSError) or "(os error " in str(error)


def tolerate_full_disk() -> None:
    """Let output of this process be lost while the disk that it goes to is full, or if its terminal
    or the program at the other end of its pipe is closed.

    Otherwise print() would raise an exception in the middle of a step.
    """
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        buffer = io.BufferedWriter(_LossyOutput(descriptor, "w", closefd=False))
        text = io.TextIOWrapper(buffer, "utf-8", "backslashreplace", line_buffering=True)
        setattr(sys, name, text)


class _LossyOutput(io.FileIO):
    def write(self, content: Any, /) -> int:
        try:
            return super().write(content)
        except OSError as error:
            if error.errno not in (*FULL, errno.EPIPE):
                raise
            return memoryview(content).nbytes


class RetryingWriter:
    """Writes files that a run can do without for a while, such as metrics and samples.

    What the disk refuses is kept in memory, with one warning, and written by a later call.

    Args:
        warn: prints a line.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self.warn = warn
        self._waiting: dict[Path, tuple[bool, bytes]] = {}
        """Content to write to each path, and whether it replaces the file."""
        self._has_warned = False
        self._lost: set[str] = set()

    def replace(self, path: Path, content: bytes) -> None:
        """Replace a file. Its folder is created."""
        self.flush()
        self._add(path, True, content)

    def append(self, path: Path, content: bytes) -> None:
        """Append to a file. Its folder is created."""
        self.flush()
        replaces, before = self._waiting.get(path, (False, b""))
        self._add(path, replaces, before + content)

    def _add(self, path: Path, replaces: bool, content: bytes) -> None:
        others = sum(len(kept) for other, (_, kept) in self._waiting.items() if other != path)
        if self._waiting and others + len(content) > MAX_BYTES:
            if not self._lost:
                self.warn(f"{size_text(MAX_BYTES)} wait for space on the disk: no more are kept")
            self._lost.add(path.name)
            return
        self._waiting[path] = (replaces, content)
        self.flush()

    def flush(self) -> None:
        """Write what waits, as far as possible."""
        failed = None
        for path, (replaces, content) in list(self._waiting.items()):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                (replace_file if replaces else append)(path, content)
            except OSError as error:
                failed = failed or (path, error)
            else:
                del self._waiting[path]
        if failed and not self._has_warned:
            refused, why = failed
            self.warn(
                f"{refused} cannot be written: {why} ({free_text(refused.parent)} free). Metrics "
                "and samples are kept in memory and written once it is possible"
            )
        if self._has_warned and not failed:
            self.warn("metrics and samples that were kept in memory are written")
        self._has_warned = failed is not None

    def close(self) -> None:
        """Write what waits. What cannot be written is lost, with a warning."""
        self.flush()
        lost = sorted(self._lost | {path.name for path in self._waiting})
        if lost:
            self.warn(f"not written, and lost: {', '.join(lost[:10])}{' ...' * (len(lost) > 10)}")
        self._waiting.clear()
