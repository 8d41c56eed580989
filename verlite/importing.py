"""Find and import the user's own code by the path of its file or by the dotted name of its module.

Only the standard library is imported, because reward processes start with this file.
"""

import atexit
import contextlib
import gc
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

CODE_ERRORS = (Exception, SystemExit)
"""What a user's code may raise of itself. KeyboardInterrupt is not among them: it comes from Ctrl-C
or from a signal that stops the run. In workers let SignalExit pass, too."""


_IMPORTERS = (__file__, importlib.__file__)
"""Files whose lines say nothing about an error of the code that they import."""
VERL_VARIABLE = "VERLITE_VERL_COMPAT"
"""If this environment variable is 1, `verlite.compat` takes the place of a verl that is missing."""
VERL_HINT = (
    f"verl is not installed. For reward functions, data sets, samplers, tools and agent loops "
    f"verlite can take its place: set the environment variable {VERL_VARIABLE}=1 "
    "(docs/migration/verl.md)"
)


def is_function(words: Sequence[str]) -> bool:
    """Return whether the words of agent.command are one: FILE.py:NAME or package.module:NAME."""
    return len(words) == 1 and words[0].rpartition(":")[0] != ""


def import_ahead(*modules: str) -> None:
    """Import modules before they are needed.

    Errors are ignored: a broken import fails again where the module is needed.

    Garbage collection is off meanwhile, because imports create little garbage. For the driver's
    modules this saves 0.9 of 5.4 s of CPU time (minima of six alternating runs). Later collections
    leave out what exists now: 600,000 objects with torch and transformers, 0.3 s each time. In
    forks of this process they would copy the memory that is shared.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for module in modules:
            with contextlib.suppress(Exception):
                importlib.import_module(module)
        gc.freeze()
        atexit.register(gc.unfreeze)  # some libraries report what is left at the end as leaks
    finally:
        if was_enabled:
            gc.enable()


class SignalExit(SystemExit):
    """A signal ends this process. The code that runs at that moment has not failed."""


class OwnCodeError(ValueError):
    """The user's code cannot be used. The message names the file, the error and its line."""


def import_module(place: str) -> ModuleType:
    """Import FILE.py or a dotted name.

    Raises:
        OwnCodeError: it cannot be imported.
    """
    offer_verl()
    try:
        if place.endswith(".py"):
            return _load_file(Path(place))
        return importlib.import_module(place)
    except SignalExit:
        raise
    except CODE_ERRORS as error:
        remedy = ""
        if isinstance(error, ModuleNotFoundError) and not verl_hint(error):
            # Its own name or that of its package, not that of a module which it imports.
            if f"{place}.".startswith(f"{error.name}."):
                remedy = "; it must be on the Python path of every worker"
        raise OwnCodeError(f"{place} cannot be loaded: {text_of(error)}{remedy}") from error


def find(place: str, name: str) -> Any:
    """Return a function or class of a file or module.

    Raises:
        OwnCodeError: it cannot be imported, does not define the name, or it is something else.
    """
    module = import_module(place)
    if not hasattr(module, name):
        raise OwnCodeError(f"{place} has no function or class {name!r}")
    found = getattr(module, name)
    if not callable(found):
        what = type(found).__name__
        raise OwnCodeError(f"{place}:{name} is of type {what}, not a function or class")
    return found


def offer_verl() -> None:
    """Make `import verl` work without verl, if VERL_VARIABLE asks for it.

    Raises:
        OwnCodeError: the variable is neither 0 nor 1.
    """
    value = os.environ.get(VERL_VARIABLE, "")
    if value not in ("", "0", "1"):
        raise OwnCodeError(f"the environment variable {VERL_VARIABLE}={value!r} must be 1 or 0")
    if value == "1":
        importlib.import_module("verlite.compat").install()


def text_of(error: BaseException) -> str:
    """Return type and message of an error, and the line that raised it, if it is of a file that was
    imported."""
    lines = [
        f" ({line.filename}:{line.lineno})"
        for line in traceback.extract_tb(error.__traceback__)
        if not line.filename.startswith("<frozen") and line.filename not in _IMPORTERS
    ]
    return f"{type(error).__name__}: {error}{lines[-1] if lines else ''}{verl_hint(error)}"


def verl_hint(error: BaseException | None) -> str:
    """Return a sentence with the remedy if verl was not found, else ""."""
    name = error.name or "" if isinstance(error, ModuleNotFoundError) else ""
    missing = name.partition(".")[0] == "verl" and os.environ.get(VERL_VARIABLE) != "1"
    return f". {VERL_HINT}" if missing else ""


def _load_file(path: Path) -> ModuleType:
    # The folder goes last, so that files beside this one never shadow a library.
    sys.path.append(str(path.parent))
    # The module gets a prefix because a file may be called math.py. It is registered because
    # pickle and dataclasses look modules up by name.
    spec = importlib.util.spec_from_file_location(f"verlite_user_{path.stem}", path)
    assert spec is not None and spec.loader is not None  # true for every .py file
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


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
