"""Bugs to plant, each with the test that must see it. `python -m tests.mutants` (make mutants) plants them one by one.

Each room's module has MUTANTS, a list of (name, file, old text, new text, test). Modules with an underscore are the harness.
"""

import hashlib
import importlib
import pkgutil

Mutant = tuple[str, str, str, str, str]
"""name, file, old text (once in the file), new text, test (one or more pytest nodes)"""


def rooms() -> list[str]:
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))


def mutants(room: str) -> list[Mutant]:
    return importlib.import_module(f"tests.mutants.{room}").MUTANTS


def mark(mutant: Mutant) -> str:
    """A short text that changes with anything in the mutant, so that an old result cannot pass for a new bug's."""
    return hashlib.sha256("\0".join(mutant).encode()).hexdigest()[:6]
