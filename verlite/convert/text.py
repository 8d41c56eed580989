"""A conversion, and its text: a shell command with comments, or a YAML file."""

import json
import re
import shlex
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from verlite.config.commands import PPO, Command
from verlite.config.override_text import is_plain, number, override, scalar
from verlite.config.problems import Problem


def unexpanded(words: Iterable[str]) -> str:
    """Return why words with a shell variable cannot be values, or ""."""
    found = next((word for word in words if re.match(r"\$\w|\$\{", word)), None)
    rule = f"the shell has not replaced {found}: use double quotes, or write the value"
    return rule if found else ""


def yaml_value(value: Any) -> str:
    """Return a value in YAML, on one line."""
    if isinstance(value, Mapping):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(yaml_value, value)) + "]"
    if isinstance(value, float):
        text = number(value)
        mantissa, exponent, power = text.partition("e")
        return text if "." in mantissa else f"{mantissa}.0{exponent}{power}"
    if not isinstance(value, str):
        return scalar(value)
    return value if is_plain(value) else json.dumps(value, ensure_ascii=False)


WIDTH = 100
COLUMN = 36
"""Longest name in the first column of comments. The text of a longer one starts in its own line."""


@dataclass(frozen=True)
class Warned:
    """A setting without counterpart, or one that must be looked at. `typed` is as it was given."""

    typed: str
    text: str


@dataclass(frozen=True)
class Conversion:
    """The result.

    source: the other framework's name.
    values: verlite keys in the schema's order.
    comments: key -> what changed its meaning.
    needless: settings that verlite does not need.
    before: shell commands to run once before the training command.
    problems: why there is no command.
    defaults: whose defaults apply to the settings that were not given.
    command: the command of verlite that the keys are for.
    launch: the program that starts its module.
    """

    source: str
    values: dict[str, Any]
    comments: dict[str, str]
    warnings: list[Warned]
    needless: list[str]
    before: list[str]
    problems: list[Problem]
    defaults: str = ""
    command: Command = PPO
    launch: str = "python -m"

    @property
    def overrides(self) -> list[str]:
        """Return the arguments of the command."""
        return [override(key, value) for key, value in self.values.items()]


def command(conversion: Conversion) -> str:
    """Return a shell script: comments, commands to run before, and the training command."""
    lines = [*_header(conversion), *_changed(conversion.comments), *_warned(conversion)]
    lines += _needless(conversion)
    if conversion.before:
        lines += ["# Once, before the training:", *conversion.before]
    arguments = [shlex.quote(text) for text in conversion.overrides]
    lines += [" \\\n  ".join([f"{conversion.launch} verlite.{program(conversion)}", *arguments])]
    return "\n".join(lines) + "\n"


def program(conversion: Conversion) -> str:
    """Return the module of the command: main_ppo, main_sft or main_dpo."""
    return f"main_{conversion.command.config_name.removesuffix('_trainer')}"


def yaml_text(conversion: Conversion) -> str:
    """Return a YAML file for --config-name. Comments stand above the keys that they are about."""
    lines = [*_header(conversion), *_warned(conversion), *_needless(conversion)]
    if conversion.before:
        lines += ["# Once, before the training:", *(f"#   {line}" for line in conversion.before)]
    lines += ["defaults:", f"  - {conversion.command.config_name}", "  - _self_"]
    tree: dict[str, Any] = {}
    for key, value in conversion.values.items():
        *sections, last = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = value
    for name, value in tree.items():
        lines += ["", *_yaml_lines(name, value, name, 0, conversion)]
    return "\n".join(lines) + "\n"


def table(rows: Iterable[tuple[str, str]], width: int = WIDTH, indent: str = "#   ") -> list[str]:
    """Return lines in two aligned columns, the second one wrapped."""
    rows = list(rows)
    short = [len(name) for name, _ in rows if len(name) <= COLUMN]
    column = max(short, default=COLUMN)
    lines = []
    for name, text in rows:
        wrapped = textwrap.wrap(text, max(30, width - len(indent) - column - 2)) or [""]
        if len(name) > column:
            lines.append(f"{indent}{name}")
            name = ""
        for line in wrapped if name or text else []:
            lines.append(f"{indent}{name:<{column}}  {line}".rstrip())
            name = ""
    return lines


def _header(conversion: Conversion) -> list[str]:
    lines = [f"# Converted from {conversion.source} by `verlite convert`."]
    wrapped = textwrap.wrap(conversion.defaults, WIDTH - 2, break_on_hyphens=False)
    return lines + [f"# {line}" for line in wrapped]


def _changed(comments: Mapping[str, str]) -> list[str]:
    if not comments:
        return []
    keys: dict[str, list[str]] = {}
    for key, text in comments.items():
        keys.setdefault(text, []).append(key)
    rows = [
        row
        for text, names in keys.items()
        for row in [*((n, "") for n in names[:-1]), (names[-1], text)]
    ]
    return ["# Changed its meaning or needs attention:", *table(rows)]


def _warned(conversion: Conversion) -> list[str]:
    if not conversion.warnings:
        return []
    grouped: dict[str, list[str]] = {}
    for warning in conversion.warnings:
        grouped.setdefault(warning.text, []).append(warning.typed)
    rows = [(", ".join(names), text) for text, names in grouped.items()]
    return ["# Not converted:", *table(rows)]


def _needless(conversion: Conversion) -> list[str]:
    if not conversion.needless:
        return []
    names = textwrap.wrap(", ".join(conversion.needless), WIDTH - 4, break_on_hyphens=False)
    return ["# verlite needs none of:", *(f"#   {line}" for line in names)]


def _yaml_lines(
    name: str, value: Any, key: str, depth: int, conversion: Conversion
) -> Iterator[str]:
    space = "  " * depth
    if isinstance(value, dict) and key not in conversion.values:
        yield f"{space}{name}:"
        for child, below in value.items():
            yield from _yaml_lines(child, below, f"{key}.{child}", depth + 1, conversion)
        return
    if key in conversion.comments:
        for line in textwrap.wrap(conversion.comments[key], WIDTH - len(space) - 2):
            yield f"{space}# {line}"
    yield f"{space}{name}: {yaml_value(value)}"
