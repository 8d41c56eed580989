"""Key names of other projects, and what happens to them: `aliases.toml` and `sft_aliases.toml`; and
verl's own keys, defaults and files.

A `*` in a name matches any text. A name in full goes before a pattern, and a long pattern before a
short one.

`verl_defaults.json` has every key of verl's generated trainer configuration (FSDP), from version
0.5 on, with its defaults; `verl_sft_defaults.json` those of supervised fine-tuning, from 0.3 on.
`python -m tests.config.verl_keys` writes both from a checkout of verl.
"""

import functools
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from verlite import toml_tables
from verlite.importing import VERL_VARIABLE


class Fixed(NamedTuple):
    """A key without a choice: its accepted values, the reason, and the remedy for other values."""

    accepts: list[Any]
    why: str
    remedy: str = ""


class Sets(NamedTuple):
    """What an old key with this value gives a value: {key: value}."""

    value: Any
    gives: dict[str, Any]


class TurnsOn(NamedTuple):
    """Another key, and the value that it gets."""

    key: str
    value: Any


class Style(NamedTuple):
    """A command of another project, whose defaults hold where its key names are used."""

    names: list[str]
    """Names and patterns that only it has."""
    defaults: dict[str, Any]
    """{current name: its default there}."""


@dataclass(frozen=True)
class Tables:
    """Key names of other projects. `aliases.toml` describes each table."""

    renamed: Mapping[str, str] = field(default_factory=dict)
    per_device: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Fixed] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    ignored: Mapping[str, str] = field(default_factory=dict)
    null_means: Mapping[str, Any] = field(default_factory=dict)
    spellings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    sets: Mapping[str, Sets] = field(default_factory=dict)
    turns_on: Mapping[str, TurnsOn] = field(default_factory=dict)
    typed: Collection[str] = ()
    implied: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    styles: Mapping[str, Style] = field(default_factory=dict)
    """In words -> the command."""

    def new_name(self, name: str) -> str | None:
        """Return the new name of a renamed key, or None."""
        old = matching(self.renamed, name)
        if old is None:
            return None
        match = _regex(old).fullmatch(name)
        same_text = match[1] if match and match.groups() else ""
        return self.renamed[old].replace("*", same_text)

    def targets(self, name: str, value: Any) -> dict[str, Any]:
        """Return the keys that an old key with this value sets, with their values; {} if it is not
        of that kind.
        """
        for old, (wanted, values) in self.sets.items():
            match = _regex(old).fullmatch(name)
            if match and value is wanted:
                return {
                    new.replace("*", match[1]) if match.groups() else new: one
                    for new, one in values.items()
                }
        return {}

    def style(self, names: Sequence[str]) -> tuple[str, str]:
        """Return the first style that has one of these names, with that name; ("", "") if none."""
        for project, style in self.styles.items():
            for name in names:
                if matching(style.names, name):
                    return project, name
        return "", ""

    def spelled(self, key: str, value: Any) -> Any:
        """Return the value in verlite's spelling."""
        spellings = lookup(self.spellings, key)
        written = "null" if value is None else str(value).lower()
        return spellings.get(written, value) if spellings else value

    def meaning(self, name: str) -> str | None:
        """Return the table that contains a key: "renamed", "per device", "fixed", "refused",
        "ignored", or None.
        """
        if self.new_name(name):
            return "renamed"
        tables: dict[str, Mapping[str, Any]] = {
            "per device": self.per_device,
            "fixed": self.fixed,
            "refused": self.refused,
            "ignored": self.ignored,
        }
        found = {meaning: matching(table, name) for meaning, table in tables.items()}
        best = _best(name, [pattern for pattern in found.values() if pattern is not None])
        return next((meaning for meaning in found if best and found[meaning] == best), None)

    def all_names(self) -> Iterator[str]:
        """Yield every old name, for suggestions and `verlite explain`."""
        for table in (self.renamed, self.sets, self.per_device, self.fixed, self.refused):
            yield from table
        yield from self.ignored


SHAPES = {
    "renamed": str,
    "per_device": str,
    "fixed": Fixed,
    "refused": str,
    "ignored": str,
    "null_means": Any,
    "spellings": dict[str, Any],
    "sets": Sets,
    "turns_on": TurnsOn,
    "typed": bool,
    "implied": dict[str, str],
    "styles": Style,
}
"""Section of a file -> what its rows are."""


def read_ppo() -> Tables:
    """Return the tables of main_ppo."""
    return Tables(**_sections("aliases.toml", SHAPES))


def read_sft(ppo: Tables) -> Tables:
    """Return the tables of main_sft: its own, and those of main_ppo for any role."""
    own = _sections("sft_aliases.toml", {"sections": list[str], **SHAPES})
    sections: dict[str, list[str]] = own.pop("sections")
    for name in ("fixed", "refused", "ignored"):
        own[name] = _in_sections(getattr(ppo, name), sections) | own[name]
    own["spellings"] = {**ppo.spellings, **own["spellings"]}
    own["implied"] = dict(ppo.implied)
    return Tables(**own)


def _sections(name: str, shapes: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    file = Path(__file__).with_name(name)
    return toml_tables.read(file, shapes, verl_variable=VERL_VARIABLE)


def _in_sections(table: Mapping[str, Any], sections: Mapping[str, list[str]]) -> dict[str, Any]:
    """Return a table's rows for any role, "*.section.key" and "*.key", under their names in SFT."""
    found: dict[str, Any] = {}
    for pattern, entry in table.items():
        if not pattern.startswith("*."):
            continue
        section, _, rest = pattern.removeprefix("*.").partition(".")
        places = sections.get(section)
        names = [pattern] if places is None else [f"{place}.{rest}" for place in places]
        found |= dict.fromkeys(names, entry)
    return found


def lookup(table: Mapping[str, Any], name: str) -> Any:
    """Return the table's entry for a key, or None."""
    pattern = matching(table, name)
    return None if pattern is None else table[pattern]


def matching(table: Collection[str], name: str) -> str | None:
    """Return the name or pattern of a table that matches a key best, or None."""
    if name in table:
        return name
    return _best(name, [p for p in table if "*" in p and _regex(p).fullmatch(name)])


def _best(name: str, patterns: Collection[str]) -> str | None:
    """Return the one of these matching patterns that says most about a name."""
    return max(patterns, key=lambda pattern: (pattern == name, len(pattern)), default=None)


@functools.cache
def _regex(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\*", "(.+)"))


TABLE = Path(__file__).with_name("verl_defaults.json")
SFT_TABLE = Path(__file__).with_name("verl_sft_defaults.json")

TRAINERS = {
    "ppo_trainer": "",
    "ppo_megatron_trainer": "is verl's trainer with Megatron; verlite trains with FSDP2",
    "ppo_veomni_trainer": "is verl's trainer with VeOmni; verlite trains with FSDP2",
    "ppo_torchtitan_trainer": "is verl's trainer with torchtitan; verlite trains with FSDP2",
}
"""verl's own YAML files -> why a run cannot follow one, "" if verlite's ppo_trainer is the same."""


SFT_TRAINERS = {"sft_trainer": "", "sft_trainer_engine": ""}
"""The same for verl's supervised fine-tuning."""


@functools.cache
def defaults(table: Path = TABLE) -> dict[str, list[Any]]:
    """Return {dotted key: its defaults in the versions of verl, the newest last}."""
    found: dict[str, list[Any]] = json.loads(table.read_text(encoding="utf-8"))
    return found


def is_default(key: str, value: Any, known: Mapping[str, list[Any]] | None = None) -> bool:
    """Return whether verl has the key, and without the key has this value.

    Args:
        known: verl's keys and defaults. None: those of its RL trainer.
    """
    found = (defaults() if known is None else known).get(key, [])
    return any(
        value == other and isinstance(value, bool) == isinstance(other, bool) for other in found
    )
