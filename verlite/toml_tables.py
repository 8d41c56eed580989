"""Tables that are data: TOML files with sections of rows, checked field by field.

A row is `name = entry`; an entry is one value, or an inline table with the fields of a NamedTuple.
In names and texts, {word} stands for a text of the section [words], which may use words above it.
The text "null" stands for None, which TOML lacks.
"""

import functools
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

WORD = re.compile(r"\{([a-z_0-9]+)\}")


def read(
    file: Path, shapes: Mapping[str, Any], others: Any = None, **words: str
) -> dict[str, dict[str, Any]]:
    """Return {section: {name: entry}} in the file's order; {} for a section that it lacks.

    Args:
        shapes: section -> what an entry is: a type such as str or list[str], Any, or a NamedTuple,
            whose fields without a default are required.
        others: what an entry of any other section is. None: there are no others.
        words: texts besides those of [words].

    Raises:
        ValueError: the file is not TOML, or a row has an unknown word, section or field, lacks a
            field, has a value of another type, or a name that an earlier row has. The message names
            the file and the row.
    """
    content = _parse(file)
    shapes = {"words": str, **shapes}
    unknown = [section for section in content if section not in shapes]
    if unknown and others is None:
        raise ValueError(
            f"{file.name}: unknown section {unknown[0]}. Known are {', '.join(shapes)}"
        )
    shapes |= dict.fromkeys(unknown, others)
    found: dict[str, dict[str, Any]] = {"words": words}
    for section, shape in shapes.items():
        rows = found.setdefault(section, {})
        written = content.get(section, {})
        if not isinstance(written, dict):
            raise ValueError(f"{file.name}, {section}: must be a section of rows")
        for name, entry in written.items():
            try:
                filled = _text(name, words)
                if filled in rows:
                    raise ValueError("another row has this name")
                rows[filled] = _checked(_filled(entry, words), shape)
            except ValueError as error:
                raise ValueError(f"{file.name}, [{section}] {name!r}: {error}") from None
    del found["words"]
    return found


@functools.cache
def _parse(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:  # such as a name twice; it says the line
        raise ValueError(f"{file.name}: {error}") from None


def _filled(value: Any, words: Mapping[str, str]) -> Any:
    """Return a value with its words replaced, and None for "null"."""
    if isinstance(value, dict):
        return {_text(name, words): _filled(one, words) for name, one in value.items()}
    if isinstance(value, list):
        return [_filled(one, words) for one in value]
    if not isinstance(value, str):
        return value
    return None if value == "null" else _text(value, words)


def _text(text: str, words: Mapping[str, str]) -> str:
    try:
        return WORD.sub(lambda match: words[match[1]], text)
    except KeyError as word:
        known = ", ".join(sorted(words))
        raise ValueError(f"unknown word {{{word.args[0]}}}. Known are {known}") from None


def _checked(entry: Any, shape: Any) -> Any:
    """Return an entry as its shape: a NamedTuple, or the value as it is."""
    if not hasattr(shape, "_fields"):
        if not _fits(entry, shape):
            raise ValueError(f"must be {_type_name(shape)}, not {entry!r}")
        return entry
    types = shape.__annotations__
    if not isinstance(entry, dict):
        raise ValueError(f"must be an inline table with {', '.join(types)}")
    for field, value in entry.items():
        if field not in types:
            raise ValueError(f"unknown field {field}. Known are {', '.join(types)}")
        if not _fits(value, types[field]):
            raise ValueError(f"{field} must be {_type_name(types[field])}, not {value!r}")
    missing = types.keys() - shape._field_defaults.keys() - entry.keys()
    if missing:
        raise ValueError(f"lacks {', '.join(sorted(missing))}")
    return shape(**entry)


def _fits(value: Any, kind: Any) -> bool:
    """Return whether a value is of a type: its own, list[...], dict[str, ...], a union or Any."""
    if kind is Any or type(value) is kind:
        return True
    parts = get_args(kind)
    if isinstance(kind, UnionType):
        return any(_fits(value, part) for part in parts)
    if get_origin(kind) is list:
        return isinstance(value, list) and all(_fits(one, parts[0]) for one in value)
    if get_origin(kind) is dict:
        return isinstance(value, dict) and all(_fits(one, parts[1]) for one in value.values())
    return False


def _type_name(kind: Any) -> str:
    return str(kind) if get_args(kind) else kind.__name__
