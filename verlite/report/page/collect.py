"""What the page of a run shows, read from its run directory."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from verlite.files import LINES_MAX_BYTES, parse_json, read_bytes, read_json, read_text
from verlite.report.samples import Sample, read_samples
from verlite.trainer.finish import WARNINGS
from verlite.trainer.tracking import METRICS, MetricsLines

MAX_SAMPLES = 10_000
"""Samples of a page, over all runs."""
MAX_TOKENS = 400_000
"""Response tokens of a page whose details are shown, over all runs."""
ERROR_FILE = "error.json"


@dataclass
class RunData:
    """One run.

    steps, metrics: [T] step numbers, and for each metric [T] values, None where it was not written.
    config: every setting by dotted key.
    samples: lines of rollouts/, each with `step`; those of validation also with `validation`.
    notes: what is missing or cannot be read.
    """

    name: str
    path: str
    steps: list[int]
    metrics: dict[str, list[float | None]]
    config: dict[str, Any]
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
    try:
        found = MetricsLines.read(path / METRICS)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path / METRICS} cannot be read: {error}") from error
    if found.unreadable:
        notes.append(f"lines of {METRICS} that cannot be read: {len(found.unreadable)}")
    lines = found.values()
    keys = dict.fromkeys(key for line in lines for key in line if key != "step")
    return RunData(
        name=name,
        path=str(path),
        steps=[line["step"] for line in lines],
        metrics={key: [line.get(key) for line in lines] for key in keys},
        config=_config(path, notes),
        samples=[*_samples(path, lines[-1]["step"] if lines else 0, notes)],
        n_samples=0,
        warnings=_warnings(path, notes),
        error=_error(path),
        notes=notes,
    )


def _config(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        values = yaml.safe_load(read_text(path / "config.yaml"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        notes.append(f"config.yaml cannot be read: {error}")
        return {}
    return dict(_flat(values)) if isinstance(values, dict) else {}


def _flat(values: dict[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


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
        lines = read_bytes(path / WARNINGS, LINES_MAX_BYTES).split(b"\n")
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        notes.append(f"{WARNINGS} cannot be read: {error}")
        return []
    found = {}
    for line in filter(bytes.strip, lines):
        try:
            value = parse_json(line)
            found[int(value["step"]), str(value["name"])] = str(value["text"])
        except (ValueError, TypeError, KeyError):
            notes.append(f"a line of {WARNINGS} cannot be read")
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
