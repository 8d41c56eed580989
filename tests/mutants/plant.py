"""Plant a mutant in this process and in every Python process that it starts, and run tests with it.

The variable VERLITE_MUTANT names the mutant. `tests/mutants/site` is on PYTHONPATH, so Python
imports its sitecustomize at every start; that installs an import hook which patches the target as
soon as its module has been executed.
"""

import atexit
import functools
import importlib.abc
import importlib.util
import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil

from tests.mutants import Mutant, find, owner_and_name

TOP = Path(__file__).parents[2]
VARIABLE = "VERLITE_MUTANT"
MARK = "VERLITE_MUTANT_RUN"
LIMIT_S = 600.0
# Most tests take longer to import these than to run: one process imports them, and every test run
# is a fork of it.
PRELOAD = [
    "torch",
    "transformers",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.llama.modeling_llama",
    "transformers.generation.utils",
    "tensordict",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "hydra",
    "pyarrow.parquet",
    "rich.table",
    "pytest",
]


class _PatchingFinder(importlib.abc.MetaPathFinder):
    """Patches the mutant's target right after its module is executed, before anyone can import the
    original from it."""

    def __init__(self, mutant: Mutant) -> None:
        self.module, _, self.path = mutant.target.partition(":")
        self.patch = mutant.patch

    def find_spec(
        self, name: str, path: Any, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self.module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            owner, attribute = owner_and_name(module, self.path)
            original = owner.__dict__[attribute]
            setattr(owner, attribute, _patched(original, self.patch))

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _patched(original: Any, patch: Any) -> Any:
    """The patched object, of the same kind: function, static or class method, property."""
    if isinstance(original, staticmethod | classmethod):
        return type(original)(patch(original.__func__))
    if isinstance(original, property):
        return property(patch(original.fget))
    if isinstance(original, functools.cached_property):
        replacement = functools.cached_property(patch(original.func))
        replacement.__set_name__(None, original.attrname)  # type: ignore[arg-type]
        return replacement
    return patch(original)


def install() -> None:
    """Install the hook for the mutant that VERLITE_MUTANT names."""
    sys.meta_path.insert(0, _PatchingFinder(find(os.environ[VARIABLE])))


def run_pytest(
    tests: Sequence[str], mutant: str | None, log: Path, limit_s: float = LIMIT_S
) -> int | None:
    """Run tests in a new process, with a mutant ("package/bug") or without.

    Returns pytest's exit code, or None if it ran out of time.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    process = context.Process(target=_pytest, args=(list(tests), mutant, log))
    process.start()
    process.join(limit_s)
    code = process.exitcode
    if code is None and process.pid is not None:
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
    _kill_leftovers(str(log))
    return code


def _kill_leftovers(mark: str) -> None:
    """Some mutants leave processes behind. They are recognized by a variable in their
    environment."""
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                process.kill()
        except psutil.Error:
            continue


def _pytest(tests: list[str], mutant: str | None, log: Path) -> None:
    os.setsid()
    # Background jobs of a shell ignore Ctrl-C, and tests that send it would hang.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(TOP)
    sys.path[:] = [str(TOP), *(path for path in sys.path if path not in ("", str(TOP)))]
    paths = [str(Path(__file__).with_name("site")), str(TOP)]
    os.environ.update(
        PYTHONPATH=os.pathsep.join(paths), PYTHONDONTWRITEBYTECODE="1", **{MARK: str(log)}
    )
    sys.dont_write_bytecode = True
    if mutant is not None:
        os.environ[VARIABLE] = mutant
        install()
    import pytest

    # A child process of a test imports its parent's main module again. That must not be this
    # program.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = sys.modules["pytest"]
    code = int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "--timeout", "120", *tests]))
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)
