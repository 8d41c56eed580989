"""Write the page: the collected data, compressed, inside an HTML file."""

import base64
import dataclasses
import gzip
import json
import math
import time
from functools import partial
from pathlib import Path
from typing import Any

from verlite import __version__
from verlite.files import replace_file
from verlite.report.page.collect import RunData, collect

_FOLDER = Path(__file__).parent


def write_page(run_dirs: list[Path], target: Path, reload_s: float | None = None) -> list[RunData]:
    """Write the page of these runs to `target`, and return what it shows.

    Args:
        run_dirs: run directories.
        target: the HTML file to write.
        reload_s: seconds after which an open page loads itself again; None: never.

    Raises:
        ValueError: a run directory does not exist or has no metrics.jsonl.
        OSError: `target` cannot be written.
    """
    runs = collect(run_dirs)
    replace_file(target, page(runs, reload_s))
    return runs


def page(runs: list[RunData], reload_s: float | None = None) -> str:
    """Return the HTML. It contains every string of the runs in compressed form only."""
    overview = {
        "version": __version__,
        "made": time.strftime("%Y-%m-%d %H:%M"),
        "reload_s": reload_s,
        "runs": [{**dataclasses.asdict(run), "samples": None} for run in runs],
    }
    parts = {
        "STYLE": (_FOLDER / "page.css").read_text(encoding="utf-8"),
        "OVERVIEW": _packed(overview),
        "SAMPLES": _packed([run.samples for run in runs]),
        "SCRIPT": "\n".join(
            (_FOLDER / name).read_text(encoding="utf-8")
            for name in ("charts.js", "samples.js", "page.js")
        ),
    }
    text = (_FOLDER / "page.html").read_text(encoding="utf-8")
    for name, content in parts.items():
        text = text.replace(f"{{{{{name}}}}}", content)
    return text


def _packed(value: Any) -> str:
    """Return the gzipped JSON of a value in base64. Browsers refuse NaN and infinity in JSON."""
    dumps = partial(json.dumps, ensure_ascii=False, separators=(",", ":"), default=str)
    try:
        text = dumps(value, allow_nan=False)
    except ValueError:
        text = dumps(_finite(value))
    content = text.encode(errors="backslashreplace")
    return base64.b64encode(gzip.compress(content, compresslevel=6)).decode()


def _finite(value: Any) -> Any:
    """Return the value with the text of each NaN and infinity in its place."""
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
