"""What a soak shows while it runs and at the end: a progress line, a table, a JSON file."""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from tests.chaos.disturb import Outcome
from tests.chaos.run import Run


class Report:
    """Collects outcomes. As a context manager it shows a live line, and at the end the table."""

    def __init__(self, path: Path, settings: Mapping[str, Any], console: Console | None = None):
        self.path = path
        self.console = console or Console()
        if not self.console.is_terminal:
            self.console.width = 200
        self.settings = {key: str(value) for key, value in settings.items()}
        self.outcomes: list[Outcome] = []
        self.runs: list[dict[str, Any]] = []
        self._other_problems: list[str] = []
        self._progress = Progress(
            SpinnerColumn(),
            TimeElapsedColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.description}"),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self._task = self._progress.add_task("starting", total=None)
        self._began: float | None = None

    def __enter__(self) -> "Report":
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType
    ) -> None:
        self._progress.stop()
        self.console.print(self.table())
        for problem in self.problems:
            self.console.print(f"[red]problem:[/red] {problem}", soft_wrap=True, highlight=False)
        self.write()

    def begin(self, seconds: float | None) -> None:
        """Start the bar's time."""
        self._began = time.monotonic()
        self._progress.update(self._task, total=seconds)

    def status(self, text: str) -> None:
        """Show what happens now."""
        elapsed = time.monotonic() - self._began if self._began else 0
        text = f"{text}  ({len(self.outcomes)} faults, {len(self.problems)} problems)"
        self._progress.update(self._task, description=text, completed=elapsed)

    def add(self, outcome: Outcome | None) -> None:
        """Add what a fault did. None: it was not injected."""
        if outcome is None:
            return
        self.outcomes.append(outcome)
        self.console.print(line_of(outcome), soft_wrap=True, highlight=False, markup=False)
        self.write()

    def ended(self, run: Run, outcome: Outcome | None) -> None:
        """Add the end of an attempt. It is a problem if its last fault had not ended it."""
        if outcome is None or outcome.code is None:
            after = f", after {outcome.fault}" if outcome else ""
            self.problem(f"{run.folder.name}: start {run.starts} ended with {run.code()}{after}")

    def left(self, outcome: Outcome | None, left: list[str]) -> None:
        """Add what an attempt left behind."""
        if left:
            cause = f"after {outcome.fault} in {outcome.phase}" if outcome else "without a fault"
            self.problem(f"left behind {cause}: {', '.join(left[:5])}")

    def compare(self, run: Run, differences: list[str]) -> None:
        """Add a finished run."""
        self.runs.append(
            {
                "run": run.folder.name,
                "attempts": run.starts,
                "steps": run.workload.steps,
                "differences": differences,
            }
        )
        same = "equal to the undisturbed run" if not differences else "NOT equal"
        text = f"{run.folder.name}: {run.starts} attempts, {same}"
        self.console.print(text, soft_wrap=True, highlight=False)
        for difference in differences:
            self.problem(f"{run.folder.name}: {difference}")
        self.write()

    @property
    def problems(self) -> list[str]:
        """Everything that was wrong, in one line each."""
        wrong = [one for one in self.outcomes if one.problem]
        return [
            f"{one.fault} in {one.phase}: {one.problem}" for one in wrong
        ] + self._other_problems

    def problem(self, text: str) -> None:
        """Add something that was wrong."""
        self._other_problems.append(text)

    def table(self) -> Table:
        """Return the outcomes as a table."""
        table = Table("fault", "moment", "notice", "end", "code", "resumed at", "problem")
        for one in self.outcomes:
            table.add_row(
                one.fault,
                f"{one.phase} after step {one.step}",
                seconds(one.notice_s),
                seconds(one.end_s),
                "went on" if one.code is None else str(one.code),
                "" if one.resumed_at is None else str(one.resumed_at),
                one.problem,
            )
        return table

    def write(self) -> None:
        """Write the results so far."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        result = {
            "settings": self.settings,
            "faults": [asdict(outcome) for outcome in self.outcomes],
            "runs": self.runs,
            "problems": self.problems,
        }
        self.path.write_text(json.dumps(result, indent=1) + "\n")


def line_of(one: Outcome) -> str:
    """Return an outcome in one line."""
    end = "went on" if one.code is None else f"code {one.code} after {seconds(one.end_s)}"
    return f"{one.fault} in {one.phase} after step {one.step}: {end}. {one.cause} {one.problem}"


def seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} s"
