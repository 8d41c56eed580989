"""Where metrics go: always `metrics.jsonl`, and the trackers of `trainer.logger`.

`metrics.jsonl` has one JSON object per step, flushed to disk before the next step begins. Every
other tracker runs in its own thread behind a bounded queue. If one fails, hangs or cannot be
imported, the run continues with a warning.
"""

import json
import math
import os
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from verlite.config.catalog import TRACKERS, resolve

Metrics = dict[str, float]
MAX_QUEUED_STEPS = 1000


class MetricsFile:
    """`metrics.jsonl`: one JSON object per step, append-only.

    A resumed run first drops the lines after the step that it resumes from, so that no step is
    missing or repeated. A run that starts from the beginning renames the file of an earlier run.
    """

    def __init__(self, path: Path, resumed_step: int = 0) -> None:
        self.path = path
        if not resumed_step and path.exists() and path.stat().st_size:
            now = time.strftime("%Y%m%d-%H%M%S")
            path.rename(path.with_stem(f"{path.stem}-until-{now}"))
        kept = [line for line in read_lines(path) if line["step"] <= resumed_step]
        replace_file(path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, metrics: Metrics) -> None:
        """Append one step. NaN and infinity become null, because JSON has neither."""
        finite = {key: value if math.isfinite(value) else None for key, value in metrics.items()}
        self._file.write(json.dumps({"step": step, **finite}) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the complete objects of a metrics file. An incomplete last line is dropped."""
    if not path.exists():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines


def replace_file(path: Path, text: str) -> None:
    """Replace a file's text atomically: after a crash it has either the old text or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


class Tracker(Protocol):
    """A tracker object. Its class is called with project, name, directory and config."""

    def __call__(self, step: int, metrics: Metrics) -> None: ...

    def finish(self) -> None: ...


class BackgroundTracker:
    """Run one tracker in a thread. Its first failure is a warning and switches it off."""

    def __init__(
        self, name: str, open_tracker: Callable[[], Tracker], warn: Callable[[str], None]
    ) -> None:
        self.name = name
        self._warn = warn
        self._queue: queue.Queue[tuple[int, Metrics] | None] = queue.Queue(MAX_QUEUED_STEPS)
        self._thread = threading.Thread(
            target=self._work, args=(open_tracker,), daemon=True, name=f"tracker-{name}"
        )
        self._thread.start()

    def _work(self, open_tracker: Callable[[], Tracker]) -> None:
        try:
            tracker = open_tracker()
            while True:
                item = self._queue.get()
                if item is None:
                    break
                tracker(*item)
            tracker.finish()
        except Exception as error:  # whatever a tracker raises must not reach the run
            self._warn(
                f"tracker {self.name} failed and is off for the rest of the run: "
                f"{type(error).__name__}: {error}. "
                "Nothing is lost: metrics.jsonl has every step."
            )

    def log(self, step: int, metrics: Metrics) -> None:
        """Queue one step. Never blocks; a full queue is a warning."""
        if not self._thread.is_alive():
            return
        try:
            self._queue.put_nowait((step, metrics))
        except queue.Full:
            self._warn(f"tracker {self.name} is too slow: step {step} was not sent to it")

    def finish(self, seconds: float = 20.0) -> None:
        """Send what is queued and close the tracker. Gives up with a warning after `seconds`."""
        if self._thread.is_alive():
            try:
                self._queue.put(None, timeout=seconds)
            except queue.Full:
                pass
            self._thread.join(seconds)
        if self._thread.is_alive():
            self._warn(f"tracker {self.name} did not finish within {seconds:.0f} s; gave up on it")


class WandbTracker:
    """Weights & Biases."""

    def __init__(self, project: str, name: str, directory: Path, config: dict[str, Any]) -> None:
        import wandb

        self._run = wandb.init(
            project=project,
            name=name,
            dir=str(directory),
            config=config,
            settings=wandb.Settings(silent=True),
        )

    def __call__(self, step: int, metrics: Metrics) -> None:
        self._run.log(metrics, step=step)

    def finish(self) -> None:
        self._run.finish()


class TensorBoardTracker:
    """Event files in the run directory's `tensorboard` folder."""

    def __init__(self, project: str, name: str, directory: Path, config: dict[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory / "tensorboard"))

    def __call__(self, step: int, metrics: Metrics) -> None:
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def finish(self) -> None:
        self._writer.close()


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
        warn: Callable[[str], None],
        resumed_step: int = 0,
    ) -> None:
        self.file = MetricsFile(run_dir / "metrics.jsonl", resumed_step)

        def open_tracker(logger: str) -> Tracker:
            tracker_class = resolve(logger, TRACKERS, "trainer.logger")
            tracker: Tracker = tracker_class(project, name, run_dir, config)
            return tracker

        self._trackers = [
            BackgroundTracker(logger, partial(open_tracker, logger), warn)
            for logger in loggers
            if logger != "console"
        ]

    def log(self, step: int, metrics: Metrics) -> None:
        """Write one step to the file and to every tracker."""
        self.file.write(step, metrics)
        for tracker in self._trackers:
            tracker.log(step, metrics)

    def finish(self) -> None:
        """Close the file and every tracker."""
        for tracker in self._trackers:
            tracker.finish()
        self.file.close()
