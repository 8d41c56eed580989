"""The schema's keys as a flat table, read from the dataclasses and their fields."""

import dataclasses
import functools
import types
import typing
from dataclasses import dataclass
from typing import Annotated, Any

from verlite.config import schema
from verlite.config.facts import Facts, facts_of


@dataclass(frozen=True)
class Condition:
    """A condition of a key's `used_when`, with the note that its declaration adds."""

    text: str
    note: str


@dataclass(frozen=True)
class Key:
    """One dotted key."""

    name: str
    type: str
    default: Any
    facts: Facts
    conditions: tuple[Condition, ...] = ()
    """All must hold for the key to have an effect: those of its sections, then its own."""
    section: bool = False
    """It only contains other keys."""
    free: bool = False
    """A mapping whose entries are not declared."""
    any_type: bool = False
    """It has no type that OmegaConf checks."""

    @property
    def doc(self) -> str:
        """What the key means."""
        return self.facts.help


@functools.cache
def keys() -> dict[str, Key]:
    """Return every key of the schema, sections included, in the order of the schema."""
    return table(schema.Config())


def table(root: Any) -> dict[str, Key]:
    """Return every key of a schema, given as an instance of its dataclass."""
    found: dict[str, Key] = {}
    _collect(root, "", (), found)
    return found


def leaves() -> list[str]:
    """Return the names of all keys that have a value."""
    return [name for name, key in keys().items() if not key.section]


def get(config: Any, name: str) -> Any:
    """Return the value of a dotted key."""
    node: Any = config
    for part in name.split("."):
        node = node[part] if isinstance(node, dict) else getattr(node, part)
    return node


def find(name: str, schema_keys: dict[str, Key] | None = None) -> Key | None:
    """Return the key, or the free mapping that `name` is an entry of, or None.

    `schema_keys` is another schema's table.
    """
    known = keys() if schema_keys is None else schema_keys
    if name in known:
        return known[name]
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        parent = known.get(".".join(parts[:end]))
        if parent:
            return parent if parent.free else None
    return None


def owner(name: str) -> Key:
    """Return the same as `find`. Raises KeyError if there is no such key."""
    key = find(name)
    if key is None:
        raise KeyError(name)
    return key


def is_plain(name: str) -> bool:
    """Return whether this is a key of the schema, which is never a secret.

    Entries of free mappings may be.
    """
    return name in keys()


def _collect(
    node: Any, prefix: str, inherited: tuple[Condition, ...], found: dict[str, Key]
) -> None:
    hints = typing.get_type_hints(type(node), include_extras=True)
    for field in dataclasses.fields(node):
        name = prefix + field.name
        value = getattr(node, field.name)
        facts = facts_of(field)
        own = _conditions(facts, prefix)
        outer = () if field.name == "enable" else inherited
        if dataclasses.is_dataclass(value):
            found[name] = Key(name, "section", None, facts, section=True)
            _collect(value, name + ".", outer + own, found)
            continue
        text = type_name(hints[field.name])
        found[name] = Key(
            name,
            text,
            value,
            facts,
            conditions=outer + own,
            free="mapping" in text,
            any_type=typing.get_origin(hints[field.name]) is Annotated,
        )


def _conditions(facts: Facts, prefix: str) -> tuple[Condition, ...]:
    """Return the conditions of a field; its note belongs to the last one."""
    texts = [_absolute(text, prefix) for text in facts.used_when]
    return tuple(Condition(text, facts.note if text == texts[-1] else "") for text in texts)


def _absolute(condition: str, prefix: str) -> str:
    """Return a condition with a leading "." replaced by the section of its key."""
    return prefix + condition[1:] if condition.startswith(".") else condition


def type_name(hint: Any) -> str:
    """Return a type in words, such as "whole number or null".

    Types that OmegaConf cannot express are Any with words.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join("null" if arg is type(None) else type_name(arg) for arg in args)
    if origin is Annotated:
        return args[1]
    if origin is list:
        return f"list of {type_name(args[0])}s"
    if origin is dict:
        return "mapping"
    return {int: "whole number", float: "number", bool: "true/false", str: "text"}[hint]
