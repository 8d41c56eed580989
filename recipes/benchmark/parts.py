"""Parts of a measurement. Each runs in its own process with its own deadline, and writes each of
its results to a file at once, so that a part that fails or hangs costs only itself."""

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Part:
    """call(results, *args) runs in a process of its own, which is killed after `seconds`. With less
    than `needs` seconds left it is not begun."""

    name: str
    seconds: float
    call: Callable[..., None]
    args: tuple[Any, ...] = ()
    needs: float = 0.0


class Results:
    """The results of one part in the shared file, a JSON object per line."""

    def __init__(self, path: Path, part: str, deadline: float) -> None:
        self.path = path
        self.part = part
        self.deadline = deadline

    def left(self) -> float:
        """Return the seconds until the part is killed."""
        return max(self.deadline - time.time(), 0.0)

    def write(self, row: str, found: dict[str, Any]) -> None:
        """Store one row's result and print it."""
        line = json.dumps({"part": self.part, "row": row, **found})
        with open(self.path, "a") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
        print(f"{self.part} {row}: {json.dumps(found)}", flush=True)


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Return the results so far, {part: {row: result}}. A line that was cut off is left out."""
    found: dict[str, dict[str, Any]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        with suppress(ValueError):
            result = json.loads(line)
            found.setdefault(result.pop("part"), {})[result.pop("row")] = result
    return found


def run_parts(parts: Iterable[Part], path: Path, deadline: float) -> None:
    """Run parts one after the other. A part's time starts when its process starts.

    Args:
        parts: what to run.
        path: the file. A part's row "process" says how long it took and, if it did not end by
            itself or was not begun, why.
        deadline: of all parts together, on the clock of time.time().
    """
    for part in parts:
        began = time.time()
        left = deadline - began
        results = Results(path, part.name, began + min(part.seconds, left))
        if left < part.needs:
            reason = f"needs about {part.needs:.0f} s, and {max(left, 0):.0f} s were left"
            results.write("process", {"skipped": reason})
            continue
        process = multiprocessing.get_context("spawn").Process(
            target=_run, args=(part.call, results, part.args)
        )
        process.start()
        try:
            process.join(results.left())
            end: dict[str, Any] = {"seconds": time.time() - began}
            if process.exitcode is None:
                end["error"] = f"killed: not finished after {end['seconds']:.0f} s"
            elif process.exitcode:
                end["error"] = f"the process ended with exit code {process.exitcode}"
        finally:
            _kill(process)
        results.write("process", end)


def _run(call: Callable[..., None], results: Results, args: tuple[Any, ...]) -> None:
    os.setpgrp()  # so that a kill reaches the processes that it starts
    call(results, *args)


def _kill(process: Any) -> None:
    """End the part's process and those that it started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.is_alive():  # killed before it had its own group
        process.kill()
    process.join()


def show(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, formatted by rich if it is installed."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(plain(head, rows), flush=True)
        return
    table = Table(*head)
    for row in rows:
        table.add_row(*row)
    Console(width=max(Console().width, 150), markup=False).print(table)


def plain(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as text with aligned columns."""
    lines = [head, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
