"""What the terminal shows: a live line with the current phase, and one line per finished step."""

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

from verlite.config.plan import Plan
from verlite.config.show import console

_COLUMNS = [
    ("critic/score/mean", "score", ".3f"),
    ("response_length/mean", "length", ".1f"),
    ("actor/entropy", "entropy", ".3f"),
    ("actor/pg_loss", "pg_loss", "+.4f"),
    ("actor/kl_loss", "kl", ".4f"),
    ("critic/vf_loss", "vf_loss", ".4f"),
    ("actor/grad_norm", "grad", ".3f"),
    ("training/log_prob_gap", "gap", ".1e"),
]
"""Metric, label and number format of the line of a finished step. Missing metrics are left out."""


class Display:
    """Progress of a run on a console: live on a terminal, one line per step elsewhere.

    Args:
        log: also gets the lines of `info` and `warn`.

    Attributes:
        current_phase: what the run is doing, "" between two phases.
    """

    def __init__(
        self,
        total_steps: int,
        done: int = 0,
        out: Console | None = None,
        log: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.console = out or console()
        self._log = log
        self.current_phase = ""
        self._total = total_steps
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[phase]}"),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self._task = self._progress.add_task(
            "step", total=total_steps, completed=done, phase="starting"
        )
        self._progress.start()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show `name` as the current phase."""
        before = self.current_phase
        self._show(name)
        try:
            yield
        finally:
            self._show(before)

    def _show(self, phase: str) -> None:
        self.current_phase = phase
        self._progress.update(self._task, phase=phase)

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Print the line of a finished step."""
        parts = []
        for key, label, number_format in _COLUMNS:
            if key in metrics:
                parts.append(f"{label} {metrics[key]:{number_format}}")
        for key, value in metrics.items():
            if key.startswith("val-core/"):
                parts.append(f"[bold]{short_name(key)} {value:.3f}[/bold]")
        if "perf/time_per_step" in metrics:
            parts.append(f"{metrics['perf/time_per_step']:.1f} s")
        line = f"step {step}/{self._total}  " + "  ".join(parts)
        self.console.print(line, soft_wrap=True, highlight=False)
        self._progress.update(self._task, completed=step)

    def show_plan(self, plan: Plan) -> None:
        """Print the plan as a table."""
        self.console.print(plan.table())

    def info(self, text: str) -> None:
        self._log(text)
        self.console.print(text, soft_wrap=True, highlight=False, markup=False)

    def warn(self, text: str) -> None:
        self._log(f"warning: {text}")
        self.console.print(Text.assemble(("warning: ", "yellow"), text), soft_wrap=True)

    def close(self) -> None:
        """Remove the live line."""
        self._progress.stop()


def short_name(key: str) -> str:
    """`val-core/openai/gsm8k/reward/mean@1` -> `val openai/gsm8k mean@1`."""
    _, *source, _, metric = key.removesuffix("/mean").split("/")
    return f"val {'/'.join(source)} {metric}"
