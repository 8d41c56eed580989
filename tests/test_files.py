"""Small files: atomic, with the umask's permissions, bounded; written later if the disk is full.

The operating system refuses large files in these tests, as a full disk does.
"""

import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from verlite import files
from verlite.files import (
    RetryingWriter,
    append,
    one_line,
    parse_foreign_json,
    read_bytes,
    refused_by_disk,
    replace_file,
    replacing,
    size_text,
)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let writes beyond `size` bytes fail with EFBIG."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.fixture(params=[0o022, 0o077, 0o002])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_permissions_follow_the_umask(tmp_path: Path, umask: int) -> None:
    writer = RetryingWriter(pytest.fail)
    writer.replace(tmp_path / "rollouts" / "step_1.jsonl", b"{}\n")
    writer.append(tmp_path / "metrics.jsonl", b"{}\n")
    replace_file(tmp_path / "token", "secret", 0o600)
    assert mode(tmp_path / "rollouts") == 0o777 & ~umask
    assert mode(tmp_path / "rollouts" / "step_1.jsonl") == 0o666 & ~umask
    assert mode(tmp_path / "metrics.jsonl") == 0o666 & ~umask
    assert mode(tmp_path / "token") == 0o600


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    replace_file(path, "old")
    with largest_file(4096), pytest.raises(OSError, match="File too large"):
        replace_file(path, "x" * 5000)
    with pytest.raises(KeyboardInterrupt), replacing(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["state.json"], "nothing temporary is left"
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError):
        replace_file(tmp_path / "folder", "new")
    assert sorted(os.listdir(tmp_path)) == ["folder", "state.json"]


def test_a_line_is_appended_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, b"1" * 3000)
    with largest_file(4096), pytest.raises(OSError, match="File too large"):
        append(path, b"2" * 3000)  # 1096 bytes fit
    assert path.read_bytes() == b"1" * 3000
    append(path, b"3")
    assert path.read_bytes() == b"1" * 3000 + b"3"


def test_what_a_full_disk_refuses_is_written_later_in_order(tmp_path: Path) -> None:
    warnings: list[str] = []
    writer = RetryingWriter(warnings.append)
    metrics, samples = tmp_path / "metrics.jsonl", tmp_path / "rollouts" / "step_2.jsonl"
    lines = [str(step).encode() * 2000 + b"\n" for step in range(6)]
    writer.replace(metrics, lines[0])
    with largest_file(2500):
        for line in lines[1:4]:
            writer.append(metrics, line)
        writer.replace(samples, b"s" * 3000)
        writer.replace(tmp_path / "rollouts" / "step_3.jsonl", b"small")
        assert metrics.read_bytes() == lines[0] and not samples.exists()
    assert len(warnings) == 1, warnings
    assert str(metrics) in warnings[0] and "File too large" in warnings[0] and "free" in warnings[0]
    writer.append(metrics, lines[4])
    assert metrics.read_bytes() == b"".join(lines[:5])
    assert samples.read_bytes() == b"s" * 3000
    assert len(warnings) == 2 and "are written" in warnings[1]
    with largest_file(2500):
        writer.replace(metrics, b"n" * 3000)
        writer.append(metrics, lines[5])
        writer.close()
    assert metrics.read_bytes() == b"".join(lines[:5])
    assert len(warnings) == 4 and "lost: metrics.jsonl" in warnings[3]


def test_a_replacement_that_waits_comes_before_later_lines(tmp_path: Path) -> None:
    writer = RetryingWriter(lambda line: None)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"old\n")
    with largest_file(1000):
        writer.replace(path, b"x" * 2000 + b"\n")
        writer.append(path, b"next\n")
        assert path.read_bytes() == b"old\n"
    writer.flush()
    assert path.read_bytes() == b"x" * 2000 + b"\nnext\n"


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EDQUOT, errno.ESTALE])
def test_a_folder_that_refuses_costs_no_exception(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    real = os.open

    def refuse(path: object, flags: int, *rest: int) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(code, os.strerror(code), str(path))
        return real(path, flags, *rest)  # type: ignore[arg-type]

    warnings: list[str] = []
    writer = RetryingWriter(warnings.append)
    monkeypatch.setattr(os, "open", refuse)
    for step in range(3):
        writer.append(tmp_path / "metrics.jsonl", b"%d\n" % step)
        writer.replace(tmp_path / "rollouts" / f"{step}", b"x")
    assert len(warnings) == 1 and os.strerror(code) in warnings[0]
    monkeypatch.undo()
    writer.close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == b"0\n1\n2\n"
    assert len(list((tmp_path / "rollouts").iterdir())) == 3


def test_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_BYTES", 5000)
    warnings: list[str] = []
    writer = RetryingWriter(warnings.append)
    with largest_file(10):
        for step in range(8):
            writer.replace(tmp_path / f"{step}", b"x" * 1000)
    assert len(warnings) == 2 and "no more are kept" in warnings[1]
    writer.close()
    assert sorted(os.listdir(tmp_path)) == ["0", "1", "2", "3", "4"]
    assert warnings[-1].endswith("lost: 5, 6, 7")


def test_output_to_a_full_disk_is_lost_without_an_exception() -> None:
    """/dev/full refuses every byte with ENOSPC."""
    code = """if True:
    import os, sys
    from verlite.files import tolerate_full_disk
    if sys.argv[2:]: tolerate_full_disk()
    print("text", flush=True)
    print("\\ud800" * 10**6, file=sys.stderr, flush=True)
    os.write(int(sys.argv[1]), b"alive")
    """
    for arguments, expected in (["yes"], "alive"), ([], ""):
        read, write = os.pipe()
        with open("/dev/full", "w") as full:
            command = [sys.executable, "-c", code, str(write), *arguments]
            subprocess.run(command, stdout=full, stderr=full, pass_fds=[write], check=False)
        os.close(write)
        assert os.read(read, 100).decode() == expected
        os.close(read)


def test_refusals_of_rust_libraries_are_recognized(tmp_path: Path) -> None:
    with largest_file(100), pytest.raises(SafetensorError) as failure:
        save_file({"w": torch.zeros(1000)}, tmp_path / "w")
    assert refused_by_disk(failure.value) and refused_by_disk(OSError("x"))
    assert not refused_by_disk(ValueError("x"))


def test_reading_is_bounded(tmp_path: Path) -> None:
    """A pipe would never end, and a sparse file would fill the memory."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        read_bytes(tmp_path / "pipe")
    with open(tmp_path / "huge", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ValueError, match=r"huge has 1.0 TiB, more than is read"):
        read_bytes(tmp_path / "huge")


def test_sizes_have_a_fitting_unit() -> None:
    sizes = [0, 1023, 1024, 3 * 2**19, 5 * 2**30, 2**40, 3000 * 2**40]
    assert [size_text(size) for size in sizes] == [
        "0 bytes",
        "1023 bytes",
        "1.0 KiB",
        "1.5 MiB",
        "5.0 GiB",
        "1.0 TiB",
        "3,000.0 TiB",
    ]


def test_text_from_files_is_one_printable_line() -> None:
    assert one_line("a\nb\x1b[2J\ud800é") == "a b?[2J?é"
    assert len(one_line("x" * 10**6)) < 310


def test_limits_of_foreign_json_count_values_and_not_text():
    assert parse_foreign_json(b'["[[[[{,,,,", "\\"[[[[,,,,"]', values=3, depth=1) == [
        "[[[[{,,,,",
        '"[[[[,,,,',
    ]
    assert parse_foreign_json(b'[{"a": [1, 2]}, {"a": []}]', values=8, depth=3)
    for text in (b"[1, 2, 3]", b"[[], []]", b'{"a": 1, "b": {}}'):
        with pytest.raises(ValueError, match="more than 3 values"):
            parse_foreign_json(text, values=3, depth=9)
    with pytest.raises(ValueError, match="nested deeper than 2 levels"):
        parse_foreign_json(b'[{"a": ["]]]"]}]', depth=2)
    assert parse_foreign_json("\ufeff[1]".encode()) == [1]


@pytest.mark.parametrize(
    "text", [b"", b"[", b'"\\', b'"' + b'\\"' * 500_000, b"\xff", b"[1]".ljust(9, b"]")]
)
def test_damaged_foreign_json_is_an_error_at_once(text):
    with pytest.raises(ValueError):
        parse_foreign_json(text + b"[" * 100)
