"""The schema's keys as a flat table, read from the dataclasses and from the docstrings under their fields."""

import ast
import dataclasses
import functools
import inspect
import sys
import types
import typing
from dataclasses import dataclass
from typing import Annotated, Any

from verlite.config import schema


@dataclass(frozen=True)
class Key:
    """One dotted key. `section`: it only holds other keys. `free`: a mapping whose entries are not known beforehand. `any_type`: no
    type that OmegaConf checks."""

    name: str
    type: str
    default: Any
    doc: str
    section: bool = False
    free: bool = False
    any_type: bool = False


@functools.cache
def keys() -> dict[str, Key]:
    """Every key of the schema, sections included, in the order of the schema."""
    return table(schema.Config())


def table(root: Any) -> dict[str, Key]:
    """Every key of a schema, given as an instance of its dataclass."""
    found: dict[str, Key] = {}
    _collect(root, "", found)
    return found


def leaves() -> list[str]:
    """Names of all keys that hold a value."""
    return [name for name, key in keys().items() if not key.section]


def find(name: str, schema_keys: dict[str, Key] | None = None) -> Key | None:
    """The schema's key, or the free mapping that `name` lies in, or None. Another schema's with its `table`."""
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
    """As `find`, where the key is known to exist; KeyError otherwise."""
    key = find(name)
    if key is None:
        raise KeyError(name)
    return key


def is_plain(name: str) -> bool:
    """A key of the schema itself: its name is no secret's, and neither is its value. Entries of free mappings may be."""
    return name in keys()


def _collect(node: Any, prefix: str, found: dict[str, Key]) -> None:
    hints = typing.get_type_hints(type(node), include_extras=True)
    docs = _docs(type(node))
    for field in dataclasses.fields(node):
        name, value = prefix + field.name, getattr(node, field.name)
        if dataclasses.is_dataclass(value):
            found[name] = Key(name, "section", None, docs.get(field.name, ""), section=True)
            _collect(value, name + ".", found)
        else:
            text = type_name(hints[field.name])
            any_type = typing.get_origin(hints[field.name]) is Annotated
            found[name] = Key(
                name,
                text,
                value,
                docs.get(field.name, ""),
                free="mapping" in text,
                any_type=any_type,
            )


def type_name(hint: Any) -> str:
    """A type in words: "whole number or null". A type that OmegaConf has no way to write is Any, annotated with the words."""
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


def _docs(cls: type) -> dict[str, str]:
    """Docstrings under the fields of a dataclass and of its bases."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            docs |= _module_docs(base.__module__).get(base.__name__, {})
    return docs


@functools.cache
def _module_docs(module: str) -> dict[str, dict[str, str]]:
    result: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(sys.modules[module])).body:
        if isinstance(node, ast.ClassDef):
            result[node.name] = {
                field.target.id: doc.value.value
                for field, doc in zip(node.body, node.body[1:], strict=False)
                if isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(doc, ast.Expr)
                and isinstance(doc.value, ast.Constant)
                and isinstance(doc.value.value, str)
            }
    return result
