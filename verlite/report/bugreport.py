"""Collect what a maintainer asks for about a run, with secrets masked, in one zip file.

Prompts and responses (rollouts/) and weights are left out. Logs may quote single samples.
"""

import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

from verlite.files import LINES_MAX_BYTES
from verlite.masking import mask_text
from verlite.report.doctor import examine, table
from verlite.terminal import clean

LINES = {"metrics.jsonl": 50, "warnings.jsonl": 50}
"""Lines kept of a file, from its end."""
WHOLE = ("config.yaml", "error.json", "run.json")
LOG_BYTES = 100 << 10
"""Kept of each log, from its end."""
LOGS = 64
LISTED = 2000


def write(run_dir: Path, target: Path) -> list[tuple[str, int]]:
    """Write the zip file and return (name, bytes) of what is in it.

    Raises:
        ValueError: `run_dir` is not a run directory.
        OSError: the file cannot be written.
    """
    if not run_dir.is_dir():
        what = "is a file" if run_dir.exists() else "does not exist"
        raise ValueError(f"{run_dir} {what}. Give a run directory (trainer.default_local_dir).")
    known = [*LINES, *WHOLE, "logs"]
    if not any((run_dir / name).exists() for name in known):
        raise ValueError(
            f"{run_dir} is not a run directory: it has none of {', '.join(known)}. "
            "Give trainer.default_local_dir of the run."
        )
    written = []
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in _files(run_dir):
            content = clean(_masked(text)).encode()  # names of files may not be UTF-8
            archive.writestr(clean(name), content)
            written.append((name, len(content)))
    return written


def _files(run_dir: Path) -> Iterator[tuple[str, str]]:
    yield "doctor.txt", table(examine(run_dir)) + "\n"
    yield "files.txt", _listing(run_dir)
    for name in WHOLE:
        yield from _tail(run_dir / name, name, LINES_MAX_BYTES)
    for name, count in LINES.items():
        for shown, text in _tail(run_dir / name, name, LINES_MAX_BYTES):
            yield shown, "".join(text.splitlines(keepends=True)[-count:])
    logs = sorted(file for file in (run_dir / "logs").glob("*.log") if not file.is_symlink())
    for file in logs[:LOGS]:
        yield from _tail(file, f"logs/{file.name}", LOG_BYTES)


def _tail(file: Path, name: str, size: int) -> Iterator[tuple[str, str]]:
    """Yield a name and the end of a regular file; nothing if it cannot be read."""
    try:
        if file.is_symlink() or not file.is_file():
            return
        with file.open("rb") as opened:
            opened.seek(max(0, file.stat().st_size - size))
            yield name, opened.read(size).decode(errors="replace")
    except OSError:
        return


def _listing(run_dir: Path) -> str:
    lines = []
    for folder, _, names in os.walk(run_dir):
        for name in sorted(names):
            file = Path(folder) / name
            try:
                lines.append(f"{file.lstat().st_size:>14}  {file.relative_to(run_dir)}")
            except OSError:
                continue
    return "\n".join(lines[:LISTED]) + "\n"


def _masked(text: str) -> str:
    """Mask secrets, among them the values of this process's environment, and the home folder."""
    return mask_text(text, os.environ).replace(str(Path.home()), "~")
