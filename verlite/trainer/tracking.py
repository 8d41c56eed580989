"""Where metrics go: always `metrics.jsonl`, and the trackers of `trainer.logger`.

`metrics.jsonl` has one JSON object per step, synced to disk before the next step begins, or as soon
as the disk accepts it. Every other tracker runs in its own thread behind a bounded queue. If one
fails, hangs or cannot be imported, the run continues with a warning. Those that verlite has are in
`trackers.py`.
"""

import json
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from verlite.files import (
    LINES_MAX_BYTES,
    RetryingWriter,
    one_line,
    parse_json,
    read_bytes,
    read_text,
    replace_file,
)
from verlite.spec.catalog import TRACKERS, resolve

Metrics = dict[str, float]
METRICS = "metrics.jsonl"
TIME = "time"
"""Key of a line's clock time, in seconds since 1970. Trackers keep one of their own."""
MAX_QUEUED_STEPS = 1000
SAMPLES_EVERY = 10
SAMPLES_SENT = 32
FINISH_S = 10.0
"""How long the trackers may take to send their last metrics, all at the same time. The process ends
20 s after the last step (`control.limits.LEAVE_S`)."""


def is_held_out(metric: str) -> bool:
    """Return whether a metric is the mean score of a data source of validation."""
    return metric.startswith("val-core/") and "/mean@" in metric


class MetricsFile:
    """`metrics.jsonl`: one JSON object per step, append-only.

    A resumed run first drops the lines after the step that it resumes from, so that no step is
    missing or repeated, and moves lines that cannot be read to `metrics-unreadable.jsonl`. A run
    that starts from the beginning renames the file of an earlier run.

    Args:
        path: the file.
        writer: writes it, and prints what is wrong with the file of an earlier run.
        resumed_step: step of the checkpoint, 0 for a run that starts from the beginning.

    Raises:
        OSError: the file of an earlier run can be neither read nor renamed.
    """

    def __init__(self, path: Path, writer: RetryingWriter, resumed_step: int = 0) -> None:
        self.path = path
        self._writer = writer
        self._steps: set[int] = set()
        if not resumed_step:
            set_aside(path)
            return
        try:
            found = MetricsLines.read(path)
        except (OSError, ValueError) as error:
            writer.warn(f"{path} cannot be read: {error}. It is renamed, and a new file is begun")
            set_aside(path)
            return
        if found.unreadable:
            other = path.with_stem(f"{path.stem}-unreadable")
            writer.append(other, b"\n".join([*found.unreadable, b""]))
            writer.warn(
                f"unreadable lines in {path}: {len(found.unreadable)}, moved to {other.name}. "
                f"The other {len(found.steps)} are kept"
            )
        kept = found.text(resumed_step)
        if kept != found.content:
            writer.replace(path, kept)
        self._steps = set(found.steps)

    def write_missing(self, step: int, metrics: Metrics) -> None:
        """Append a step unless the file of the earlier run has it."""
        if step not in self._steps:
            self.write(step, metrics)

    def write(self, step: int, metrics: Metrics) -> None:
        """Append one step, with the time. NaN and infinity become null: JSON has neither."""
        finite = {key: value if math.isfinite(value) else None for key, value in metrics.items()}
        line = json.dumps({"step": step, TIME: round(time.time(), 3), **finite}) + "\n"
        self._writer.append(self.path, line.encode())


@dataclass(frozen=True)
class MetricsLines:
    """The content of a metrics file, line by line."""

    content: bytes
    steps: dict[int, tuple[bytes, dict[str, Any]]]
    """The line of each step, and its values. Of several lines the later values count."""
    unreadable: list[bytes]

    @classmethod
    def read(cls, path: Path) -> "MetricsLines":
        """Read a metrics file. A file that does not exist has no lines.

        Raises:
            OSError, ValueError: it cannot be read, or has more than 1 GiB.
        """
        try:
            content = read_bytes(path, LINES_MAX_BYTES)
        except FileNotFoundError:
            content = b""
        steps: dict[int, tuple[bytes, dict[str, Any]]] = {}
        unreadable = []
        for line in filter(bytes.strip, content.split(b"\n")):
            values = parse_metrics(line)
            if values is None:
                unreadable.append(line)
                continue
            earlier_line, earlier = steps.get(values["step"], (line, values))
            if line != earlier_line:  # trainer.val_only, after the run that made the step
                values = {**earlier, **values}
                line = json.dumps(values).encode()
            steps[values["step"]] = (line, values)
        return cls(content, steps, unreadable)

    def values(self) -> list[dict[str, Any]]:
        """Return the values of each step, in order."""
        return [self.steps[step][1] for step in sorted(self.steps)]

    def text(self, last_step: int) -> bytes:
        """Return the lines up to `last_step`, each step once, in order."""
        kept = [self.steps[step][0] for step in sorted(self.steps) if step <= last_step]
        return b"".join(line + b"\n" for line in kept)


def parse_metrics(line: bytes) -> dict[str, Any] | None:
    """Return the values of a line of metrics.jsonl: "step", and finite numbers or None. Return None
    for any other line."""
    try:
        values = {sys.intern(key): value for key, value in parse_json(line).items()}
        numbers = [value for value in values.values() if value is not None]
        is_valid = type(values["step"]) is int and 0 <= values["step"] < 2**53
        is_valid = is_valid and all(type(n) in (int, float) and math.isfinite(n) for n in numbers)
    except (ValueError, AttributeError, KeyError, OverflowError):
        return None
    return values if is_valid else None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the values of each step in a metrics file, in order. Unreadable lines are left out.

    Raises:
        OSError, ValueError: the file cannot be read.
    """
    return MetricsLines.read(path).values()


def set_aside(path: Path) -> Path | None:
    """Rename a file or folder of an earlier run, unless it is an empty file, and return its new
    path. Raises OSError."""
    if not os.path.lexists(path) or (path.is_file() and not path.stat().st_size):
        return None
    name = f"{path.stem}-until-{time.strftime('%Y%m%d-%H%M%S')}"
    other = path.with_stem(name)
    number = 1
    while other.exists():
        number += 1
        other = path.with_stem(f"{name}-{number}")
    path.rename(other)
    return other


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker's class is called with."""

    project: str
    """trainer.project_name."""
    name: str
    """trainer.experiment_name."""
    directory: Path
    """The run directory."""
    config: dict[str, Any]
    """Every value of the configuration, nested as the keys are. Secrets are masked."""
    resumed_step: int
    """The step that the run resumes from, 0 for a run that starts from the beginning."""
    say: Callable[[str], None]
    """Prints a line on the console, such as the address of the run's page."""

    def kept_id(self, tracker: str) -> str | None:
        """Return the id that this run had before it resumed; None for a run that starts from the
        beginning."""
        if not self.resumed_step:
            return None
        try:
            return read_text(self._id_file(tracker)).strip() or None
        except (OSError, ValueError):
            return None

    def keep_id(self, tracker: str, value: str) -> str:
        """Write the run's id to the run directory, and return it."""
        file = self._id_file(tracker)
        file.parent.mkdir(exist_ok=True)
        replace_file(file, f"{value}\n")
        return value

    def _id_file(self, tracker: str) -> Path:
        return self.directory / "trackers" / f"{tracker}.id"


class Tracker(Protocol):
    """A tracker object. Its class is called with a TrackedRun.

    All calls come from one thread. The first exception switches the tracker off. It may also have
    `samples(step, kind, records)`: some samples of a step ("train") or of a validation ("val"),
    each with the fields of rollouts/step_N.jsonl.
    """

    def __call__(self, step: int, metrics: Metrics) -> None: ...

    def finish(self) -> None: ...


@dataclass(eq=False)
class BackgroundTracker:
    """Run one tracker in a thread. Its first failure is a warning and switches it off."""

    name: str
    open_tracker: Callable[[], Tracker]
    warn: Callable[[str], None]

    def __post_init__(self) -> None:
        self._queue: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(MAX_QUEUED_STEPS)
        self._thread = threading.Thread(target=self._work, daemon=True, name=f"tracker-{self.name}")
        self._thread.start()

    def _work(self) -> None:
        try:
            tracker = self.open_tracker()
            while True:
                send = self._queue.get()
                if send is None:
                    break
                send(tracker)
            tracker.finish()
        except Exception as error:  # whatever a tracker raises must not reach the run
            self.warn(
                f"tracker {self.name} failed and is off for the rest of the run: "
                f"{type(error).__name__}: {one_line(error)}. "
                "Nothing is lost: metrics.jsonl has every step."
            )

    def log(self, step: int, metrics: Metrics) -> None:
        """Queue one step. Never blocks; a full queue is a warning."""
        self._put(step, lambda tracker: tracker(step, metrics))

    def samples(self, step: int, kind: str, records: list[dict[str, Any]]) -> None:
        """Queue samples. A tracker without the method `samples` gets none."""

        def send(tracker: Any) -> None:
            if hasattr(tracker, "samples"):
                tracker.samples(step, kind, records)

        self._put(step, send)

    def _put(self, step: int, send: Callable[[Tracker], None]) -> None:
        if not self._thread.is_alive():
            return
        try:
            self._queue.put_nowait(send)
        except queue.Full:
            self.warn(f"tracker {self.name} is too slow: step {step} was not sent to it")

    def finish(self) -> None:
        """Ask the thread to send what is queued and to close the tracker."""
        if self._thread.is_alive():
            with suppress(queue.Full):
                self._queue.put_nowait(None)

    def join(self, seconds: float = FINISH_S) -> None:
        """Wait for the thread's end. Gives up with a warning after `seconds`."""
        self._thread.join(max(0.0, seconds))
        if self._thread.is_alive():
            self.warn(f"tracker {self.name} did not finish in time; gave up on it")


class Tracking:
    """`metrics.jsonl` and the trackers of `trainer.logger`.

    "console" is not a tracker: the display always prints a line per step.
    """

    def __init__(
        self,
        loggers: list[str],
        run_dir: Path,
        project: str,
        name: str,
        config: dict[str, Any],
        writer: RetryingWriter,
        resumed_step: int = 0,
        say: Callable[[str], None] = print,
    ) -> None:
        self.file = MetricsFile(run_dir / METRICS, writer, resumed_step)
        run = TrackedRun(project, name, run_dir, config, resumed_step, say)

        def open_tracker(logger: str) -> Tracker:
            tracker: Tracker = resolve(logger, TRACKERS, "trainer.logger")(run)
            return tracker

        self._trackers = [
            BackgroundTracker(logger, partial(open_tracker, logger), writer.warn)
            for logger in loggers
            if logger != "console"
        ]

    def log(self, step: int, metrics: Metrics) -> None:
        """Write one step to the file and to every tracker."""
        self.file.write(step, metrics)
        for tracker in self._trackers:
            tracker.log(step, metrics)

    def samples(self, step: int, kind: str, records: list[dict[str, Any]]) -> None:
        """Send at most SAMPLES_SENT samples to every tracker.

        Validation samples (kind "val") are always sent, those of training steps ("train") in step 1
        and in every SAMPLES_EVERY-th step, because each table is an upload.
        """
        if kind == "train" and step != 1 and step % SAMPLES_EVERY:
            return
        for tracker in self._trackers:
            tracker.samples(step, kind, records[:SAMPLES_SENT])

    def finish(self) -> None:
        """Close all trackers within FINISH_S."""
        deadline = time.monotonic() + FINISH_S
        for tracker in self._trackers:
            tracker.finish()
        for tracker in self._trackers:
            tracker.join(deadline - time.monotonic())
