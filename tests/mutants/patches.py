"""Common ways to break a function. Each returns a patch: a function from the original to the broken
one."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

Patch = Callable[[Any], Any]


def argument(name: str, change: Callable[[Any], Any]) -> Patch:
    """Call the original with one argument changed."""

    def patch(original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def broken(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            bound.arguments[name] = change(bound.arguments[name])
            return original(*bound.args, **bound.kwargs)

        return broken

    return patch


def result(change: Callable[[Any], Any]) -> Patch:
    """Change what the original returns."""

    def patch(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def broken(*args: Any, **kwargs: Any) -> Any:
            return change(original(*args, **kwargs))

        return broken

    return patch


def returns(value: Any) -> Patch:
    """Return a constant and do nothing."""
    return lambda original: functools.wraps(original)(lambda *args, **kwargs: value)


def does_nothing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Skip the call. As a patch: `patch=does_nothing`."""
    return functools.wraps(original)(lambda *args, **kwargs: None)


def calls(broken: Callable[..., Any]) -> Patch:
    """Call `broken(original, *args, **kwargs)` in place of the original."""

    def patch(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:  # a partial would not get a method's self
            return broken(original, *args, **kwargs)

        return replaced

    return patch


def constant(value: Any) -> Patch:
    """Replace a module's constant."""
    return lambda original: value


def attribute(name: str, change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """For `argument`: a copy of a dataclass with one field changed."""
    import dataclasses

    return lambda value: dataclasses.replace(value, **{name: change(getattr(value, name))})
