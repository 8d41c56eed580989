"""Columns that stay where they were made: the batch carries a reference for each row, and whoever needs the values fetches them.

Rows are selected, joined, regrouped and spread over ranks by their references; the values lie in the object store of the node that
made them and go straight to the node that asks, once for all ranks there.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from verlite.controller.cluster import current
from verlite.protocol.data import DataProto, object_array

CHUNK_BYTES = 1 << 20
"""Rows are stored together up to this size: a rank that wants few of them fetches little else, and objects stay few."""


class Ref(NamedTuple):
    """A row's value of one column: entry `row` of column `name` in the stored `chunk`, {name: values}."""

    chunk: Any
    name: str
    row: int


def keep(batch: DataProto, names: Iterable[str]) -> DataProto:
    """The batch with references in place of these object columns, whose values now lie in this node's object store.

    Columns that the batch does not have are passed over.
    """
    import ray

    columns = {
        name: batch.non_tensor_batch[name] for name in names if name in batch.non_tensor_batch
    }
    refs: dict[str, list[Ref]] = {name: [] for name in columns}
    for start, stop in _chunks(
        [sum(_size(column[row]) for column in columns.values()) for row in range(len(batch))]
    ):
        chunk = ray.put({name: list(column[start:stop]) for name, column in columns.items()})
        for name in columns:
            refs[name] += [Ref(chunk, name, row) for row in range(stop - start)]
    return batch.with_non_tensor(**{name: object_array(column) for name, column in refs.items()})


def fetch(batch: DataProto, names: Iterable[str] | None = None) -> DataProto:
    """Return the batch with values in place of references.

    A column may mix references and values: values pass through, and a column without references
    is not copied.

    Args:
        names: the object columns to fetch; None means all.

    Raises:
        WorkerError: in the driver, if the worker that stored the values has died.
    """
    wanted = batch.non_tensor_batch if names is None else names
    columns = {name: batch.non_tensor_batch[name] for name in wanted}
    refs = [value for column in columns.values() for value in column if isinstance(value, Ref)]
    if not refs:
        return batch
    stored = _load(list(dict.fromkeys(ref.chunk for ref in refs)))

    def value_of(entry: Any) -> Any:
        if isinstance(entry, Ref):
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
        if cluster is not None:  # a worker leaves the diagnosis to the driver's supervisor
            cluster.supervisor.look_for_dead()
        raise


def _size(value: Any) -> int:
    return value.nbytes if isinstance(value, np.ndarray) else len(str(value))


def _chunks(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Consecutive (start, stop) ranges of rows of about CHUNK_BYTES each; a larger row has one of its own."""
    bounds, start, held = [], 0, 0
    for row, size in enumerate(sizes):
        if row > start and held + size > CHUNK_BYTES:
            bounds.append((start, row))
            start, held = row, 0
        held += size
    return [*bounds, (start, len(sizes))] if sizes else []
