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
    """call(results, *args) runs in a process of its own, which is killed after `seconds`."""

    name: str
    seconds: float
    call: Callable[..., None]
    args: tuple[Any, ...] = ()


class Results:
    """The results of one part in the shared JSON file: {part: {row: result}}."""

    def __init__(self, path: Path, part: str, deadline: float) -> None:
        self.path = path
        self.part = part
        self.deadline = deadline

    def left(self) -> float:
        """Return the seconds until the part is killed."""
        return max(self.deadline - time.time(), 0.0)

    def write(self, row: str, found: dict[str, Any]) -> None:
        """Store one row's result and print it."""
        known = read(self.path)
        known.setdefault(self.part, {})[row] = found
        partial = self.path.with_suffix(".tmp")
        partial.write_text(json.dumps(known, indent=1) + "\n")
        partial.replace(self.path)
        print(f"{self.part} {row}: {json.dumps(found)}", flush=True)


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Return the results so far."""
    return json.loads(path.read_text()) if path.exists() else {}


def run_parts(
    parts: Iterable[Part],
    path: Path,
    ended: Callable[[str, dict[str, Any]], None] = lambda part, rows: None,
) -> None:
    """Run parts one after the other. A part's time starts when its process starts.

    Args:
        parts: what to run.
        path: the JSON file; results of parts that are not run again are kept.
        ended: called after each part with its rows. The row "process" says how long it took and,
            if it did not end by itself, why.
    """
    for part in parts:
        began = time.time()
        results = Results(path, part.name, began + part.seconds)
        _forget(path, part.name)
        process = multiprocessing.get_context("spawn").Process(
            target=_run, args=(part.call, results, part.args)
        )
        process.start()
        try:
            process.join(part.seconds)
            end: dict[str, Any] = {"seconds": time.time() - began}
            if process.exitcode is None:
                end["error"] = f"killed: not finished after {part.seconds:.0f} s"
            elif process.exitcode:
                end["error"] = f"the process ended with exit code {process.exitcode}"
        finally:
            _kill(process)
        results.write("process", end)
        ended(part.name, read(path)[part.name])


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


def _forget(path: Path, part: str) -> None:
    known = read(path)
    if known.pop(part, None) is not None:
        path.write_text(json.dumps(known, indent=1) + "\n")


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
