"""The page of one or several runs: an HTML file that needs neither a network nor a server.

What it shows is read from run directories, and stands compressed inside the file.
"""

import base64
import dataclasses
import gzip
import itertools
import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from verlite import __version__
from verlite.files import (
    one_line,
    read_json,
    read_json_lines,
    read_text,
    replace_file,
)
from verlite.report.samples import Sample, read_samples
from verlite.trainer import run_record
from verlite.trainer.detectors import WARNINGS
from verlite.trainer.run_record import CONFIG, changes_of_segments, settings
from verlite.trainer.tracking import METRICS, TIME, MetricsLines

MAX_SAMPLES = 10_000
"""Samples of a page, over all runs."""
MAX_STEPS = 1000
"""Points of a curve. Longer runs have the mean, the least and the largest value of several steps in
each."""
MAX_METRICS = 2000
"""Metrics of a run. Further ones are left out."""
MAX_TOKENS = 400_000
"""Response tokens of a page whose details are shown, over all runs."""
ERROR_FILE = "error.json"


Values = list[float | None]


@dataclass
class RunData:
    """One run.

    steps, metrics: [T] step numbers, and for each metric [T] values, None where it was not written.
    low, high: [T] least and largest values of a metric, if a point has several steps.
    config: every setting by dotted key.
    segments: for each resume the first step, and [key, before, now] of the settings that changed.
    samples: lines of rollouts/, each with `step`; those of validation also with `validation`.
    notes: what is missing or cannot be read.
    """

    name: str
    path: str
    steps: list[int]
    metrics: dict[str, Values]
    low: dict[str, Values]
    high: dict[str, Values]
    started: float | None
    ended: float | None
    """Times of the first and the last line, in seconds since 1970."""
    total_steps: int | None
    """Planned steps. None: not known."""
    config: dict[str, Any]
    segments: list[dict[str, Any]]
    samples: list[Sample]
    n_samples: int
    """Samples in the run directory. `samples` may have fewer."""
    warnings: list[dict[str, Any]]
    """Warnings of the run: step, name and text of each."""
    error: str | None
    """Why the run ended early, if its directory says so."""
    notes: list[str]


def collect(run_dirs: list[Path]) -> list[RunData]:
    """Read runs. A file that is missing or damaged becomes a note.

    Raises:
        ValueError: a folder does not exist or has no metrics.jsonl.
    """
    runs = [_read(path, name) for path, name in zip(run_dirs, _names(run_dirs), strict=True)]
    for run in runs:
        run.n_samples = len(run.samples)
        run.samples = thin(run.samples, MAX_SAMPLES // len(runs))
        if len(run.samples) < run.n_samples:
            run.notes.append(
                f"{len(run.samples)} of {run.n_samples} samples are shown, chosen evenly"
            )
        dropped = drop_tokens(run.samples, MAX_TOKENS // len(runs))
        if dropped:
            run.notes.append(f"samples without token details, to limit the page: {dropped}")
    return runs


def _names(run_dirs: list[Path]) -> list[str]:
    """Return the shortest ends of the paths that tell them apart."""
    parts = [path.resolve().parts for path in run_dirs]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(own[-count:]) for own in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{'/'.join(own)} ({number})" for number, own in enumerate(parts, start=1)]


def _read(path: Path, name: str) -> RunData:
    if not path.is_dir():
        what = "is a file" if path.is_file() else "does not exist"
        raise ValueError(f"{path} {what}. Give a run directory.")
    if not (path / METRICS).is_file():
        raise ValueError(f"{path} has no {METRICS}. Give a run directory after its first step.")
    notes: list[str] = []
    steps, times, metrics, low, high = _metrics(path / METRICS, notes)
    return RunData(
        name=name,
        path=str(path),
        steps=steps,
        metrics=metrics,
        low=low,
        high=high,
        started=min(times, default=None),
        ended=max(times, default=None),
        total_steps=_total_steps(path),
        config=_config(path, notes),
        segments=_segments(path, notes),
        samples=[*_samples(path, steps[-1] if steps else 0, notes)],
        n_samples=0,
        warnings=_warnings(path, notes),
        error=_error(path),
        notes=notes,
    )


def _metrics(
    path: Path, notes: list[str]
) -> tuple[list[int], list[float], dict[str, Values], dict[str, Values], dict[str, Values]]:
    """Return the points of a metrics file (`thin_steps`), and the times of its lines.

    Raises:
        ValueError: it cannot be read.
    """
    try:
        found = MetricsLines.read(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if found.unreadable:
        notes.append(f"lines of {path.name} that cannot be read: {len(found.unreadable)}")
    lines = found.values()
    keys = dict.fromkeys(key for line in lines for key in line if key not in ("step", TIME))
    if len(keys) > MAX_METRICS:
        notes.append(f"{MAX_METRICS} of {len(keys)} metrics are shown: the first")
        keys = dict.fromkeys(itertools.islice(keys, MAX_METRICS))
    steps, means, low, high = thin_steps(
        [line["step"] for line in lines], {key: [line.get(key) for line in lines] for key in keys}
    )
    if len(steps) < len(lines):
        notes.append(f"curves have {len(steps)} points for {len(lines)} steps: means and ranges")
    times = [line[TIME] for line in lines if line.get(TIME) is not None]
    return steps, times, means, low, high


def thin_steps(
    steps: list[int], metrics: dict[str, Values]
) -> tuple[list[int], dict[str, Values], dict[str, Values], dict[str, Values]]:
    """Return steps and metrics with at most MAX_STEPS points, and the ranges in each point.

    A point has the number of its last step. Ranges are left out if each point is one step.
    """
    size = -(-len(steps) // MAX_STEPS)
    if size <= 1:
        return steps, metrics, {}, {}
    starts = range(0, len(steps), size)
    means: dict[str, Values] = {}
    low: dict[str, Values] = {}
    high: dict[str, Values] = {}
    for key, values in metrics.items():
        points = [[v for v in values[i : i + size] if v is not None] for i in starts]
        means[key] = [_short(fmean(point)) if point else None for point in points]
        low[key] = [_short(min(point)) if point else None for point in points]
        high[key] = [_short(max(point)) if point else None for point in points]
    return [steps[min(i + size, len(steps)) - 1] for i in starts], means, low, high


def _short(value: float) -> float:
    """Return a number with six digits, which is more than a chart shows."""
    return float(f"{value:.6g}")


def _config(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        return settings(read_text(path / CONFIG))
    except (OSError, ValueError) as error:
        notes.append(f"{CONFIG} cannot be read: {one_line(error)}")
        return {}


def _segments(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Return the first step of each resumed segment, and [key, before, now] of what changed."""
    found = []
    try:
        for step, changes in changes_of_segments(path):
            found.append({"step": step, "changes": changes})
    except (OSError, ValueError) as error:
        notes.append(f"settings of earlier starts cannot be compared: {one_line(error)}")
    return found


def _total_steps(path: Path) -> int | None:
    try:
        return run_record.read(path).total_steps
    except (OSError, ValueError):
        return None


def _error(path: Path) -> str | None:
    try:
        error = read_json(path / ERROR_FILE)
    except (OSError, ValueError):
        return None
    if isinstance(error, dict):
        error = next((error[key] for key in ("message", "cause", "error") if key in error), error)
    return str(error)


def _warnings(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Return the warnings of every step once. A resumed run repeats those of lost steps."""
    try:
        lines, unreadable = read_json_lines(path / WARNINGS)
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        notes.append(f"{WARNINGS} cannot be read: {error}")
        return []
    found = {}
    for value in lines:
        try:
            found[int(value["step"]), str(value["name"])] = str(value["text"])
        except (ValueError, TypeError, KeyError):
            unreadable += 1
    notes += [f"a line of {WARNINGS} cannot be read"] * unreadable
    return [
        {"step": step, "name": name, "text": text} for (step, name), text in sorted(found.items())
    ]


def _samples(path: Path, last: int, notes: list[str]) -> Iterator[Sample]:
    """Yield the samples of training and of validation, in the order of steps.

    Steps after `last` are of an earlier run in the same directory.
    """
    unreadable = malformed = 0
    files = _sample_files(path)
    later = [number for number, _ in files if number > last]
    if later:
        notes.append(f"samples of steps after {last} are left out: {len(later)} files")
    for step, validation in files[: len(files) - len(later)]:
        try:
            _, samples, bad = read_samples(path, step, validation)
        except ValueError as error:
            notes.append(str(error))
            continue
        unreadable += bad
        for sample in samples:
            sample["step"] = step
            sample.pop("validation", None)
            if validation:
                sample["validation"] = True
            if "tokens" in sample and not _has_tokens(sample["tokens"]):
                del sample["tokens"]
                malformed += 1
            yield sample
    if unreadable:
        notes.append(f"samples that cannot be read: {unreadable}")
    if malformed:
        notes.append(f"samples whose token details are malformed: {malformed}")


def _has_tokens(tokens: Any) -> bool:
    """Whether every token has an id and a text, and every other entry a value for each token."""
    if not isinstance(tokens, dict):
        return False
    ids = tokens.get("id")
    if not isinstance(ids, list) or not isinstance(tokens.get("text"), list):
        return False
    values = [value for value in tokens.values() if not isinstance(value, int | float)]
    return all(isinstance(value, str | list) and len(value) == len(ids) for value in values)


def _sample_files(path: Path) -> list[tuple[int, bool]]:
    found = []
    for file in (path / "rollouts").glob("*step_*.jsonl"):
        kind, _, number = file.stem.rpartition("step_")
        if kind in ("", "val_") and number.isdecimal():
            found.append((int(number), kind == "val_"))
    return sorted(found)


def thin(samples: list[Sample], limit: int) -> list[Sample]:
    """Return at most `limit` samples in their order, as evenly over the steps as possible."""
    if len(samples) <= limit:
        return samples
    by_step: dict[tuple[int, bool], list[int]] = {}
    for number, sample in enumerate(samples):
        by_step.setdefault((sample["step"], "validation" in sample), []).append(number)
    # The first sample of every step comes before the second of any. The last round is spread.
    rounds: list[list[int]] = []
    for numbers in by_step.values():
        for place, number in enumerate(numbers):
            if place == len(rounds):
                rounds.append([])
            rounds[place].append(number)
    kept: list[int] = []
    for numbers in rounds:
        room = limit - len(kept)
        if len(numbers) > room:
            numbers = [numbers[i * len(numbers) // room] for i in range(room)] if room else []
        kept += numbers
    return [samples[number] for number in sorted(kept)]


def drop_tokens(samples: list[Sample], limit: int) -> int:
    """Delete the token details of randomly chosen samples until at most `limit` tokens are left.

    Returns:
        The number of samples that lost theirs.
    """
    detailed = [sample for sample in samples if "tokens" in sample]
    random.Random(0).shuffle(detailed)
    total = dropped = 0
    for sample in detailed:
        size = len(sample["tokens"]["id"])
        if total + size > limit:
            del sample["tokens"]
            dropped += 1
        else:
            total += size
    return dropped


# The file

_FOLDER = Path(__file__).parent / "page_files"


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
