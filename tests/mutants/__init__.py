"""Mutation testing: known bugs, each planted by patching one function, and the tests that must fail
with it.

A mutant names a function and says how its behavior changes. It quotes no source text, so a
refactoring that keeps the function and its behavior keeps the mutant too. `python -m tests.mutants`
plants all of them, one at a time.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

PACKAGES = (
    "algorithms",
    "http",
    "protocol",
    "weights",
    "control",
    "config",
    "data",
    "rewards",
    "envs",
    "compat",
    "services",
    "engine",
    "rollout",
    "gateway",
    "controller",
    "workers",
    "trainer",
    "sizing",
    "convert",
    "launch",
    "sft",
    "report",
    "api",
    "gpu_dry",
)
"""Each is a file of this package with a list MUTANTS, about the package of verlite with the same
name."""


@dataclass(frozen=True)
class Mutant:
    """One bug. `bug`: what goes wrong, in words. `target`: "module:function", "module:Class.method"
    or "module:CONSTANT".

    patch: takes the original object and returns the broken one. tests: pytest node ids, at least
    one of which must fail.
    """

    bug: str
    target: str
    patch: Callable[[Any], Any]
    tests: tuple[str, ...]


def mutants(package: str) -> list[Mutant]:
    """The mutants of one package."""
    found: list[Mutant] = importlib.import_module(f"tests.mutants.{package}").MUTANTS
    return found


def find(name: str) -> Mutant:
    """The mutant called "package/bug"."""
    package, _, bug = name.partition("/")
    return next(mutant for mutant in mutants(package) if mutant.bug == bug)


def owner_and_name(module: Any, path: str) -> tuple[Any, str]:
    """The object that holds the attribute (a module or a class) and the attribute's name.

    Raises AttributeError when there is no such attribute.
    """
    *parents, name = path.split(".")
    owner = module
    for parent in parents:
        owner = getattr(owner, parent)
    getattr(owner, name)
    return owner, name
