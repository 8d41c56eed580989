"""The configurations of a run: one for each time that it was started."""

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from verlite.files import RetryingWriter, check_yaml, one_line, read_text
from verlite.trainer.trackers import flat
from verlite.trainer.tracking import set_aside

CONFIG = "config.yaml"
CONFIGS = "configs"
"""Folder with the configuration of each segment: from_step_N.yaml."""
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def write_config(run_dir: Path, text: str, step: int, writer: RetryingWriter) -> None:
    """Write config.yaml, and the same as configs/from_step_N.yaml, where N is the next step.

    Args:
        step: the step that the run resumes from. 0: the configurations of an earlier run in this
            directory are renamed. Otherwise those of later steps are, which are trained again.

    Raises:
        OSError: they cannot be renamed, or one of the next step cannot be read.
    """
    if not step:
        set_aside(run_dir / CONFIGS)
    for first, file in _files(run_dir).items():
        if first > step + 1 or (first == step + 1 and file.read_bytes() != text.encode()):
            set_aside(file)
    writer.replace(run_dir / CONFIG, text.encode())
    writer.replace(run_dir / CONFIGS / f"from_step_{step + 1}.yaml", text.encode())


def changed_keys(earlier: Path, text: str) -> list[str]:
    """Return a line about each key whose value differs from an earlier config.yaml's.

    Args:
        earlier: the run directory of the checkpoint to resume from.
        text: the new configuration, as YAML.
    """
    try:
        old = settings(read_text(earlier / CONFIG))
    except (OSError, ValueError) as error:
        return [f"{earlier / CONFIG} cannot be compared: {one_line(error)}"]
    return [
        f"{key}: {before} before, {now} now" for key, before, now in changes(old, settings(text))
    ]


def changes_of_segments(run_dir: Path) -> Iterator[tuple[int, list[tuple[str, str, str]]]]:
    """Yield the first step of each resumed segment, and the `changes` since the segment before.

    Raises:
        OSError, ValueError: a file cannot be read.
    """
    texts = {step: read_text(file) for step, file in sorted(_files(run_dir).items())}
    for (_, before), (step, text) in itertools.pairwise(texts.items()):
        yield step, [] if text == before else changes(settings(before), settings(text))


def _files(run_dir: Path) -> dict[int, Path]:
    """Return the configuration of each segment by its first step."""
    found = {}
    for file in (run_dir / CONFIGS).glob("from_step_*.yaml"):
        number = file.stem.removeprefix("from_step_")
        if number.isdecimal():
            found[int(number)] = file
    return found


def settings(text: str) -> dict[str, Any]:
    """Return every value of a configuration in YAML by its dotted key.

    Raises:
        ValueError: it is not a mapping in YAML, or see `check_yaml`.
    """
    check_yaml(text)
    try:
        loaded = yaml.load(text, _LOADER)
    except yaml.YAMLError as error:
        raise ValueError(one_line(error)) from error
    if not isinstance(loaded, dict):
        raise ValueError("it is not a mapping")
    return dict(flat(loaded))


def changes(before: dict[str, Any], now: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return (key, old value, new value) of each key that differs."""
    found = []
    for key in dict.fromkeys([*now, *before]):
        if key not in before:
            found.append((key, "not there", one_line(repr(now[key]))))
        elif key not in now:
            found.append((key, one_line(repr(before[key])), "not there"))
        elif repr(before[key]) != repr(now[key]):
            found.append((key, *shown_difference(before[key], now[key])))
    return found


def shown_difference(before: object, now: object) -> tuple[str, str]:
    """Return two values in one line each. Long ones that begin alike are shown from a little before
    their difference on."""
    old, new = repr(before), repr(now)
    if one_line(old) == one_line(new):
        start = max(0, len(os.path.commonprefix([old, new])) - 30)
        old, new = f"... {old[start:]}", f"... {new[start:]}"
    return one_line(old), one_line(new)
