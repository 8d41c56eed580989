"""The program of a reward process: load one function and call it in isolation.

A reward function may hang, leak memory or crash, so it never runs in the trainer's process.
`verlite.rewards.pool` starts this program, and `verlite.keeper` divides it into two
processes. Calls arrive on stdin as length-prefixed pickles, which
only the parent writes. Results leave on stdout as one JSON object per line, because the trainer
must not unpickle what user code returns. Output of the user's file goes to stderr. Only the
standard library is imported, so a process starts in tens of milliseconds.
"""

import asyncio
import importlib
import inspect
import json
import os
import pickle
import struct
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, BinaryIO

from verlite import keeper
from verlite.importing import OwnCodeError, import_module
from verlite.rewards.result import BadReturn, RewardItem, RewardResult, failure, result_of

Call = tuple[int, dict[str, Any]]
"""Number of a call and its keyword arguments."""
_ITEM = RewardItem("", "", None)
BATCH_NAMES = {name: f"{name}s" for name in _ITEM.arguments() if name != "extra_info"} | {
    "extra_info": "extra_infos"
}
"""verl's argument -> the list of it that functions for its batch reward manager take."""


class FunctionError(ValueError):
    """A reward function cannot be loaded, or does not accept its arguments."""


def load(target: str, argument_names: list[str]) -> Callable[..., Any]:
    """Import `file.py:name` or `package.module:name` and check that it accepts these arguments.

    A function that `takes_lists` must accept OpenRLHF's arguments in place of verl's. One that
    names `solution_strs`, for verl's batch reward manager, is called with lists of one entry.

    Raises:
        FunctionError: the file or module cannot be imported, has no such function, or the function
            does not accept these keyword arguments.
    """
    place, _, name = target.rpartition(":")
    try:
        module = import_module(place)
    except OwnCodeError as error:
        raise FunctionError(str(error)) from error
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
    if inspect.isclass(function):  # a reward manager written for verl
        function = importlib.import_module("verlite.compat.managers").score_with(function)
    signature = inspect.signature(function)
    is_batch = "solution_strs" in signature.parameters
    if is_batch:
        argument_names = [BATCH_NAMES.get(name, name) for name in argument_names]
    elif takes_lists(function):
        extra = [key for key in argument_names if key not in _ITEM.arguments()]
        argument_names = [*_ITEM.list_arguments(), *extra]
    try:
        signature.bind(**dict.fromkeys(argument_names))
    except TypeError as error:
        raise FunctionError(
            f"{place}: {name}{signature} cannot be called with {', '.join(argument_names)}: "
            f"{error}. Give it these parameters, or **kwargs{_of_trl(signature)}"
        ) from error
    checked: Callable[..., Any] = _of_batch(function) if is_batch else function
    return checked


def _of_batch(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return verl's batch function as a function of one response."""

    def lists(arguments: dict[str, Any]) -> dict[str, Any]:
        return {
            BATCH_NAMES.get(name, name): [value] if name in BATCH_NAMES else value
            for name, value in arguments.items()
        }

    def one(scores: Any) -> Any:
        if len(scores) != 1:
            raise BadReturn(f"returned {len(scores)} scores for 1 response")
        return scores[0]

    if inspect.iscoroutinefunction(function):

        async def wait(**arguments: Any) -> Any:
            return one(await function(**lists(arguments)))

        return wait
    return lambda **arguments: one(function(**lists(arguments)))


def _of_trl(signature: inspect.Signature) -> str:
    """Return a pointer for a function that takes TRL's `completions`; "" for others."""
    if "completions" not in signature.parameters:
        return ""
    return (
        ". TRL's reward functions score a list of completions, these one response: "
        "docs/migration/trl.md shows both"
    )


def takes_lists(function: Callable[..., Any]) -> bool:
    """Return whether a function is OpenRLHF's reward_func(queries, prompts, labels).

    It is if it names the parameter `queries` and not verl's `solution_str`.
    """
    names = inspect.signature(function).parameters
    return "queries" in names and "solution_str" not in names


def main() -> None:
    """Serve calls until stdin ends.

    Command line: the function, the names of its arguments as JSON, seconds per call, the process
    id of the parent, and the limit of memory in bytes.
    """
    target = sys.argv[1]
    argument_names = json.loads(sys.argv[2])
    limit_s = float(sys.argv[3])
    memory_bytes = int(sys.argv[5])
    keeper.split(int(sys.argv[4]), memory_bytes)
    own_id = os.getpid()
    calls = os.fdopen(os.dup(0), "rb")
    events = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)

    def report(**event: Any) -> None:
        if os.getpid() != own_id:  # user code called fork, and its child came back here
            os._exit(1)
        line = json.dumps(event).encode() + b"\n"
        while line:
            line = line[os.write(events, line) :]

    def report_result(number: int, result: RewardResult) -> None:
        if result.error == "MemoryError":
            size = f"{memory_bytes / (1 << 30):.1f} GiB (reward.process_memory_gb)"
            result = replace(result, traceback=f"{result.traceback}The limit was {size}")
        report(done=number, **vars(result))

    try:
        function = load(target, argument_names)
    except FunctionError as error:
        report(failed=str(error))
        return
    concurrent = inspect.iscoroutinefunction(function)
    report(ready=True, concurrent=concurrent, takes_lists=takes_lists(function))

    async def score_together(batch: list[Call]) -> None:
        await asyncio.gather(*(score_one(number, arguments) for number, arguments in batch))

    async def score_one(number: int, arguments: dict[str, Any]) -> None:
        report_result(number, await _await(function(**arguments), limit_s))

    # One event loop serves all calls, so clients that the user's file keeps stay usable.
    with asyncio.Runner() as runner:
        while batch := _read(calls):
            if concurrent:
                runner.run(score_together(batch))
                continue
            for number, arguments in batch:
                # Called outside the event loop, because the function may run its own.
                try:
                    value = function(**arguments)
                    if inspect.isawaitable(value):
                        result = runner.run(_await(value, limit_s))
                    else:
                        result = result_of(value)
                except BaseException as error:  # SystemExit too fails this call only
                    result = failure(error)
                report_result(number, result)


async def _await(value: Awaitable[Any], limit_s: float) -> RewardResult:
    """Wait for an asynchronous function's value, at most `limit_s` seconds. Never raises."""
    try:
        async with asyncio.timeout(limit_s) as timeout:
            return result_of(await value)
    except TimeoutError as error:
        if timeout.expired():
            return RewardResult(None, error="Timeout", traceback=f"no score within {limit_s:g} s")
        return failure(error)
    except BaseException as error:  # SystemExit too fails this call only
        return failure(error)


def _read(calls: BinaryIO) -> list[Call] | None:
    header = calls.read(8)
    if len(header) < 8:
        return None
    (length,) = struct.unpack("<Q", header)
    batch: list[Call] = pickle.loads(calls.read(length))
    return batch
