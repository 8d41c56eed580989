"""Helpers of verl.utils: loading of code, event loop, tokenizer. Tracing does nothing."""

import asyncio
import functools
import os
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
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


def normalize_token_ids(tokenized_output: Any) -> list[int]:
    """Return the token ids of one text: from a tokenizer's output, a list, an array or a tensor.

    Raises:
        TypeError: they are those of several texts, or no token ids.
    """
    ids = tokenized_output
    if isinstance(ids, Mapping) or hasattr(ids, "input_ids"):
        ids = ids["input_ids"]
    ids = ids.tolist() if hasattr(ids, "tolist") else ids
    if len(ids) == 1 and isinstance(ids[0], list | tuple):
        ids = ids[0]
    if isinstance(ids, str) or not all(isinstance(token, int) for token in ids):
        raise TypeError(f"{tokenized_output!r:.100} is not the token ids of one text")
    return list(ids)


def hf_processor(name_or_path: str, **kwargs: Any) -> None:
    """Return None: models for text have no processor."""


def copy_to_local(src: str, *args: Any, **kwargs: Any) -> str:
    """Return the path of a local file or folder. Raises ValueError for hdfs://."""
    if "://" in src:
        raise ValueError(f"{src} is not a local path: copy it to this machine first")
    return os.path.expanduser(src)


def exists(path: str, **kwargs: Any) -> bool:
    """Return whether a local path exists. Raises ValueError for hdfs://."""
    return os.path.exists(copy_to_local(path))


def makedirs(name: str, mode: int = 0o777, exist_ok: bool = False, **kwargs: Any) -> None:
    """Create a local folder and those above it. Raises ValueError for hdfs://."""
    os.makedirs(copy_to_local(name), mode, exist_ok)


def copy(src: str, dst: str, **kwargs: Any) -> str:
    """Copy a local file or folder, and return the copy's path. Raises ValueError for hdfs://."""
    src, dst = copy_to_local(src), copy_to_local(dst)
    do: Callable[..., str] = shutil.copytree if os.path.isdir(src) else shutil.copy
    return do(src, dst, **kwargs)


def append_to_dict(data: dict[str, Any], new_data: Mapping[str, Any], prefix: str = "") -> None:
    """Append each value to the list of its name in `data`; a list extends it.

    Names get the prefix if they do not begin with it.
    """
    for name, value in new_data.items():
        full = name if name.startswith(prefix) else prefix + name
        data.setdefault(full, []).extend(value if isinstance(value, list) else [value])


def union_two_dict(dict1: dict[str, Any], dict2: Mapping[str, Any]) -> dict[str, Any]:
    """Add the entries of `dict2` to `dict1`. Raises ValueError if a name has another value."""
    for name, value in dict2.items():
        if name in dict1 and dict1[name] != value:
            raise ValueError(f"{name!r} is {dict1[name]!r:.100} and {value!r:.100}")
    dict1.update(dict2)
    return dict1


def list_of_dict_to_dict_of_list(list_of_dict: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return {name: its value in each dict}. Raises KeyError if a dict lacks a name."""
    return {name: [each[name] for each in list_of_dict] for name in (list_of_dict or [{}])[0]}


def convert_to_regular_types(obj: Any) -> Any:
    """Return omegaconf's containers and tuples as dicts and lists, at any depth."""
    from omegaconf import DictConfig, ListConfig

    if isinstance(obj, dict | DictConfig):
        return {name: convert_to_regular_types(value) for name, value in obj.items()}
    if isinstance(obj, list | tuple | ListConfig):
        return [convert_to_regular_types(value) for value in obj]
    return obj
