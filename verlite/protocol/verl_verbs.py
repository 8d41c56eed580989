"""Methods of verl's DataProto that verlite itself does not call: files written for verl do.

`DataProto` inherits them. `verlite.protocol.data` says what differs from verl's.
"""

import builtins
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn, Self

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch.utils.data import DataLoader


class VerlVerbs(ABC):
    """The methods, and what they use of `DataProto`."""

    batch: TensorDict
    non_tensor_batch: dict[str, np.ndarray]
    meta_info: dict[str, Any]

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    @abstractmethod
    def nbytes(self) -> int: ...

    @abstractmethod
    def tensors(self) -> dict[str, torch.Tensor]: ...

    @abstractmethod
    def select_idxs(self, rows: Any) -> Self: ...

    @abstractmethod
    def with_batch(self, **tensors: torch.Tensor) -> Self: ...

    @abstractmethod
    def select(self, batch_keys: Sequence[str] | None = None) -> Self: ...

    @staticmethod
    @abstractmethod
    def from_dict(tensors: Any = None, non_tensors: Any = None, meta_info: Any = None) -> Any: ...

    def _with_tensors(self, tensors: Mapping[str, torch.Tensor], rows: int) -> Self:
        """Return a batch with these tensor columns only, and the object columns of this one."""
        made: Any = type(self)
        batch = TensorDict(dict(tensors), batch_size=[rows])
        new: Self = made(batch, self.non_tensor_batch, self.meta_info)
        return new

    @classmethod
    def from_single_dict(
        cls,
        data: Mapping[str, torch.Tensor | np.ndarray],
        meta_info: Mapping[str, Any] | None = None,
    ) -> Self:
        """Build a batch of tensors and arrays: arrays become object columns.

        Raises:
            ValueError: A value is neither.
        """
        for name, value in data.items():
            if not isinstance(value, torch.Tensor | np.ndarray):
                raise ValueError(f"{name!r} is {type(value).__name__}, not a tensor or an array")
        tensors = {name: value for name, value in data.items() if isinstance(value, torch.Tensor)}
        objects = {name: value for name, value in data.items() if name not in tensors}
        made: Self = cls.from_dict(tensors, objects, meta_info)
        return made

    @classmethod
    def from_tensordict(
        cls, tensor_dict: TensorDict, meta_info: Mapping[str, Any] | None = None
    ) -> Self:
        """Build a batch: NonTensorStack becomes an object column, NonTensorData a meta_info entry.

        Raises:
            ValueError: An entry is something else, such as a nested TensorDict.
        """
        tensors: dict[str, torch.Tensor] = {}
        objects: dict[str, list[Any]] = {}
        meta = dict(meta_info or {})
        for name in map(str, tensor_dict.keys()):
            value = tensor_dict.get(name)
            if isinstance(value, torch.Tensor):
                tensors[name] = value
            elif isinstance(value, NonTensorStack):
                objects[name] = value.tolist()
            elif isinstance(value, NonTensorData):
                meta[name] = value.data
            else:
                raise ValueError(f"{name!r} is {type(value).__name__}, not a tensor or an object")
        rows = int(tensor_dict.batch_size[0])
        made: Self = cls.from_dict(None, objects, meta)
        return made._with_tensors(tensors, rows)

    def to_tensordict(self) -> TensorDict:
        """Return all columns and entries as one TensorDict; the inverse of `from_tensordict`.

        Raises:
            ValueError: An entry of meta_info has the name of a column.
        """
        both = self.meta_info.keys() & {*self.tensors(), *self.non_tensor_batch}
        if both:
            raise ValueError(f"{sorted(both)} are columns and entries of meta_info")
        rows = len(self)
        found: dict[str, Any] = dict(self.tensors())
        for name, column in self.non_tensor_batch.items():
            found[name] = NonTensorStack(*(NonTensorData(value) for value in column))
        out = TensorDict(found, batch_size=[rows])
        for name, value in self.meta_info.items():
            out.set_non_tensor(name, value)
        return out

    def print_size(self, prefix: str = "") -> None:
        """Print the size of the tensors, and of arrays in object columns, in GiB."""
        tensors = sum(tensor.nbytes for tensor in self.tensors().values())
        arrays = self.nbytes - tensors
        start = f"{prefix}, " if prefix else ""
        print(
            f"{start}{len(self)} rows: tensors {tensors / 2**30:.3f} GiB, "
            f"objects {arrays / 2**30:.3f} GiB"
        )

    def slice(
        self, start: int | None = None, end: int | None = None, step: int | None = None
    ) -> Self:
        """Return `self[start:end:step]`."""
        return self.select_idxs(builtins.slice(start, end, step))

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> Self:
        """Return each row repeat_times times: aabb with interleave, otherwise abab."""
        rows = np.arange(len(self))
        order = np.repeat(rows, repeat_times) if interleave else np.tile(rows, repeat_times)
        return self.select_idxs(order)

    def sample_level_repeat(self, repeat_times: Sequence[int] | np.ndarray) -> Self:
        """Return row i repeat_times[i] times.

        Raises:
            ValueError: There is not one number for each row.
        """
        times = np.asarray(repeat_times)
        if times.shape != (len(self),):
            raise ValueError(f"{times.shape} numbers of repeats for {len(self)} rows")
        return self.select_idxs(np.repeat(np.arange(len(self)), times))

    def unfold_column_chunks(self, n_split: int, split_keys: Sequence[str] = ()) -> Self:
        """Return each row as n_split rows.

        Tensors of split_keys are divided along their second dimension: [rows, width, ...] becomes
        [rows * n_split, width / n_split, ...]. Other columns repeat each row.

        Raises:
            ValueError: n_split does not divide a width.
        """
        chunks = {}
        for name in split_keys:
            tensor = self.batch[name]
            if tensor.shape[1] % n_split:
                raise ValueError(f"{name!r} is {tensor.shape[1]} wide, not a multiple of {n_split}")
            width = tensor.shape[1] // n_split
            chunks[name] = tensor.reshape(-1, width, *tensor.shape[2:])
        return self.repeat(n_split).with_batch(**chunks)

    def chunk(self, chunks: int) -> list[Self]:
        """Return equal parts, in order.

        Raises:
            ValueError: The rows cannot be divided by `chunks`. `near_equal_bounds` makes parts of
                nearly equal size, and `reshaping.pad_dataproto_to_divisor` adds rows.
        """
        if chunks < 1 or len(self) % chunks:
            raise ValueError(f"{len(self)} rows cannot be divided into {chunks} equal parts")
        return self.split(len(self) // chunks) if len(self) else [self] * chunks

    def split(self, split_size: int) -> list[Self]:
        """Return parts of split_size rows, in order; the last one may have fewer.

        Raises:
            ValueError: split_size is below 1.
        """
        if split_size < 1:
            raise ValueError(f"split_size={split_size}; parts have at least 1 row")
        starts = range(0, len(self), split_size)
        return [self.slice(start, start + split_size) for start in starts]

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[Self]:
        """Yield mini-batches, `epochs` times over all rows.

        Args:
            seed: seed of the order, if dataloader_kwargs has shuffle=True. None: torch's state.
            dataloader_kwargs: arguments of torch's DataLoader.

        Raises:
            ValueError: The rows cannot be divided by mini_batch_size.
        """
        if len(self) % mini_batch_size:
            raise ValueError(
                f"{len(self)} rows cannot be divided into mini-batches of {mini_batch_size}"
            )
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        loader: DataLoader[int] = DataLoader(
            range(len(self)),  # type: ignore[arg-type]
            batch_size=mini_batch_size,
            collate_fn=self.select_idxs,
            generator=generator,
            **(dataloader_kwargs or {}),
        )
        return (part for _ in range(epochs) for part in loader)

    def reorder(self, indices: Any) -> NoReturn:
        """Raise TypeError: verl's method edits in place."""
        raise TypeError("a DataProto is not edited in place: write data = data[indices]")

    def padding(self, padding_size: int, padding_candidate: str = "") -> NoReturn:
        """Raise TypeError: verl's method edits in place."""
        raise TypeError(
            "a DataProto is not edited in place: write data = DataProto.concat([data, "
            "data[-1:].repeat(padding_size)])"
        )

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> Self:
        """Return the batch with other names of tensor columns.

        Raises:
            KeyError: A column does not exist.
            ValueError: The numbers of names differ, an old name occurs twice, or a new name is a
                column already.
        """
        old = [old_keys] if isinstance(old_keys, str) else list(old_keys)
        new = [new_keys] if isinstance(new_keys, str) else list(new_keys)
        if len(set(old)) != len(new):
            raise ValueError(f"{len(set(old))} old names and {len(new)} new ones")
        self.select(old)
        names = dict(zip(old, new, strict=True))
        tensors = {names.get(name, name): value for name, value in self.tensors().items()}
        if len(tensors) < len(self.tensors()):
            raise ValueError(f"{new} has a name that is a column already")
        return self._with_tensors(tensors, len(self))

    def to(self, device: str | torch.device) -> Self:
        """Return the batch with its tensors on a device."""
        tensors = {name: tensor.to(device) for name, tensor in self.tensors().items()}
        return self._with_tensors(tensors, len(self))
