"""Legal values of single keys, as their fields declare them."""

import difflib
import math
import operator
import re
from collections.abc import Callable, Iterator
from typing import Any

from verlite.config import keys
from verlite.config.problems import Problem

OWN_NAME = re.compile(r"[\w.]+:\w+")

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    ">": operator.gt,
    "<=": operator.le,
    "<": operator.lt,
}


def names(config: Any, table: dict[str, keys.Key] | None = None) -> Iterator[Problem]:
    """Report values that are not among the legal names of their key."""
    for key in (table or keys.keys()).values():
        if key.facts.choices:
            for item in _items(keys.get(config, key.name)):
                # A number may stand in place of a name; its bound is checked below.
                if isinstance(item, str) and not _is_legal(key, item):
                    yield _unknown_name(key, item)


def numbers(config: Any, table: dict[str, keys.Key] | None = None) -> Iterator[Problem]:
    """Report numbers out of the bounds of their key."""
    for key in (table or keys.keys()).values():
        if key.facts.bound:
            value = keys.get(config, key.name)
            for item in _items(value):
                if not isinstance(item, str) and not within(item, key.facts.bound):
                    yield Problem(key.name, value, f"must be {key.facts.bound}", key.facts.remedy)


def within(value: float, bound: str) -> bool:
    """Return whether a number satisfies a bound such as ">= 1 or -1" or "finite"."""
    if not math.isfinite(value):
        return False
    if bound == "finite":
        return True
    return any(
        all(_satisfies(value, part.split()) for part in alternative.split(" and "))
        for alternative in bound.split(" or ")
    )


def _satisfies(value: float, part: list[str]) -> bool:
    if len(part) == 1:
        return value == float(part[0])
    return _OPERATORS[part[0]](value, float(part[1]))


def _items(value: Any) -> list[Any]:
    items = value if isinstance(value, list) else [value]
    return [item for item in items if item is not None]


def _is_legal(key: keys.Key, item: str) -> bool:
    own = bool(key.facts.own) and OWN_NAME.fullmatch(item) is not None
    return item in key.facts.choices or own


def _unknown_name(key: keys.Key, item: str) -> Problem:
    facts = key.facts
    remedy = f"Legal: {legal_names(key)}."
    close = difflib.get_close_matches(item.lower(), facts.choices, n=1, cutoff=0.5)
    if close and item not in facts.hints:
        remedy = f"Did you mean {close[0]}? {remedy}"
    if item in facts.hints:
        remedy = f"{remedy} {facts.hints[item]}"
    return Problem(key.name, item, "is not a legal name", remedy)


def legal_names(key: keys.Key) -> str:
    """Return the legal names of a key in words."""
    names = ", ".join(key.facts.choices)
    return f"{names}, or your own package.module:{key.facts.own}" if key.facts.own else names
