"""The runs below a folder, each in one line, read from small files and the ends of large ones."""

import os
import socket
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from verlite.control import exit_codes
from verlite.controller.supervisor_file import ERROR_FILE
from verlite.files import one_line, read_json
from verlite.report.curve import LOSS, SCORE
from verlite.report.stacks import is_locked
from verlite.trainer.checkpoints import last_saved
from verlite.trainer.run_record import RUN_FILE, RunFile, read
from verlite.trainer.tracking import METRICS, is_held_out, parse_metrics

MARKS = {RUN_FILE, METRICS, ".lock"}
"""Files that only run directories have."""
LIMIT_S = 20.0
"""Seconds after which no more folders are looked into."""
MAX_ENTRIES = 20_000
"""Entries of a folder that are looked at."""
TAIL_BYTES = 1 << 20
"""Read from the end of metrics.jsonl."""
TIMED = (METRICS, RUN_FILE, ERROR_FILE, ".lock", "config.yaml")
"""Files whose times tell when a run wrote last."""


@dataclass(frozen=True)
class RunRow:
    """One run. What is not known is None."""

    path: str
    state: str
    """running; done: no planned step is left; validated: ended well with steps left, as with
    trainer.val_only; stopped: by a signal, trainer.max_runtime or Ctrl-C; failed; killed: the
    process recorded no end; unknown."""
    step: int | None = None
    """The last finished one."""
    total_steps: int | None = None
    score: float | None = None
    score_name: str = ""
    """Metric of the score. Several data sources: val-core, for the mean over them."""
    checkpoint: int | None = None
    """Step of the newest checkpoint. Its files are not read."""
    written: float = 0.0
    """When a file of the run was written last, in seconds since 1970."""
    note: str = ""
    """The error of a failed run, and files that cannot be read."""


@dataclass
class FoundRuns:
    """The runs below a folder, newest first."""

    rows: list[RunRow] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    """What was not looked into, a sentence each."""


def find_runs(folder: Path, depth: int) -> FoundRuns:
    """Return the runs in a folder and at most `depth` levels below it.

    Hidden folders, and those inside of run directories, are left out. Links are followed.

    Raises:
        ValueError: it is not a folder.
    """
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ValueError(f"{folder} {what}. Give a folder that has run directories in it.")
    found = FoundRuns()
    for run_dir in _run_dirs(folder, depth, found.skipped):
        found.rows.append(read_run(run_dir))
    found.rows.sort(key=lambda row: (-row.written, row.path))
    return found


def _run_dirs(folder: Path, depth: int, skipped: list[str]) -> Iterator[Path]:
    """Yield run directories, folders of one level before those of the next."""
    deadline = time.monotonic() + LIMIT_S
    level = [folder]
    seen: set[tuple[int, int]] = set()
    unread = 0
    for _ in range(depth + 1):
        below: list[Path] = []
        for path in level:
            if time.monotonic() > deadline:
                skipped.append(f"stopped after {LIMIT_S:g} s: some folders were not looked into")
                return
            try:
                status = path.stat()
                files, folders, is_whole = _entries(path)
            except OSError:
                unread += 1
                continue
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            if not is_whole:
                skipped.append(f"{path}: only {MAX_ENTRIES} of its entries were looked at")
            if files & MARKS:
                yield path
            else:
                below += [path / name for name in folders]
        level = below
    if level:
        skipped.append(f"folders deeper than --depth={depth}, not looked into: {len(level)}")
    if unread:
        skipped.append(f"folders that cannot be read: {unread}")


def _entries(path: Path) -> tuple[set[str], list[str], bool]:
    """Return the names of files and of folders, and whether that is all."""
    files: set[str] = set()
    folders: list[str] = []
    with os.scandir(path) as entries:
        for number, entry in enumerate(entries):
            if number == MAX_ENTRIES:
                return files, sorted(folders), False
            if not entry.is_dir():
                files.add(entry.name)
            elif not entry.name.startswith("."):
                folders.append(entry.name)
    return files, sorted(folders), True


def read_run(run_dir: Path) -> RunRow:
    """Return the row of a run directory. What cannot be read is in its note."""
    notes: list[str] = []
    file = _run_file(run_dir, notes)
    state = _state(run_dir, file)
    if state in ("failed", "unknown", "killed"):
        notes += _reason(run_dir, state, file)
    step, score_name, score = _last_metrics(run_dir, notes)
    total_steps = file.total_steps if file else None
    if state == "done" and step is not None and step < (total_steps or 0):
        state = "validated"
    try:
        checkpoint = last_saved(run_dir)
    except OSError as error:
        checkpoint = None
        notes.append(one_line(error))
    return RunRow(
        str(run_dir),
        state,
        step,
        total_steps,
        score,
        score_name,
        checkpoint,
        max(map(_time, (run_dir / name for name in TIMED))),
        "; ".join(notes),
    )


def _run_file(run_dir: Path, notes: list[str]) -> RunFile | None:
    try:
        return read(run_dir)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        notes.append(f"{RUN_FILE} cannot be read: {one_line(error)}")
    return None


def _state(run_dir: Path, file: RunFile | None) -> str:
    if is_locked(run_dir / ".lock"):  # also of a lock that cannot be opened
        return "running" if os.access(run_dir / ".lock", os.R_OK) else "unknown"
    if file is None:
        return "failed" if (run_dir / ERROR_FILE).is_file() else "unknown"
    if file.exit_code == exit_codes.DONE:
        return "done"
    if file.exit_code in (exit_codes.STOPPED, exit_codes.INTERRUPTED):
        return "stopped"
    if file.exit_code is not None:
        return "failed"
    # The lock of a process on another machine is seen only if the disk has locks for all machines.
    return "killed" if file.host == socket.gethostname() else "unknown"


def _reason(run_dir: Path, state: str, file: RunFile | None) -> list[str]:
    """Return why a run failed, or why its state is not known."""
    if state == "failed":
        try:
            return [one_line(read_json(run_dir / ERROR_FILE)["message"])]
        except (OSError, ValueError, TypeError, KeyError):
            return [f"{ERROR_FILE} cannot be read"]
    if file is None:
        return [] if (run_dir / RUN_FILE).exists() else [f"it has no {RUN_FILE}"]
    return [f"process {file.process} on {one_line(file.host, 60)} recorded no end"]


def _last_metrics(run_dir: Path, notes: list[str]) -> tuple[int | None, str, float | None]:
    """Return the last step, and the name and value of its score.

    The score is that of the last validation, else that of the last step's samples; for main_sft
    the loss.
    """
    try:
        lines = _tail(run_dir / METRICS)
    except FileNotFoundError:
        return None, "", None
    except OSError as error:
        notes.append(f"{METRICS} cannot be read: {one_line(error)}")
        return None, "", None
    step: int | None = None
    trained: tuple[str, float] | None = None
    unreadable = 0
    for line in reversed(lines):
        if step is not None and trained and b'"val' not in line:
            continue
        values = parse_metrics(line)
        if values is None:
            unreadable += 1
            continue
        step = values["step"] if step is None else step
        held_out = _held_out(values)
        if held_out:
            return step, *held_out
        trained = trained or next(
            ((name, values[name]) for name in (SCORE, LOSS) if values.get(name) is not None), None
        )
    if unreadable:
        notes.append(f"lines of {METRICS} that cannot be read: {unreadable}")
    return step, *(trained or ("", None))


def _held_out(values: dict[str, Any]) -> tuple[str, float] | None:
    """Return the name and value of a line's validation score or loss."""
    scores = {key: value for key, value in values.items() if is_held_out(key) and value is not None}
    if len(scores) > 1:
        return "val-core", fmean(scores.values())
    if not scores and values.get("val/loss") is not None:
        scores = {"val/loss": values["val/loss"]}
    return next(iter(scores.items()), None)


def _tail(path: Path) -> list[bytes]:
    """Return the last whole lines of a regular file. Raises OSError."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError("it is not a regular file")
        start = max(0, status.st_size - TAIL_BYTES)
        file.seek(start)
        lines = file.read(TAIL_BYTES).split(b"\n")
    return [line for line in lines[1 if start else 0 :] if line.strip()]


def _time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
