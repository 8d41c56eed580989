"""Names to functions: a literal table first, then "package.module:function" for a user's own."""

import difflib
import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lookup(name: str, table: Mapping[str, Callable[..., Any]], kind: str) -> Callable[..., Any]:
    """The function called `name`: a key of `table`, or "package.module:function" imported from the Python path.

    `kind` says in messages what was asked for ("advantage estimator"). ValueError: an unknown name (with the nearest known
    ones), a module that cannot be imported, a module without that function, or something that cannot be called.
    """
    if name in table:
        return table[name]
    module_name, _, function_name = name.partition(":")
    if not function_name:
        near = difflib.get_close_matches(name, table, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ValueError(
            f"unknown {kind} {name!r}: {hint}known: {', '.join(sorted(table))}; your own: package.module:function"
        )
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except ImportError as error:
        raise ValueError(
            f"{kind} {name!r}: cannot import {module_name}: {error}; it must be on the Python path of every worker"
        ) from error
    except AttributeError as error:
        raise ValueError(
            f"{kind} {name!r}: {module_name} has no function {function_name}"
        ) from error
    except Exception as error:  # a user's module may raise anything while it is loaded
        raise ValueError(
            f"{kind} {name!r}: {module_name} cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    if not callable(function):
        raise ValueError(f"{kind} {name!r} is a {type(function).__name__}, not a function")
    return function
