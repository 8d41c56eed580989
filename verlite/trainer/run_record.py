"""What a run directory records about its starts: `run.json` has the last process that trained
there, its plan and its end; config.yaml and configs/ have the configuration of each start.
"""

import itertools
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from verlite.files import RetryingWriter, check_yaml, one_line, read_json, read_text, replace_file
from verlite.trainer.trackers import flat
from verlite.trainer.tracking import set_aside

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


CONFIG = "config.yaml"
CONFIGS = "configs"
"""Folder with the configuration of each segment: from_step_N.yaml."""
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def write_config(run_dir: Path, text: str, step: int, writer: RetryingWriter) -> None:
    """Write config.yaml, and the same as configs/from_step_N.yaml, where N is the next step.

    Args:
        step: the step that the run resumes from. 0: the configurations of an earlier run in this
            directory are renamed. Otherwise those of later steps are, which are trained again.

    Raises:
        OSError: they cannot be renamed, or one of the next step cannot be read.
    """
    if not step:
        set_aside(run_dir / CONFIGS)
    for first, file in _files(run_dir).items():
        if first > step + 1 or (first == step + 1 and file.read_bytes() != text.encode()):
            set_aside(file)
    writer.replace(run_dir / CONFIG, text.encode())
    writer.replace(run_dir / CONFIGS / f"from_step_{step + 1}.yaml", text.encode())


def changed_keys(earlier: Path, text: str) -> list[str]:
    """Return a line about each key whose value differs from an earlier config.yaml's.

    Args:
        earlier: the run directory of the checkpoint to resume from.
        text: the new configuration, as YAML.
    """
    try:
        old = settings(read_text(earlier / CONFIG))
    except (OSError, ValueError) as error:
        return [f"{earlier / CONFIG} cannot be compared: {one_line(error)}"]
    return [
        f"{key}: {before} before, {now} now" for key, before, now in changes(old, settings(text))
    ]


def changes_of_segments(run_dir: Path) -> Iterator[tuple[int, list[tuple[str, str, str]]]]:
    """Yield the first step of each resumed segment, and the `changes` since the segment before.

    Raises:
        OSError, ValueError: a file cannot be read.
    """
    texts = {step: read_text(file) for step, file in sorted(_files(run_dir).items())}
    for (_, before), (step, text) in itertools.pairwise(texts.items()):
        yield step, [] if text == before else changes(settings(before), settings(text))


def _files(run_dir: Path) -> dict[int, Path]:
    """Return the configuration of each segment by its first step."""
    found = {}
    for file in (run_dir / CONFIGS).glob("from_step_*.yaml"):
        number = file.stem.removeprefix("from_step_")
        if number.isdecimal():
            found[int(number)] = file
    return found


def settings(text: str) -> dict[str, Any]:
    """Return every value of a configuration in YAML by its dotted key.

    Raises:
        ValueError: it is not a mapping in YAML, or see `check_yaml`.
    """
    check_yaml(text)
    try:
        loaded = yaml.load(text, _LOADER)
    except yaml.YAMLError as error:
        raise ValueError(one_line(error)) from error
    if not isinstance(loaded, dict):
        raise ValueError("it is not a mapping")
    return dict(flat(loaded))


def changes(before: dict[str, Any], now: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return (key, old value, new value) of each key that differs."""
    found = []
    for key in dict.fromkeys([*now, *before]):
        if key not in before:
            found.append((key, "not there", one_line(repr(now[key]))))
        elif key not in now:
            found.append((key, one_line(repr(before[key])), "not there"))
        elif repr(before[key]) != repr(now[key]):
            found.append((key, *shown_difference(before[key], now[key])))
    return found


def shown_difference(before: object, now: object) -> tuple[str, str]:
    """Return two values in one line each. Long ones that begin alike are shown from a little before
    their difference on."""
    old, new = repr(before), repr(now)
    if one_line(old) == one_line(new):
        start = max(0, len(os.path.commonprefix([old, new])) - 30)
        old, new = f"... {old[start:]}", f"... {new[start:]}"
    return one_line(old), one_line(new)
