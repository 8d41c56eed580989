"""What joining batches requires of their columns and entries, and how two values are compared."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

METRICS = "metrics"
"""The entry of meta_info that `concat` merges."""


def joined_meta(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the entries of all parts. `metrics` becomes {name: values of the parts, in order}.

    The `metrics` of a part are one mapping of numbers or a list of them.

    Raises:
        ValueError: another entry has different values.
    """
    meta: dict[str, Any] = {}
    metrics: dict[str, list[Any]] = {}
    for part in parts:
        for name, value in part.items():
            if name == METRICS:
                for one in value if isinstance(value, list) else [value or {}]:
                    for metric, number in one.items():
                        metrics.setdefault(metric, []).append(number)
                continue
            if name in meta and not equal(meta[name], value):
                raise ValueError(
                    f"concat: meta_info[{name!r}] differs between parts: {meta[name]!r} and "
                    f"{value!r}"
                )
            meta[name] = value
    return meta | {METRICS: metrics} if metrics else meta


def require_same_columns(parts: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError if the parts have different columns."""
    for part in parts[1:]:
        different = set(part) ^ set(parts[0])
        if different:
            raise ValueError(f"concat: columns {sorted(different)} are missing in some parts")


def require_same_rows(name: str, parts: Sequence[torch.Tensor]) -> None:
    """Raise ValueError if the rows of a column have different shapes or dtypes."""
    shapes = {tuple(part.shape[1:]) for part in parts}
    if len(shapes) > 1:
        raise ValueError(
            f"concat: column {name!r} has row shapes {sorted(shapes)} in different parts; pad them "
            "to one shape"
        )
    dtypes = {str(part.dtype) for part in parts}
    if len(dtypes) > 1:
        raise ValueError(f"concat: column {name!r} has dtypes {sorted(dtypes)}")


def merged(kind: str, mine: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return both, or raise ValueError if a name has different values."""
    for name in mine.keys() & other.keys():
        if not equal(mine[name], other[name]):
            raise ValueError(
                f"union: {kind}[{name!r}] differs between the two; rename or drop one of them"
            )
    return {**mine, **other}


def equal(a: Any, b: Any) -> bool:
    """Compare deeply; NaN equals NaN."""
    if a is b:
        return True
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        b = b.to(a.device)
        return torch.equal(a, b) or (
            a.is_floating_point() and bool(((a == b) | (a.isnan() & b.isnan())).all())
        )
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.shape == b.shape and all(
            equal(x, y) for x, y in zip(a.ravel().tolist(), b.ravel().tolist(), strict=True)
        )
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(equal(a[name], b[name]) for name in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return (
            type(a) is type(b)
            and len(a) == len(b)
            and all(equal(x, y) for x, y in zip(a, b, strict=True))
        )
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (a != a and b != b)
    return type(a) is type(b) and bool(a == b)
