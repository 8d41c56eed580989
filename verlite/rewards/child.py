"""The reward process: loads one function and calls it, away from the trainer, where it may hang, leak or crash.

Chunks of calls come in on stdin (length and pickle, written by our parent), events go out on stdout (a JSON object per
line, because what user code returns is not to be unpickled by the trainer). Only the standard library is imported here,
so that a process starts in tens of milliseconds; what the user's file prints goes to stderr.
"""

import asyncio
import ctypes
import importlib
import importlib.util
import inspect
import json
import os
import pickle
import signal
import struct
import sys
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

from verlite.rewards.result import RewardResult, failure, result_of

Call = tuple[int, dict[str, Any]]
"""Number of a call, and its keyword arguments."""


class FunctionError(ValueError):
    """The reward function cannot be loaded or cannot be called as it will be."""


def load(target: str, argument_names: list[str]) -> Callable[..., Any]:
    """The function `file.py:name` or `module:name`. Raises FunctionError, also when it does not take these keyword arguments."""
    place, _, name = target.rpartition(":")
    try:
        module = (
            _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        )
    except BaseException as error:  # a file may raise anything while it is loaded, also SystemExit
        line = traceback.extract_tb(error.__traceback__)[-1]
        raise FunctionError(
            f"{place} cannot be loaded: {type(error).__name__}: {error} ({line.filename}:{line.lineno})"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        functions = [
            key
            for key, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__
        ]
        raise FunctionError(
            f"{place} has no function {name!r}; its functions are {', '.join(functions) or 'none'}"
        )
    try:
        signature = inspect.signature(function)
        signature.bind(**dict.fromkeys(argument_names))
    except TypeError as error:
        wanted = ", ".join(argument_names)
        raise FunctionError(
            f"{place}: {name}{signature} cannot be called with {wanted}: {error}. Give it these parameters, or **kwargs"
        ) from error
    return function


def _load_file(path: Path) -> ModuleType:
    sys.path.append(str(path.parent))  # last, so that the file's neighbours never shadow a library
    # Under a name of its own, because a file may be called math.py; and named at all, because pickle and dataclasses look it up.
    spec = importlib.util.spec_from_file_location(f"verlite_user_{path.stem}", path)
    assert spec is not None and spec.loader is not None  # a .py file always has both
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Serve until stdin ends. Arguments: the function, the names of its arguments as JSON, seconds per call, the parent's process id."""
    target, names, limit, parent = (
        sys.argv[1],
        json.loads(sys.argv[2]),
        float(sys.argv[3]),
        int(sys.argv[4]),
    )
    _die_with(parent)
    calls, events = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)

    def tell(**event: Any) -> None:
        events.write(json.dumps(event) + "\n")

    try:
        function = load(target, names)
    except FunctionError as error:
        tell(failed=str(error))
        return
    tell(ready=True, concurrent=inspect.iscoroutinefunction(function))
    with (
        asyncio.Runner() as runner
    ):  # one event loop for the life of the process: clients that the user's file keeps stay usable
        while chunk := _read(calls):
            if inspect.iscoroutinefunction(function):
                runner.run(
                    _all(
                        [
                            _await(function(**arguments), number, limit, tell)
                            for number, arguments in chunk
                        ]
                    )
                )
            else:
                for (
                    number,
                    arguments,
                ) in chunk:  # outside the loop, because the function may run a loop of its own
                    tell(start=number)
                    try:
                        value = function(**arguments)
                        result = (
                            runner.run(_limited(value, limit))
                            if inspect.isawaitable(value)
                            else result_of(value)
                        )
                    except BaseException as error:  # whatever user code raises, SystemExit too, is this call's result and not our end
                        result = failure(error)
                    tell(done=number, **asdict(result))


async def _all(calls: list[Awaitable[None]]) -> None:
    await asyncio.gather(*calls)


async def _await(
    value: Awaitable[Any], number: int, limit: float, tell: Callable[..., None]
) -> None:
    tell(start=number)
    try:
        result = await _limited(value, limit)
    except BaseException as error:  # as above
        result = failure(error)
    tell(done=number, **asdict(result))


async def _limited(value: Awaitable[Any], limit: float) -> RewardResult:
    try:
        async with asyncio.timeout(limit) as clock:
            return result_of(await value)
    except TimeoutError as error:
        return (
            RewardResult(None, error="Timeout", traceback=f"no score within {limit:g} s")
            if clock.expired()
            else failure(error)
        )


def _read(calls: BinaryIO) -> list[Call] | None:
    header = calls.read(8)
    if len(header) < 8:
        return None
    return pickle.loads(calls.read(*struct.unpack("<Q", header)))


def _die_with(parent: int) -> None:
    """Let the kernel end this process with its parent, and choose it first when memory runs out (Linux)."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        sys.exit("the parent is gone")
    try:
        Path("/proc/self/oom_score_adj").write_text("1000")
    except OSError:
        pass  # some containers forbid it; it is a courtesy to the trainer, not a need
