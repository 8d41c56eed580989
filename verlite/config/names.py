"""Names that the rooms above define, read from their source text: this is the lowest room, and imports neither them nor torch."""

import ast
import functools
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import verlite

PACKAGE = Path(verlite.__file__).resolve().parent


@functools.cache
def _body(file: str) -> list[ast.stmt]:
    return ast.parse((PACKAGE / file).read_text(encoding="utf-8")).body


def _assigned(file: str, name: str) -> ast.expr:
    """What a file of the package, such as "algorithms/kl.py", assigns to a name at its top level."""
    for node in _body(file):
        target = (
            node.targets[0]
            if isinstance(node, ast.Assign)
            else node.target
            if isinstance(node, ast.AnnAssign)
            else None
        )
        if (
            isinstance(target, ast.Name)
            and target.id == name
            and isinstance(node, ast.Assign | ast.AnnAssign)
            and node.value
        ):
            return node.value
    raise KeyError(f"{file} assigns nothing to {name}")


def value(file: str, name: str) -> Any:
    """A literal, or a frozenset of one."""
    node = _assigned(file, name)
    return ast.literal_eval(node.args[0] if isinstance(node, ast.Call) else node)


@functools.cache
def functions(file: str, table: str) -> Mapping[str, str]:
    """A literal dict from names to functions of the same file, as names to functions' names."""
    node = _assigned(file, table)
    assert isinstance(node, ast.Dict)
    entries = zip(node.keys, node.values, strict=True)
    return {
        str(ast.literal_eval(key)): entry.id
        for key, entry in entries
        if key and isinstance(entry, ast.Name)
    }


def names_a_file(place: str) -> bool:
    """Whether the place of a function is a file, and not a module's dotted name."""
    return "/" in place or place.endswith(".py")


def module_file(module: str) -> Path | None:
    """The file of a module, found without importing it (only its parent packages are). None: there is none."""
    here = (
        [] if "" in sys.path else [""]
    )  # an installed command lacks the working folder, which `python -m` has
    sys.path += here
    importlib.invalidate_caches()
    try:
        spec = importlib.util.find_spec(module)
    except Exception:  # a parent package may raise anything while it is imported
        spec = None
    finally:
        for name in here:
            sys.path.remove(name)
    return Path(spec.origin) if spec and spec.origin else None


def readers(file: str, table: str, attribute: str) -> list[str]:
    """Names in such a table whose functions read `inputs.<attribute>`, themselves or in functions of the file that they call."""
    return [
        name
        for name, function in functions(file, table).items()
        if attribute in _attributes(file, function)
    ]


@functools.cache
def _attributes(file: str, function: str) -> frozenset[str]:
    defined = {node.name: node for node in _body(file) if isinstance(node, ast.FunctionDef)}
    found: set[str] = set()
    waiting, seen = [function], set()
    while waiting:
        one = waiting.pop()
        if one in defined and one not in seen:
            seen.add(one)
            nodes = list(ast.walk(defined[one]))
            found.update(node.attr for node in nodes if isinstance(node, ast.Attribute))
            waiting += [node.id for node in nodes if isinstance(node, ast.Name)]
    return frozenset(found)
