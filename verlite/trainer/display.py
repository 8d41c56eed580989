"""What the terminal shows: a live line with the current phase, and one line per finished step.

Without a terminal every line has a clock time. Phases of the start get a line each, those of the
first step once they last a second, and later ones once nothing was printed for a minute.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from verlite.terminal import console

_COLUMNS = [
    ("critic/score/mean", "score", ".3f"),
    ("response_length/mean", "length", ".1f"),
    ("response_length/clip_ratio", "cut", ".0%"),
    ("actor/entropy", "entropy", ".3f"),
    ("actor/kl_loss", "kl", ".4f"),
    ("distillation/kl", "teacher kl", ".4f"),
    ("critic/vf_loss", "vf_loss", ".4f"),
    ("train/loss", "loss", ".4f"),
    ("val/loss", "val loss", ".4f"),
    ("actor/grad_norm", "grad", ".3f"),
    ("train/grad_norm", "grad", ".3f"),
    ("train/lr", "lr", ".2g"),
    ("training/log_prob_gap", "gap", ".1e"),
]
"""Metric, label and number format of the line of a finished step. Missing metrics are left out."""
EQUAL_GROUPS = "rollout/zero_variance_groups"
_STAGES = {
    "gen": "generating responses",
    "reward": "scoring responses",
    "old_log_prob": "computing log-probs",
    "ref": "computing reference log-probs",
    "teacher": "computing the teacher's log-probs",
    "values": "computing values",
    "adv": "estimating advantages",
    "update_critic": "updating the critic",
    "update_actor": "updating the actor",
    "update_model": "updating the model",
    "update_weights": "syncing weights",
    "testing": "validating",
    "save_checkpoint": "saving a checkpoint",
}
"""Phases that steps repeat, and what a line says about each."""
FIRST_STEP_S = 1.0
"""Seconds after which a phase of the first step gets a line."""
SILENCE_S = 60.0
"""Seconds without a line after which one says what the run is doing, without a terminal. Each
further one about the same phase comes after twice as long, up to MAX_SILENCE_S."""
MAX_SILENCE_S = 600.0
_STEPS_OF_ETA = 50
"""Newest steps whose mean duration gives the time that is left."""


class Display:
    """Progress of a run on a console: live on a terminal, lines with clock times elsewhere.

    Args:
        log: also gets every line, without the clock time.

    Attributes:
        current_phase: what the run is doing, "" between two phases.
        done: the last finished step.
    """

    def __init__(
        self, out: Console | None = None, log: Callable[[str], None] = lambda text: None
    ) -> None:
        self.console = out or console()
        self._log = log
        self.current_phase = ""
        self.done = 0
        self._total = 0
        self._groups = True
        self._began = 0.0
        self._is_announced = False
        self._trained = False
        self._ends: deque[float] = deque(maxlen=_STEPS_OF_ETA + 1)
        self._last_line = time.monotonic()
        self._silence_s = SILENCE_S
        self._closed = threading.Event()
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[phase]}", markup=False),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        if not self.console.is_terminal:
            threading.Thread(target=self._watch, name="display", daemon=True).start()

    def begin(self, total_steps: int, done: int = 0, groups: bool = True) -> None:
        """Show the live line on a terminal. Before, phases get a line each there too.

        Args:
            done: step of the checkpoint that the run resumes from.
            groups: whether the samples of a prompt are compared, so that groups with equal scores
                train nothing.
        """
        self._total, self.done, self._groups = total_steps, done, groups
        self._task = self._progress.add_task(
            "step", total=total_steps, completed=done, phase=self.current_phase
        )
        self._progress.start()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show `name` as the current phase."""
        before = self.current_phase
        self._show(name)
        if name not in _STAGES:
            self._announce()
        try:
            yield
        finally:
            self._show(before)

    def where(self, step: int | None = None) -> str:
        """Return what the run is doing, for messages. step: None before the first."""
        phase = self.current_phase
        if step is None:
            return f"while {phase or 'starting'}"
        return f"in step {step}" + (f" ({phase})" if phase else "")

    def _show(self, phase: str) -> None:
        self.current_phase = phase
        self._began = time.monotonic()
        self._is_announced = False
        self._silence_s = SILENCE_S
        if self._progress.tasks:
            self._progress.update(self._task, phase=phase)

    def _announce(self) -> None:
        self._is_announced = True
        text = _STAGES.get(self.current_phase, self.current_phase)
        self._log(text)
        if not self._progress.live.is_started:
            self._print(Text(text, style="dim"))

    def _watch(self) -> None:
        while not self._closed.wait(1.0):
            self.break_silence(time.monotonic())

    def break_silence(self, now: float) -> None:
        """Say what the run is doing, if it is due.

        Args:
            now: time.monotonic().
        """
        silent_s = now - self._last_line
        text = _STAGES.get(self.current_phase, self.current_phase)
        is_first = self.current_phase in _STAGES and not self._trained and not self._is_announced
        if is_first and now - self._began >= FIRST_STEP_S:
            self._announce()
        elif text and silent_s >= self._silence_s:
            next_s = min(2 * self._silence_s, MAX_SILENCE_S)
            self._print(Text(f"still {text}, {duration(silent_s)} after the last line"))
            self._silence_s = next_s

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Print the line of a finished step."""
        parts = [Text(f"step {step}/{self._total}")]
        for key, label, number_format in _COLUMNS:
            if key in metrics:
                parts.append(Text(f"{label} {metrics[key]:{number_format}}"))
            if label == "cut" and self._groups and EQUAL_GROUPS in metrics:
                parts.append(Text(f"signal {1 - metrics[EQUAL_GROUPS]:.0%}"))
        for key, value in metrics.items():
            if key.startswith("val-core/"):
                parts.append(Text(f"{short_name(key)} {value:.3f}", style="bold"))
        seconds = metrics.get("perf/time_per_step")
        if seconds:
            if "perf/total_num_tokens" in metrics:
                speed = metrics["perf/total_num_tokens"] / seconds
                parts.append(Text(f"{speed:.0f} tokens/s"))
            parts.append(Text(f"{seconds:.1f} s"))
        left = self._seconds_left(step, time.monotonic())
        if left is not None:
            parts.append(Text(f"{duration(left)} left"))
        line = Text("  ").join(parts)
        self._log(line.plain)
        self._print(line)
        self.done = step
        self._trained = self._trained or step > 0
        self._progress.update(self._task, completed=step)

    def advance(self, step: int) -> None:
        """Count a finished step that gets no line."""
        self._ends.append(time.monotonic())
        self.done = step
        self._trained = True
        self._progress.update(self._task, completed=step)

    def _seconds_left(self, step: int, now: float) -> float | None:
        """Return the time of the steps that are left, from the newest ones with their validations
        and checkpoints. None until two steps have ended, and after the last."""
        if step:
            self._ends.append(now)
        if len(self._ends) < 2 or step >= self._total:
            return None
        mean = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        return mean * (self._total - step)

    def info(self, text: str) -> None:
        self._log(text)
        self._print(Text(text))

    def warn(self, text: str) -> None:
        self._log(f"warning: {text}")
        self._print(Text.assemble(("warning: ", "yellow"), text))

    def _print(self, text: Text) -> None:
        self._last_line = time.monotonic()
        self._silence_s = SILENCE_S
        if not self.console.is_terminal:
            text = Text.assemble(time.strftime("%m-%d %H:%M:%S "), text)
        self.console.print(text, soft_wrap=True)

    def close(self) -> None:
        """Remove the live line."""
        self._closed.set()
        self._progress.stop()


def duration(seconds: float) -> str:
    """Return a duration in two units at most, such as `45 s`, `12 min` or `3 h 20 min`."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if hours else f"{days} d"


def short_name(key: str) -> str:
    """`val-core/openai/gsm8k/reward/mean@1` -> `val openai/gsm8k mean@1`."""
    _, *source, _, metric = key.removesuffix("/mean").split("/")
    return f"val {'/'.join(source)} {metric}"
