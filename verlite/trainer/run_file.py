"""`run.json` in a run directory: the last process that trained there, its plan, and its end."""

import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from verlite.files import read_json, replace_file

RUN_FILE = "run.json"


@dataclass(frozen=True)
class RunFile:
    """The content. Times are in seconds since 1970."""

    host: str = ""
    process: int = 0
    started: float = 0.0
    total_steps: int | None = None
    """Steps from the first to the last, those before a resume included. None: not known yet."""
    ended: float | None = None
    exit_code: int | None = None
    """Of docs/failures.md. None: the process runs, or has ended without recording how."""


def read(run_dir: Path) -> RunFile:
    """Return the content of the file.

    Raises:
        OSError, ValueError: it is missing, cannot be read, or is damaged.
    """
    values = read_json(run_dir / RUN_FILE)
    if not isinstance(values, dict):
        raise ValueError(f"{RUN_FILE} is not a JSON object")
    known = {name: values.get(name, default) for name, default in asdict(RunFile()).items()}
    if not all(map(_has_type, known, known.values())):
        raise ValueError(f"{RUN_FILE} has entries of another type")
    return RunFile(**known)


def _has_type(name: str, value: Any) -> bool:
    if name == "host":
        return isinstance(value, str)
    if value is None:
        return name in ("total_steps", "ended", "exit_code")
    return type(value) is int or (name in ("started", "ended") and type(value) is float)


def begin(run_dir: Path) -> None:
    """Record that this process uses the directory. The planned steps stay until they are known."""
    total_steps = None
    with suppress(OSError, ValueError):
        total_steps = read(run_dir).total_steps
    _write(run_dir, _new(total_steps))


def plan(run_dir: Path, total_steps: int) -> None:
    """Record the planned steps."""
    _change(run_dir, total_steps=total_steps)


def end(run_dir: Path, exit_code: int) -> None:
    """Record how this process ends."""
    _change(run_dir, ended=time.time(), exit_code=exit_code)


def _new(total_steps: int | None) -> RunFile:
    return RunFile(socket.gethostname(), os.getpid(), time.time(), total_steps)


def _change(run_dir: Path, **values: Any) -> None:
    try:
        before = read(run_dir)
    except (OSError, ValueError):
        before = _new(None)
    _write(run_dir, replace(before, **values))


def _write(run_dir: Path, content: RunFile) -> None:
    with suppress(OSError):  # training does not depend on it
        replace_file(run_dir / RUN_FILE, json.dumps(asdict(content)) + "\n")
