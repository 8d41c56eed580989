"""Where metrics go: `metrics.jsonl` always, and trackers that may fail without stopping a run.

The file is the truth: one JSON object a step, flushed to disk before the next step begins. Every other tracker runs in a
thread of its own behind a bounded queue, so that one that raises, hangs or cannot be imported costs a warning and nothing else.
"""

import json
import math
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verlite.config.catalog import TRACKERS, resolve

Metrics = dict[str, float]


class MetricsFile:
    """`metrics.jsonl`: an append-only file with one object a step.

    A resumed run first drops the lines after the step that it resumes from, so that the file is one gap-free sequence. A run that
    starts anew puts the file of an earlier one aside.
    """

    def __init__(self, path: Path, resumed_step: int = 0):
        self.path = path
        if not resumed_step and path.exists() and path.stat().st_size:
            path.rename(path.with_stem(f"{path.stem}-until-{time.strftime('%Y%m%d-%H%M%S')}"))
        kept = [line for line in read_lines(path) if line["step"] <= resumed_step]
        replace_file(path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, metrics: Metrics) -> None:
        """Append one step. NaN and infinity become null, which every JSON reader takes."""
        finite = {key: value if math.isfinite(value) else None for key, value in metrics.items()}
        self._file.write(json.dumps({"step": step, **finite}) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The complete objects of a metrics file; a last line cut off by a kill is left out."""
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
    """Write a file so that it holds the old text or the new one, whatever happens in between."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


class BackgroundTracker:
    """Runs one tracker in a thread; the first failure is told once and ends that tracker, never the run."""

    def __init__(
        self,
        name: str,
        open_tracker: Callable[[], Callable[[int, Metrics], None]],
        warn: Callable[[str], None],
    ):
        self.name, self._warn = name, warn
        self._queue: queue.Queue[tuple[int, Metrics] | None] = queue.Queue(maxsize=1000)
        self._thread = threading.Thread(
            target=self._work, args=(open_tracker,), daemon=True, name=f"tracker-{name}"
        )
        self._thread.start()

    def _work(self, open_tracker: Callable[[], Callable[[int, Metrics], None]]) -> None:
        try:
            log = open_tracker()
            while (item := self._queue.get()) is not None:
                log(*item)
            getattr(log, "finish", lambda: None)()
        except (
            Exception
        ) as error:  # a tracker is a guest: whatever it raises must not reach the run
            self._warn(
                f"tracker {self.name} failed and is off for the rest of the run: {type(error).__name__}: {error}. "
                "Nothing is lost: metrics.jsonl has every step."
            )

    def log(self, step: int, metrics: Metrics) -> None:
        if not self._thread.is_alive():
            return
        try:
            self._queue.put_nowait((step, metrics))
        except queue.Full:
            self._warn(f"tracker {self.name} does not keep up: step {step} was not sent to it")

    def finish(self, seconds: float = 20.0) -> None:
        if self._thread.is_alive():
            try:
                self._queue.put(None, timeout=seconds)
            except queue.Full:
                pass
            self._thread.join(seconds)
        if self._thread.is_alive():
            self._warn(
                f"tracker {self.name} did not finish within {seconds:.0f} s and was left behind"
            )


class WandbTracker:
    def __init__(self, project: str, name: str, directory: Path, config: dict[str, Any]):
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
    def __init__(self, project: str, name: str, directory: Path, config: dict[str, Any]):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory / "tensorboard"))

    def __call__(self, step: int, metrics: Metrics) -> None:
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def finish(self) -> None:
        self._writer.close()


class Tracking:
    """`metrics.jsonl` and the trackers of `trainer.logger`."""

    def __init__(
        self,
        loggers: list[str],
        run_dir: Path,
        project: str,
        name: str,
        config: dict[str, Any],
        warn: Callable[[str], None],
        resumed_step: int = 0,
    ):
        self.file = MetricsFile(run_dir / "metrics.jsonl", resumed_step)

        def opener(logger: str) -> Callable[[], Callable[[int, Metrics], None]]:
            return lambda: resolve(logger, TRACKERS, "trainer.logger")(
                project, name, run_dir, config
            )

        self._trackers = [
            BackgroundTracker(logger, opener(logger), warn)
            for logger in loggers
            if logger != "console"
        ]

    def log(self, step: int, metrics: Metrics) -> None:
        self.file.write(step, metrics)
        for tracker in self._trackers:
            tracker.log(step, metrics)

    def finish(self) -> None:
        for tracker in self._trackers:
            tracker.finish()
        self.file.close()
