"""Defaults of another framework that depend on its version."""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from verlite.config.problems import ConfigError, Problem
from verlite.convert.rows import NOT_SET, Row

OPTION = "--source-version"


class Change(NamedTuple):
    """A default that was `old` before `version`, and is `new` from it on."""

    name: str
    version: str
    old: Any
    new: Any


@dataclass(frozen=True)
class Versions:
    """The versions of a framework whose defaults are known.

    newest: the version whose defaults are in the table of settings.
    changes: newest first.
    """

    framework: str
    oldest: str
    newest: str
    changes: Sequence[Change]

    def table(self, rows: Iterable[Row], version: str | None) -> list[Row]:
        """Return the rows with the defaults of a version. None: the newest one.

        Raises:
            ConfigError: it is not a version from `oldest` to `newest`.
        """
        chosen, newest = _number(version or self.newest), _number(self.newest)
        if not _number(self.oldest) <= chosen or chosen[: len(newest)] > newest:
            rule = f"is not a version of {self.framework} that verlite knows the defaults of"
            remedy = f"Known are {self.oldest} to {self.newest}: give the nearest one."
            raise ConfigError([Problem(OPTION, version, rule, remedy)])
        old = {c.name: c.old for c in self.changes if _number(c.version) > chosen}
        return [replace(row, default=old.get(row.name, row.default)) for row in rows]

    def describe(self, table: Iterable[Row], given: Collection[str], version: str | None) -> str:
        """Return a sentence that says whose defaults these are, and which other versions differ."""
        used = {row.name for row in table} - set(given)
        differ: dict[str, list[str]] = {}
        for change in reversed(self.changes):
            if change.name in used:
                text = f"{_shown(change.old)} before {change.version}"
                differ.setdefault(change.name, []).append(text)
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
