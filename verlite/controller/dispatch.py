"""How a method of a role's workers is called, and how rows are split over ranks and joined again.

split: the rows of the first argument, a DataProto, are split over the ranks; the other arguments
    go to all ranks.
all: every rank gets the same arguments.
rank_zero: only rank 0 is called.
"""

from collections.abc import Callable, Sequence
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Literal,
    ParamSpec,
    Protocol,
    TypeVar,
    cast,
    overload,
)

import numpy as np

if TYPE_CHECKING:  # a worker that handles no batches starts without torch
    from verlite.protocol.data import DataProto

P = ParamSpec("P")
T = TypeVar("T")
W = TypeVar("W")

Dispatch = Literal["split", "all", "rank_zero"]


class _Split(Protocol):
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, method: Callable[Concatenate[W, P], "DataProto"]
    ) -> Callable[Concatenate[W, P], "DataProto"]: ...
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
def register(dispatch: Literal["all"], keep_remote: Sequence[str] = ()) -> _All: ...
@overload
def register(dispatch: Literal["rank_zero"]) -> _RankZero: ...
def register(dispatch: Dispatch, keep_remote: Sequence[str] = (), fetch: bool = True) -> Any:
    """Mark a worker method as callable from the driver.

    Its static type becomes the type of the driver's call.

    Args:
        dispatch: how the method is called.

            - "split": rank i gets the rows listed in data.meta_info["assignment"][i]; without that
              entry, a near-equal consecutive range of rows. Each row must be in exactly one list.
              A rank without rows is called too, with a batch of 0 rows. DataProto results are
              joined in the caller's row order; a result may have k rows for each input row. Other
              results are returned as a list by rank.
            - "all": returns a list of results by rank.
            - "rank_zero": returns rank 0's result.
        keep_remote: object columns of the result, a DataProto, that stay on the worker's node. The
            driver gets references; see `controller.columns`.
        fetch: whether the references in a split method's batch are replaced by values before the
            method runs. With False the method calls `columns.fetch(batch, names)` for the columns
            it needs.
    """

    def mark(method: Callable[..., Any]) -> Callable[..., Any]:
        method.__dispatch__ = dispatch  # type: ignore[attr-defined]
        method.__keep_remote__ = keep_remote  # type: ignore[attr-defined]
        method.__fetch__ = fetch  # type: ignore[attr-defined]
        return method

    return mark


def dispatch_of(worker_class: type, method: str) -> Dispatch:
    """Return how a method was registered.

    Raises:
        AttributeError: the method is not registered; the message lists those that are.
    """
    dispatch = getattr(getattr(worker_class, method, None), "__dispatch__", None)
    if dispatch is None:
        known = [
            name
            for name in dir(worker_class)
            if hasattr(getattr(worker_class, name), "__dispatch__")
        ]
        raise AttributeError(
            f"{worker_class.__name__}.{method} cannot be called from the driver; "
            f"registered methods: {', '.join(sorted(known))}"
        )
    return cast(Dispatch, dispatch)


def assigned_rows(data: "DataProto", ranks: int) -> list[np.ndarray] | None:
    """Return the row numbers of each rank from meta_info["assignment"], None without that entry.

    Raises:
        ValueError: the assignment does not contain each row exactly once.
    """
    assignment: Sequence[Sequence[int]] | None = data.meta_info.get("assignment")
    if assignment is None:
        return None
    rows = [np.asarray(part, dtype=np.int64).reshape(-1) for part in assignment]
    if len(rows) != ranks:
        raise ValueError(f"meta_info['assignment'] has {len(rows)} lists of rows for {ranks} ranks")
    if not np.array_equal(np.sort(np.concatenate(rows)), np.arange(len(data))):
        raise ValueError(
            f"meta_info['assignment'] must contain each of the {len(data)} rows exactly once"
        )
    return rows


def split_rows(data: "DataProto", ranks: int) -> list["DataProto"]:
    """Return one batch per rank, without the assignment. Sizes may differ and may be 0."""
    from verlite.protocol.data import near_equal_bounds

    rows = assigned_rows(data, ranks)
    if rows is None:
        return [data[start:stop] for start, stop in near_equal_bounds(len(data), ranks)]
    data = data.select(meta_info_keys=[name for name in data.meta_info if name != "assignment"])
    ordered = data.select_idxs(np.concatenate(rows))  # of which a rank's rows are a view
    stops = np.cumsum([len(part) for part in rows]).tolist()
    return [ordered[stop - len(part) : stop] for part, stop in zip(rows, stops, strict=True)]


def join_rows(results: list[Any], data: "DataProto") -> Any:
    """Return the driver's result of a split call.

    Args:
        results: the result of each rank, in rank order.
        data: the batch that was split.

    Returns:
        One DataProto in the row order of `data` if all results are DataProtos, else the list.

    Raises:
        ValueError: the ranks did not all return the same whole number of rows for each input row.
    """
    from verlite.protocol.data import DataProto, near_equal_bounds

    if not all(isinstance(result, DataProto) for result in results):
        return results
    rows = assigned_rows(data, len(results))
    if rows is None:
        sizes = [stop - start for start, stop in near_equal_bounds(len(data), len(results))]
    else:
        sizes = [len(part) for part in rows]
    factor = _rows_per_input(sizes, [len(result) for result in results])
    joined = DataProto.concat(results)
    if rows is None or factor is None:
        return joined
    position = np.empty(len(data), dtype=np.int64)
    position[np.concatenate(rows)] = np.arange(len(data))
    return joined.select_idxs((position[:, None] * factor + np.arange(factor)).reshape(-1))


def _rows_per_input(sizes: list[int], returned: list[int]) -> int | None:
    """Return how many rows the ranks returned for each input row, None without input rows.

    Raises:
        ValueError: it is not the same whole number for all ranks.
    """
    inputs = sum(sizes)
    factor = sum(returned) // inputs if inputs else 0
    if returned != [size * factor for size in sizes]:
        raise ValueError(
            f"ranks were given {sizes} rows and returned {returned}: "
            "not the same whole multiple for every rank"
        )
    return factor if inputs else None
