"""Columns whose values stay on the node that produced them.

The batch carries a reference for each row. Rows are selected, joined, regrouped and distributed
over ranks by their references. The values are in the object store of the node that produced them.
They go directly to a node that fetches them, once for all ranks there.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from verlite.controller.cluster import current
from verlite.protocol.data import DataProto, object_array

CHUNK_BYTES = 1 << 20
"""Rows are stored together up to this size. It bounds both the number of objects and the excess
data that a rank fetches when it needs only a few rows."""


class Ref(NamedTuple):
    """Reference to one row of one column: entry `row` of column `name` in the stored `chunk`.

    Attributes:
        chunk: Ray reference to {column name: list of values}.
    """

    chunk: Any
    name: str
    row: int


def keep(batch: DataProto, names: Iterable[str]) -> DataProto:
    """Store object columns on this node and return the batch with references in their place.

    Args:
        names: the columns; names that the batch does not have are ignored.
    """
    import ray

    columns = {
        name: batch.non_tensor_batch[name] for name in names if name in batch.non_tensor_batch
    }
    row_bytes = [
        sum(_size(column[row]) for column in columns.values()) for row in range(len(batch))
    ]
    refs: dict[str, list[Ref]] = {name: [] for name in columns}
    for start, stop in _chunk_bounds(row_bytes):
        chunk = ray.put({name: list(column[start:stop]) for name, column in columns.items()})
        for name in columns:
            refs[name] += [Ref(chunk, name, row) for row in range(stop - start)]
    return batch.with_non_tensor(**{name: object_array(column) for name, column in refs.items()})


def fetch(
    batch: DataProto,
    names: Iterable[str] | None = None,
    lost_as_none: bool = False,
) -> DataProto:
    """Return the batch with values in place of references.

    A column may mix references and values; values pass through. Columns without references are not
    copied.

    Args:
        names: the object columns to fetch; None fetches all.
        lost_as_none: return None for each value whose worker has died.

    Raises:
        WorkerError: in the driver, if the worker that stored the values has died.
    """
    wanted = batch.non_tensor_batch if names is None else names
    columns = {name: batch.non_tensor_batch[name] for name in wanted}
    refs = [value for column in columns.values() for value in column if isinstance(value, Ref)]
    if not refs:
        return batch
    chunks = list(dict.fromkeys(ref.chunk for ref in refs))
    stored = _load_available(chunks) if lost_as_none else _load(chunks)

    def value_of(entry: Any) -> Any:
        if isinstance(entry, Ref):
            if entry.chunk not in stored:
                return None
            return stored[entry.chunk][entry.name][entry.row]
        return entry

    fetched = {
        name: object_array([value_of(entry) for entry in column])
        for name, column in columns.items()
        if any(isinstance(entry, Ref) for entry in column)
    }
    return batch.with_non_tensor(**fetched)


def _load(chunks: list[Any]) -> dict[Any, dict[str, list[Any]]]:
    """Return {chunk: {column name: values}}, read from the object store."""
    import ray

    try:
        return dict(zip(chunks, ray.get(chunks), strict=True))
    except ray.exceptions.ObjectLostError:
        cluster = current()
        if cluster is not None:  # in a worker, the driver's supervisor makes the diagnosis
            cluster.supervisor.raise_if_worker_died()
        raise


def _load_available(chunks: list[Any]) -> dict[Any, dict[str, list[Any]]]:
    """Return {chunk: {column name: values}} without the chunks whose worker has died."""
    import ray

    found = {}
    for chunk in chunks:
        with suppress(ray.exceptions.ObjectLostError):
            found[chunk] = ray.get(chunk)
    return found


def _size(value: Any) -> int:
    """Return the approximate size of a value in bytes."""
    return value.nbytes if isinstance(value, np.ndarray) else len(str(value))


def _chunk_bounds(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return consecutive (start, stop) ranges of rows of at most CHUNK_BYTES.

    A larger row gets its own range.
    """
    if not sizes:
        return []
    bounds = []
    start = 0
    total = 0
    for row, size in enumerate(sizes):
        if row > start and total + size > CHUNK_BYTES:
            bounds.append((start, row))
            start = row
            total = 0
        total += size
    bounds.append((start, len(sizes)))
    return bounds
