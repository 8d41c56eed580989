"""Find the file of a user's own code without importing it."""

import importlib
import importlib.util
import sys
from pathlib import Path


def names_a_file(place: str) -> bool:
    """Return whether `place` is a file path rather than a module's dotted name."""
    return "/" in place or place.endswith(".py")


def module_path(place: str) -> Path | None:
    """Return the file of a path or of a dotted name, without importing it; None: unknown."""
    return Path(place) if names_a_file(place) else module_file(place)


def module_file(module: str) -> Path | None:
    """Return the file of a module without importing it, or None.

    Its parent packages are imported.
    """
    # An installed command does not search the working directory, but `python -m` does.
    added = [] if "" in sys.path else [""]
    sys.path += added
    importlib.invalidate_caches()
    try:
        spec = importlib.util.find_spec(module)
    except Exception:  # a parent package may raise anything while it is imported
        spec = None
    finally:
        for path in added:
            sys.path.remove(path)
    return Path(spec.origin) if spec and spec.origin else None
