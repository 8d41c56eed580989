"""Helpers of verl.utils: loading of code, event loop, tokenizer. Tracing does nothing."""

import asyncio
import functools
import os
import warnings
from collections.abc import Callable
from typing import Any

from verlite.importing import find


def rollout_trace_op(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function unchanged: tool calls are recorded in the samples of the run."""
    return function


def deprecated(replacement: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that warns at each call."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            warnings.warn(f"{function.__name__}: use {replacement}", stacklevel=2)
            return function(*args, **kwargs)

        return call

    return decorate


def load_extern_object(module_path: str, object_name: str) -> Any:
    """Import a function or class of a file, pkg://module or module. Raises OwnCodeError."""
    place = module_path.removeprefix("pkg://").removeprefix("file://")
    return find(place, object_name)


load_extern_type = load_extern_object


def get_event_loop() -> asyncio.AbstractEventLoop:
    """Return the current event loop, a new one if this thread has none."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        return loop


def hf_tokenizer(name_or_path: str, **kwargs: Any) -> Any:
    """Return a tokenizer with a padding token."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name_or_path, **kwargs)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def hf_processor(name_or_path: str, **kwargs: Any) -> None:
    """Return None: models for text have no processor."""


def copy_to_local(src: str, *args: Any, **kwargs: Any) -> str:
    """Return the path of a local file or folder. Raises ValueError for hdfs://."""
    if "://" in src:
        raise ValueError(f"{src} is not a local path: copy it to this machine first")
    return os.path.expanduser(src)
