"""Keys: how a schema declares one, and a schema's keys as a flat table.

A key is a dataclass field. Its metadata has what its name and type do not say: default, help, legal
values, and when it is used.
"""

import copy
import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

Used = str | tuple[str, ...]


@dataclass(frozen=True)
class Facts:
    """Declarations of one key or section.

    They are stored in the metadata of its dataclass field.
    """

    help: str
    """What the key means. `verlite explain` prints it."""
    choices: tuple[str, ...] = ()
    """Legal names. Empty: any value of the type."""
    own: str = ""
    """Set if the user's own "package.module:name" is legal too: what the name stands for, function
    or class.
    """
    bound: str = ""
    """Legal numbers, such as ">= 1 or -1", "> 0 and <= 1" or "finite". null is legal where the type
    allows it.
    """
    remedy: str = ""
    """What to do about a number that is out of bounds."""
    hints: Mapping[str, str] = field(default_factory=dict)
    """What to add to the message about certain illegal names."""
    used_when: Used = ()
    """A condition, or several that must all hold for the key to have an effect. Their grammar is in
    `verlite.config.rules.declared`.
    """
    unused: str = ""
    """Why the key never has an effect in this section."""
    note: str = ""
    """What to add to the note about a key without effect."""


def key(default: Any, help: str, **declared: Any) -> Any:
    """Declare a configuration key as a dataclass field; `declared` are fields of Facts.

    Lists and mappings as defaults are copied.
    """
    metadata = {"facts": Facts(help, **declared)}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: copy.copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def section(
    cls: Callable[..., Any], help: str, *, used_when: Used = (), note: str = "", **defaults: Any
) -> Any:
    """Declare a section of keys. `used_when` and `note`, as in Facts, apply to all of its keys
    except `enable`.

    Args:
        cls: dataclass of the section.
        help: what the section is about.
        defaults: values that replace the defaults of `cls`.
    """
    facts = Facts(help, used_when=used_when, note=note)
    return field(default_factory=lambda: cls(**defaults), metadata={"facts": facts})


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

    def legal_names(self) -> str:
        """Return the legal names in words."""
        switch = ["true", "false"] if "true/false" in self.type else []
        names = ", ".join([*switch, *self.facts.choices])
        own = self.facts.own
        return f"{names}, or your own package.module:{own}" if own else names


def table(root: Any) -> dict[str, Key]:
    """Return every key of a schema, given as an instance of its dataclass."""
    found: dict[str, Key] = {}
    _collect(root, "", (), found)
    return found


def get(config: Any, name: str) -> Any:
    """Return the value of a dotted key."""
    node: Any = config
    for part in name.split("."):
        node = node[part] if isinstance(node, dict) else getattr(node, part)
    return node


def find(name: str, known: Mapping[str, Key]) -> Key | None:
    """Return the key, or the free mapping that `name` is an entry of, or None."""
    if name in known:
        return known[name]
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        parent = known.get(".".join(parts[:end]))
        if parent:
            return parent if parent.free else None
    return None


def _collect(
    node: Any, prefix: str, inherited: tuple[Condition, ...], found: dict[str, Key]
) -> None:
    hints = typing.get_type_hints(type(node), include_extras=True)
    for declared in dataclasses.fields(node):
        name = prefix + declared.name
        value = getattr(node, declared.name)
        facts = declared.metadata["facts"]
        own = _conditions(facts, prefix)
        outer = () if declared.name == "enable" else inherited
        if dataclasses.is_dataclass(value):
            found[name] = Key(name, "section", None, facts, section=True)
            _collect(value, name + ".", outer + own, found)
            continue
        text = type_name(hints[declared.name])
        found[name] = Key(
            name,
            text,
            value,
            facts,
            conditions=outer + own,
            free="mapping" in text,
            any_type=typing.get_origin(hints[declared.name]) is Annotated,
        )


def _conditions(facts: Facts, prefix: str) -> tuple[Condition, ...]:
    """Return the conditions of a field, with a leading "." replaced by the section of its key. The
    note belongs to the last one."""
    used = (facts.used_when,) if isinstance(facts.used_when, str) else facts.used_when
    texts = [prefix + text[1:] if text.startswith(".") else text for text in used]
    return tuple(Condition(text, facts.note if text == texts[-1] else "") for text in texts)


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
