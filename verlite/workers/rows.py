"""Padded rows of a training step, fetched and padded once per worker."""

from torch import Tensor

from verlite.controller.columns import fetch
from verlite.protocol.data import DataProto
from verlite.protocol.ragged import is_token_column, pad_columns, padded


class StepRows:
    """Rows of the current training step.

    All calls of a step get the same rows, each with the columns that it needs. A column is fetched
    and padded by the first call that needs it, and kept for later calls of the same step.
    """

    def __init__(self) -> None:
        self._step = -1
        self._columns: dict[str, Tensor] = {}

    def padded(self, batch: DataProto) -> DataProto:
        """Return `batch` padded (see `protocol.ragged.padded`); meta_info needs `step`."""
        if batch.meta_info["step"] != self._step:
            self.clear()
            self._step = batch.meta_info["step"]
        names = [name for name in batch.non_tensor_batch if is_token_column(name)]
        missing = [name for name in names if name not in self._columns]
        if missing:
            new = fetch(batch.select(non_tensor_batch_keys=missing))
            self._columns |= pad_columns(new)
        return padded(batch, {name: self._columns[name] for name in names})

    def clear(self) -> None:
        """Free the columns."""
        self._step = -1
        self._columns = {}
