"""A conversion as text: a shell command with comments, or a YAML file."""

import shlex
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from verlite.convert.engine import Conversion
from verlite.convert.values import yaml_value

WIDTH = 100
COLUMN = 36
"""Longest name in the first column of comments. The text of a longer one starts in its own line."""


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
