"""The tables of other frameworks' settings: what becomes of each, and its default in a version.

Each framework has a file, such as `trl.toml`.
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from verlite import toml_tables
from verlite.config.problems import ConfigError, Problem, nearest

MODEL = "actor_rollout_ref.model."
ACTOR = "actor_rollout_ref.actor."
ROLLOUT = "actor_rollout_ref.rollout."
REF = "actor_rollout_ref.ref."

Act = Literal["same", "derived", "needless", "dropped", "refused"]

NOT_SET: Any = object()
"""The default of a setting that has no effect unless it is given."""

OPTION = "--source-version"


@dataclass(frozen=True)
class Row:
    """What becomes of one setting.

    name: as the other framework calls it. `*` stands for any text.
    act: "same": the keys in `to` get its value. "derived": a function of the converter computes
        the keys in `to` from it and from other settings. "needless": verlite needs no such setting,
        and nothing is lost; it is named once. "dropped": verlite has no counterpart, and training
        is the same without it; a warning says why. "refused": verlite has no counterpart,
        and training would be another; an error, unless it is at its default.
    to: verlite keys, with spaces between them.
    note: what changes its meaning ("same", "derived"), why it is dropped, or what to do instead.
    default: the other framework's own value. It is converted too, where verlite's differs.
    values: another spelling of a value: the other framework's -> verlite's.
    also: other names of the setting.
    kind: switch (on a command line: nothing follows), int, float, text, words (several),
        mapping or any.
    least: smallest number, if there is one.
    null: null is a value of this number.
    shared: programs of supervised fine-tuning have the setting, too.
    """

    name: str
    act: Act
    to: str = ""
    note: str = ""
    default: Any = NOT_SET
    values: Mapping[Any, Any] = field(default_factory=dict)
    also: tuple[str, ...] = ()
    kind: str = "text"
    least: float | None = None
    null: bool = False
    shared: bool = False

    def misfit(self, value: Any) -> str:
        """Return why a value cannot be one of this setting, or ""."""
        if self.act not in ("same", "derived") or "*" in self.name:
            return ""
        if self.kind in ("int", "float"):
            if value is None and (self.null or not isinstance(self.default, int | float)):
                return ""
            if isinstance(value, bool) or not isinstance(value, int | float):
                return "must be a number"
            if not math.isfinite(value):
                return "must be a finite number"
            if self.least is not None and value < self.least:
                return f"must be at least {self.least:g}"
        if self.kind == "switch" and not isinstance(value, bool | None):
            return "must be true or false"
        if self.kind == "text" and isinstance(value, list | tuple | dict):
            return "must be one value"
        if self.kind == "words" and not isinstance(value, str | None):
            parts = value if isinstance(value, list | tuple) else [None]
            if not all(isinstance(part, str | int | float) for part in parts):
                return "must be a list of texts or numbers"
        if self.kind == "mapping" and not isinstance(value, dict | None):
            return "must be a mapping"
        return ""


def find(rows: Iterable[Row], name: str) -> Row | None:
    """Return the first row for a setting, under any of its names."""
    for row in rows:
        if name in (row.name, *row.also):
            return row
        if "*" in row.name and name.startswith(row.name.removesuffix("*")):
            return row
    return None


def unknown(rows: Iterable[Row], name: str, value: Any, rule: str) -> Problem:
    """Return the problem of a setting that has no row, with the nearest name."""
    near = nearest(name, [row.name for row in rows if "*" not in row.name], 1)
    return Problem(name, value, rule, f"Did you mean {near[0]}?" if near else "")


class Change(NamedTuple):
    """A changed default of the programs `of`."""

    of: list[str]
    was: Any
    now: Any = NOT_SET


@dataclass(frozen=True)
class Table:
    """The settings of a program, with the defaults of the newest version that is known.

    rows: the first one that matches a name counts.
    changes: (setting, version): its default before and from this version on, newest first.
    """

    framework: str
    rows: tuple[Row, ...]
    oldest: str
    newest: str
    changes: dict[tuple[str, str], Change]

    def at(self, version: str | None) -> list[Row]:
        """Return the rows with the defaults of a version. None: the newest one.

        Raises:
            ConfigError: it is not a version from `oldest` to `newest`.
        """
        chosen, newest = _number(version or self.newest), _number(self.newest)
        if not _number(self.oldest) <= chosen or chosen[: len(newest)] > newest:
            rule = f"is not a version of {self.framework} that verlite knows the defaults of"
            remedy = f"Known are {self.oldest} to {self.newest}: give the nearest one."
            raise ConfigError([Problem(OPTION, version, rule, remedy)])
        old = {
            name: change.was
            for (name, since), change in self.changes.items()
            if _number(since) > chosen
        }
        return [replace(row, default=old.get(row.name, row.default)) for row in self.rows]

    def describe(self, given: Collection[str], version: str | None) -> str:
        """Return a sentence that says whose defaults these are, and which other versions differ."""
        used = {row.name for row in self.rows} - set(given)
        differ: dict[str, list[str]] = {}
        for (name, since), change in reversed(self.changes.items()):
            if name in used:
                differ.setdefault(name, []).append(f"{_shown(change.was)} before {since}")
        text = f"Defaults of {self.framework} {version or self.newest} ({OPTION})."
        if not differ:
            return text
        names = ", ".join(f"{name} ({', '.join(old)})" for name, old in differ.items())
        return f"{text} Others in older versions: {names}."


def _number(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, such as (0, 9) for "v0.9.post1"; () for other text."""
    found = re.match(r"v?(\d+(?:\.\d+)*)", version)
    parts = [int(part) for part in found[1].split(".")] if found else []
    while parts and not parts[-1]:
        parts.pop()
    return tuple(parts)


def _shown(value: Any) -> str:
    if value is NOT_SET or value is None:
        return "none"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


# The files


class _Setting(NamedTuple):
    """A row of a file: one act, with the keys of "same" and "derived", or the note of the others.

    default or kind: the kind is that of the default; a kind alone: nothing follows from the absence
        of the setting.
    """

    same: str | None = None
    derived: str | None = None
    needless: str | None = None
    dropped: str | None = None
    refused: str | None = None
    note: str = ""
    default: Any = NOT_SET
    kind: str = ""
    values: dict[str, Any] = {}
    least: int | None = None
    null: bool = False
    shared: bool = False


class _Program(NamedTuple):
    sections: list[str]
    oldest: str
    newest: str
    defaults: dict[str, Any] = {}


KINDS: Mapping[type, str] = {
    bool: "switch",
    int: "int",
    float: "float",
    str: "text",
    list: "words",
    dict: "mapping",
    type(None): "any",
}
"""By the type of a default."""


@dataclass(frozen=True)
class Dialect:
    """A file: {section: its rows}, programs and changed defaults."""

    sections: dict[str, tuple[Row, ...]]
    programs: Mapping[str, _Program]
    changes: Mapping[str, Change]

    def tables(self, framework: str) -> dict[str, Table]:
        """Return the table of each program."""
        found = {}
        for name, program in self.programs.items():
            own = program.defaults
            rows = tuple(
                replace(row, default=own[row.name]) if row.name in own else row
                for section in program.sections
                for row in self.sections[section]
            )
            changes = {
                (setting, version): change
                for key, change in self.changes.items()
                for setting, version in [key.split()]
                if name in change.of
            }
            found[name] = Table(framework, rows, program.oldest, program.newest, changes)
        return found


def read(file: Path, **words: str) -> Dialect:
    """Return a file's rows. Raises ValueError, which names the file and the row that is wrong."""
    words = {"actor": ACTOR, "model": MODEL, "ref": REF, "rollout": ROLLOUT, **words}
    shapes = {"programs": _Program, "changes": Change}
    found = toml_tables.read(file, shapes, others=_Setting, **words)
    programs, changes = found.pop("programs"), found.pop("changes")
    sections = {}
    for section, settings in found.items():
        rows: list[Row] = []
        taken: set[str] = set()
        for names, setting in settings.items():
            try:
                rows.append(_row(names.split(), setting))
                if not taken.isdisjoint(names.split()):
                    raise ValueError("another row has one of these names")
            except ValueError as error:
                raise ValueError(f"{file.name}, [{section}] {names!r}: {error}") from None
            taken |= {*names.split()}
        sections[section] = tuple(rows)
    return Dialect(sections, programs, changes)


def _row(names: Sequence[str], setting: _Setting) -> Row:
    acts = [act for act in get_args(Act) if getattr(setting, act) is not None]
    if len(acts) != 1:
        raise ValueError(f"needs one of {', '.join(get_args(Act))}")
    if setting.kind and setting.kind not in KINDS.values():
        raise ValueError(f"kind must be one of {', '.join(KINDS.values())}")
    if setting.kind and setting.default is not NOT_SET:
        raise ValueError("has a default, so it needs no kind")
    (act,) = acts
    text = getattr(setting, act)
    to, note = (text, setting.note) if act in ("same", "derived") else ("", text)
    kind = setting.kind or KINDS.get(type(setting.default), "text")
    values = {{"true": True, "false": False}.get(k, k): v for k, v in setting.values.items()}
    more = (setting.default, values, tuple(names[1:]), kind)
    return Row(names[0], act, to, note, *more, setting.least, setting.null, setting.shared)
