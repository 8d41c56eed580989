"""Three ways to call a method on all ranks of a role, and the arithmetic of rows behind the first.

split: the first argument is a DataProto whose rows are divided over the ranks; the other arguments go to all.
all: every rank gets the same arguments.
rank_zero: only rank 0 is called.

What a split method returns in the columns that it `keep_remote` stays with its worker; the driver gets references (controller.columns).
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar, overload

import numpy as np

if TYPE_CHECKING:  # a worker that handles no batches starts without torch
    from verlite.protocol.data import DataProto

P = ParamSpec("P")
T = TypeVar("T")
W = TypeVar("W")

Dispatch = Literal["split", "all", "rank_zero"]


class _Split(Protocol):
    @overload
    def __call__(
        self, method: Callable[Concatenate[W, P], "DataProto"]
    ) -> Callable[Concatenate[W, P], "DataProto"]: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(
        self, method: Callable[Concatenate[W, P], T]
    ) -> Callable[Concatenate[W, P], list[T]]: ...


class _All(Protocol):
    def __call__(
        self, method: Callable[Concatenate[W, P], T]
    ) -> Callable[Concatenate[W, P], list[T]]: ...


class _RankZero(Protocol):
    def __call__(
        self, method: Callable[Concatenate[W, P], T]
    ) -> Callable[Concatenate[W, P], T]: ...


@overload
def register(
    dispatch: Literal["split"], keep_remote: Sequence[str] = (), fetch: bool = True
) -> _Split: ...
@overload
def register(dispatch: Literal["all"]) -> _All: ...
@overload
def register(dispatch: Literal["rank_zero"]) -> _RankZero: ...
def register(dispatch: Dispatch, keep_remote: Sequence[str] = (), fetch: bool = True) -> Any:
    """Mark a worker method as callable from the driver. Its static type becomes what the driver gets.

    split: rows go by data.meta_info["assignment"] (one list of row numbers per rank, each row in exactly one list, lists may be
    empty), else in near-equal consecutive pieces. A rank without rows is called too, with a batch of 0 rows. DataProto results are
    joined in the caller's row order (a result may hold k rows for each row it was given); other results come as a list by rank. Every
    reference in the batch becomes its value before the method runs, unless `fetch` is False: then the method gets the references and
    calls `columns.fetch(batch, names)` for the columns it needs. Object columns of the result named in `keep_remote` become references.
    all: a list of results by rank. rank_zero: rank 0's result.
    """

    def mark(method: Callable[..., Any]) -> Callable[..., Any]:
        method.__dispatch__ = dispatch  # type: ignore[attr-defined]
        method.__keep_remote__ = keep_remote  # type: ignore[attr-defined]
        method.__fetch__ = fetch  # type: ignore[attr-defined]
        return method

    return mark


def dispatch_of(worker_class: type, method: str) -> Dispatch:
    """How a method was registered. Raises AttributeError that says which methods can be called."""
    dispatch = getattr(getattr(worker_class, method, None), "__dispatch__", None)
    if dispatch is None:
        known = sorted(
            name
            for name in dir(worker_class)
            if hasattr(getattr(worker_class, name), "__dispatch__")
        )
        raise AttributeError(
            f"{worker_class.__name__}.{method} cannot be called from the driver; registered methods: {', '.join(known)}"
        )
    return dispatch


def assigned_rows(data: "DataProto", ranks: int) -> list[np.ndarray] | None:
    """The checked meta_info["assignment"], or None when there is none."""
    given: Sequence[Sequence[int]] | None = data.meta_info.get("assignment")
    if given is None:
        return None
    rows = [np.asarray(part, dtype=np.int64).reshape(-1) for part in given]
    if len(rows) != ranks:
        raise ValueError(f"meta_info['assignment'] has {len(rows)} lists of rows for {ranks} ranks")
    if not np.array_equal(np.sort(np.concatenate(rows)), np.arange(len(data))):
        raise ValueError(
            f"meta_info['assignment'] must hold each of the {len(data)} rows exactly once"
        )
    return rows


def split_rows(data: "DataProto", ranks: int) -> list["DataProto"]:
    """One piece per rank; pieces may differ in size and may be empty. The assignment itself does not travel."""
    from verlite.protocol.data import near_equal_bounds

    rows = assigned_rows(data, ranks)
    if rows is None:
        return [data[start:stop] for start, stop in near_equal_bounds(len(data), ranks)]
    data = data.select(meta_info_keys=[name for name in data.meta_info if name != "assignment"])
    return [data.select_idxs(part) for part in rows]


def join_rows(results: list[Any], data: "DataProto") -> Any:
    """What the driver gets from a split call: one DataProto in the order of data's rows, or the list of results by rank."""
    from verlite.protocol.data import DataProto, near_equal_bounds

    if not all(isinstance(result, DataProto) for result in results):
        return results
    rows = assigned_rows(data, len(results))
    sizes = (
        [stop - start for start, stop in near_equal_bounds(len(data), len(results))]
        if rows is None
        else [len(part) for part in rows]
    )
    given = [(size, len(result)) for size, result in zip(sizes, results, strict=True)]
    factors = {out / size for size, out in given if size}
    if (
        len(factors) > 1
        or any(factor % 1 for factor in factors)
        or any(out for size, out in given if not size)
    ):
        sizes, returned = [size for size, _ in given], [out for _, out in given]
        raise ValueError(
            f"ranks were given {sizes} rows and returned {returned}: not one whole multiple for all"
        )
    joined = DataProto.concat(results)
    if rows is None or not factors:
        return joined
    k = int(factors.pop())
    position = np.empty(len(data), dtype=np.int64)
    position[np.concatenate(rows)] = np.arange(len(data))
    return joined.select_idxs((position[:, None] * k + np.arange(k)).reshape(-1))
