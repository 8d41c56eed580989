"""Modules of verlite do not import each other in cycles; one file uses Ray's private modules.

Imports inside functions and under TYPE_CHECKING count, too.
"""

import ast
import importlib
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import verlite

ROOT = Path(verlite.__file__).parent
RAY_INTERNALS = "verlite.controller.ray_internals"


def module_name(path: Path) -> str:
    """The dotted name of a module's file."""
    parts = [ROOT.name, *path.relative_to(ROOT).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def imported_names(module: str, source: str) -> set[str]:
    """Dotted names in all import statements: `from a import b` counts as a.b."""
    is_package = MODULES.get(module, Path()).name == "__init__.py"
    package = module.split(".") if is_package else module.split(".")[:-1]
    names = set()
    for statement in ast.walk(ast.parse(source)):
        if isinstance(statement, ast.Import):
            names |= {alias.name for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom):
            parents = package[: len(package) - statement.level + 1] if statement.level else []
            base = ".".join([*parents, *([statement.module] if statement.module else [])])
            names |= {f"{base}.{alias.name}" for alias in statement.names}
    return names


def imported_modules(module: str, source: str, modules: set[str]) -> set[str]:
    """The modules of the package that a module imports.

    A name that is not a module counts for its parent.
    """
    found = set()
    for name in imported_names(module, source):
        target = name if name in modules else name.rpartition(".")[0]
        if target in modules and target != module:
            found.add(target)
    return found


def cycle(sources: dict[str, str]) -> list[str] | None:
    """One cycle among modules, or None."""
    modules = set(sources)
    graph = {name: imported_modules(name, source, modules) for name, source in sources.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return None


def test_modules_do_not_import_each_other_in_cycles():
    found = cycle({name: path.read_text() for name, path in MODULES.items()})
    assert found is None, " <- ".join(found)


@pytest.mark.parametrize(
    "back",
    [
        "from verlite import a",
        "import verlite.a",
        "from verlite.a import x",
        "def f():\n    from . import a",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from verlite.a import A",
    ],
)
def test_cycle_is_found_in_any_kind_of_import(back):
    sources = {"verlite.a": "from verlite.b import y", "verlite.b": back, "verlite.c": ""}
    assert set(cycle(sources)) == {"verlite.a", "verlite.b"}
    assert cycle(sources | {"verlite.b": "from verlite.c import z"}) is None


def test_private_modules_of_ray_are_used_in_one_file():
    private = ("ray._private", "ray._raylet")
    users = [
        name
        for name, path in MODULES.items()
        if any(imported.startswith(private) for imported in imported_names(name, path.read_text()))
    ]
    assert users == [RAY_INTERNALS]


def test_scripts_import_only_what_exists():
    """Also inside functions, which no test of the script may call. `make benchmark` puts an
    environment into a folder named build."""
    checked = 0
    scripts = [
        path
        for path in ROOT.parent.glob("recipes/**/*.py")
        if "build" not in path.relative_to(ROOT.parent).parts
    ]
    for path in [*scripts, *ROOT.parent.glob("data_preprocess/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(
                "verlite"
            ):
                continue
            module = importlib.import_module(node.module)
            for alias in node.names:
                is_module = f"{node.module}.{alias.name}" in MODULES
                assert is_module or hasattr(module, alias.name), f"{path}: {alias.name}"
                checked += 1
    assert checked > 50
