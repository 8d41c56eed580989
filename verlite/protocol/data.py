"""DataProto: the one thing that travels between the controller and its workers.

verl's class with verl's meaning, with one change: every method returns a new object and none edits in place. Tensors are
shared between the old and the new object where nothing moved, and after a trip through Ray's object store they are
read-only views of shared memory; so a tensor of a DataProto is never written to in place. Replace it with `with_batch`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tensordict import TensorDict

Rows = slice | Sequence[int] | np.ndarray | torch.Tensor
"""Row selection: a slice, row numbers (a list, an array or a tensor, in any order, repeats allowed), or a boolean mask over the rows."""


@dataclass(frozen=True, eq=False)
class DataProtoItem:
    """One row: tensors without their first dimension, objects as they are, the batch's meta_info."""

    batch: TensorDict | None
    non_tensor_batch: dict[str, Any]
    meta_info: dict[str, Any]


@dataclass(frozen=True, eq=False)
class DataProto:
    """A batch of rows.

    batch: tensors whose first dimension counts rows, or None.
    non_tensor_batch: object arrays of shape [rows].
    meta_info: what belongs to the batch and not to a row; never cut or repeated with the rows.
    Raises ValueError when the columns disagree about the number of rows.
    """

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.batch is not None and self.batch.batch_dims != 1:
            raise ValueError(
                f"DataProto.batch needs exactly one batch dimension, got batch_size={list(self.batch.batch_size)}"
            )
        rows = len(self)
        for name, column in self.non_tensor_batch.items():
            if not isinstance(column, np.ndarray) or column.dtype != object:
                raise ValueError(
                    f"non_tensor_batch[{name!r}] must be an object array; build batches with DataProto.from_dict"
                )
            if column.shape != (rows,):
                raise ValueError(
                    f"non_tensor_batch[{name!r}] has shape {column.shape}, but the batch has {rows} rows"
                )
            if self.batch is not None and name in self.batch.keys():
                raise ValueError(f"column {name!r} is both in batch and in non_tensor_batch")

    # ---- construction

    @staticmethod
    def from_dict(
        tensors: Mapping[str, torch.Tensor] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> "DataProto":
        """Columns to a batch. non_tensors may be lists or arrays; each becomes an object array of one entry per row."""
        objects = {name: object_array(values) for name, values in (non_tensors or {}).items()}
        return DataProto(_tensordict(dict(tensors or {})), objects, dict(meta_info or {}))

    @staticmethod
    def from_single_dict(
        data: Mapping[str, Any], meta_info: Mapping[str, Any] | None = None
    ) -> "DataProto":
        """As from_dict, telling tensors from other columns by their type."""
        tensors = {name: value for name, value in data.items() if isinstance(value, torch.Tensor)}
        return DataProto.from_dict(
            tensors, {name: value for name, value in data.items() if name not in tensors}, meta_info
        )

    def with_batch(self, **tensors: torch.Tensor) -> "DataProto":
        """Add or replace tensor columns."""
        return replace(
            self, batch=_tensordict({**self._tensors(), **tensors}, rows=self._rows_or_none())
        )

    def with_non_tensor(self, **columns: Any) -> "DataProto":
        """Add or replace object columns."""
        return replace(
            self,
            non_tensor_batch={
                **self.non_tensor_batch,
                **{name: object_array(v) for name, v in columns.items()},
            },
        )

    def with_meta(self, **values: Any) -> "DataProto":
        """Add or replace entries of meta_info."""
        return replace(self, meta_info={**self.meta_info, **values})

    # ---- size and rows

    def __len__(self) -> int:
        return self._rows_or_none() or 0

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors, and of the arrays in object columns."""
        arrays = (
            value
            for column in self.non_tensor_batch.values()
            for value in column
            if isinstance(value, np.ndarray)
        )
        return sum(tensor.nbytes for tensor in self._tensors().values()) + sum(
            array.nbytes for array in arrays
        )

    def _rows_or_none(self) -> int | None:
        """Number of rows; None for a batch that has no column at all, which may then take columns of any length."""
        if self.batch is not None:
            return self.batch.batch_size[0]
        return next((len(column) for column in self.non_tensor_batch.values()), None)

    def _tensors(self) -> dict[str, torch.Tensor]:
        return (
            {}
            if self.batch is None
            else {
                str(name): tensor
                for name, tensor in self.batch.items()
                if isinstance(tensor, torch.Tensor)
            }
        )

    def __getitem__(self, rows: int | Rows) -> Any:
        """An int gives a DataProtoItem; a slice, row numbers or a boolean mask give a DataProto."""
        if isinstance(rows, (int, np.integer)):
            batch = None if self.batch is None else self.batch[int(rows)]
            return DataProtoItem(
                batch,
                {name: column[rows] for name, column in self.non_tensor_batch.items()},
                self.meta_info,
            )
        return self.select_idxs(rows)

    def select_idxs(self, rows: Rows) -> "DataProto":
        """The chosen rows, in the chosen order. A slice is a view; anything else copies only the chosen rows."""
        if isinstance(rows, slice):
            chosen = range(*rows.indices(len(self)))
            if chosen.step < 0:  # torch has no negative strides
                return self.select_idxs(list(chosen))
            tensors = {name: tensor[rows] for name, tensor in self._tensors().items()}
            return self._with_rows(tensors, rows, len(chosen))
        index = _row_numbers(rows, len(self))
        tensors = {
            name: tensor.index_select(0, index.to(tensor.device))
            for name, tensor in self._tensors().items()
        }
        return self._with_rows(tensors, index.numpy(), len(index))

    def _with_rows(self, tensors: dict[str, torch.Tensor], rows: Any, count: int) -> "DataProto":
        batch = None if self.batch is None else _tensordict(tensors, count)
        return replace(
            self,
            batch=batch,
            non_tensor_batch={name: column[rows] for name, column in self.non_tensor_batch.items()},
        )

    def reorder(self, index: Rows) -> "DataProto":
        """Rows in a new order; index must name every row exactly once."""
        numbers = _row_numbers(index, len(self))
        if not torch.equal(numbers.sort().values, torch.arange(len(self))):
            raise ValueError(
                f"reorder needs each of the {len(self)} rows exactly once; use select_idxs to drop or repeat rows"
            )
        return self.select_idxs(numbers)

    def repeat(self, k: int, interleave: bool = True) -> "DataProto":
        """Each row k times: aabb with interleave, else abab."""
        if interleave:
            return self._repeated(
                lambda t: t.unsqueeze(1).expand(-1, k, *t.shape[1:]).flatten(0, 1), np.repeat, k
            )
        return self._repeated(
            lambda t: t.unsqueeze(0).expand(k, *t.shape).flatten(0, 1), np.tile, k
        )

    def _repeated(self, tensor_op: Any, array_op: Any, k: int) -> "DataProto":
        batch = (
            None
            if self.batch is None
            else _tensordict(
                {name: tensor_op(t) for name, t in self._tensors().items()}, len(self) * k
            )
        )
        return replace(
            self,
            batch=batch,
            non_tensor_batch={
                name: array_op(column, k) for name, column in self.non_tensor_batch.items()
            },
        )

    def sample_level_repeat(self, counts: Sequence[int]) -> "DataProto":
        """Row i counts[i] times, copies side by side; 0 drops the row."""
        if len(counts) != len(self):
            raise ValueError(f"sample_level_repeat got {len(counts)} counts for {len(self)} rows")
        return self.select_idxs(np.repeat(np.arange(len(self)), np.asarray(counts)))

    def split(self, size: int) -> list["DataProto"]:
        """Consecutive pieces of `size` rows; the last may be shorter."""
        if size < 1:
            raise ValueError(f"split needs a size of at least 1, got {size}")
        return [self[start : start + size] for start in range(0, len(self), size)]

    def chunk(self, n: int) -> list["DataProto"]:
        """n consecutive pieces whose sizes differ by at most one, longer ones first."""
        if not 1 <= n <= len(self):
            raise ValueError(f"cannot cut {len(self)} rows into {n} non-empty pieces")
        return [self[start:stop] for start, stop in near_equal_bounds(len(self), n)]

    @staticmethod
    def concat(parts: Sequence["DataProto"]) -> "DataProto":
        """Rows of all parts, in order. Parts without rows are passed over.

        meta_info entries that several parts have must be equal. Raises ValueError naming the column or entry that differs.
        """
        if not parts:
            raise ValueError("concat needs at least one DataProto")
        meta = dict(parts[0].meta_info)
        for part in parts[1:]:
            for name, value in part.meta_info.items():
                if name in meta and not _equal(meta[name], value):
                    raise ValueError(
                        f"concat: parts disagree about meta_info[{name!r}]: {meta[name]!r} and {value!r}"
                    )
                meta[name] = value
        full = [part for part in parts if len(part)] or [parts[0]]
        if len(full) == 1:
            return replace(full[0], meta_info=meta)
        tensors = [part._tensors() for part in full]
        objects = [part.non_tensor_batch for part in full]
        for columns in (tensors, objects):
            different = next(
                (
                    set(other) ^ set(columns[0])
                    for other in columns[1:]
                    if set(other) != set(columns[0])
                ),
                None,
            )
            if different:
                raise ValueError(f"concat: columns {sorted(different)} are missing in some parts")
        for name, first in tensors[0].items():
            shapes = {tuple(part[name].shape[1:]) for part in tensors}
            if len(shapes) > 1:
                raise ValueError(
                    f"concat: column {name!r} has row shapes {sorted(shapes)} in different parts; pad them to one shape"
                )
            if any(part[name].dtype != first.dtype for part in tensors):
                raise ValueError(
                    f"concat: column {name!r} has dtypes {sorted({str(part[name].dtype) for part in tensors})}"
                )
        batch = (
            None
            if full[0].batch is None
            else _tensordict(
                {name: torch.cat([part[name] for part in tensors]) for name in tensors[0]}
            )
        )
        return DataProto(
            batch,
            {name: np.concatenate([part[name] for part in objects]) for name in objects[0]},
            meta,
        )

    def make_iterator(
        self, mini_batch_size: int, epochs: int = 1, seed: int | None = None
    ) -> Iterator["DataProto"]:
        """Mini-batches of `mini_batch_size` rows (the last of a pass may be shorter) for `epochs` passes.

        seed=None keeps the order; otherwise each pass is shuffled anew, the same way for the same seed.
        """
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        for _ in range(epochs):
            rows = (
                self
                if generator is None
                else self.select_idxs(torch.randperm(len(self), generator=generator))
            )
            yield from rows.split(mini_batch_size)

    # ---- columns

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> "DataProto":
        """Only the named columns and entries; None keeps all of that kind. Raises KeyError naming what is missing."""
        tensors = _pick(self._tensors(), batch_keys, "batch")
        return DataProto(
            None if self.batch is None else _tensordict(tensors, len(self)),
            _pick(self.non_tensor_batch, non_tensor_batch_keys, "non_tensor_batch"),
            _pick(self.meta_info, meta_info_keys, "meta_info"),
        )

    def pop(
        self,
        batch_keys: Sequence[str] = (),
        non_tensor_batch_keys: Sequence[str] = (),
        meta_info_keys: Sequence[str] = (),
    ) -> tuple["DataProto", "DataProto"]:
        """(the named columns and entries, the rest)."""
        popped = self.select(batch_keys, non_tensor_batch_keys, meta_info_keys)
        rest = self.select(
            [name for name in self._tensors() if name not in batch_keys],
            [name for name in self.non_tensor_batch if name not in non_tensor_batch_keys],
            [name for name in self.meta_info if name not in meta_info_keys],
        )
        return popped, rest

    def rename(self, old: str | Sequence[str], new: str | Sequence[str]) -> "DataProto":
        """Tensor columns under new names."""
        olds, news = (
            ([old], [new])
            if isinstance(old, str) and isinstance(new, str)
            else (list(old), list(new))
        )
        if len(olds) != len(news):
            raise ValueError(f"rename got {len(olds)} old and {len(news)} new names")
        _pick(self._tensors(), olds, "batch")
        names = dict(zip(olds, news, strict=True))
        renamed = [names.get(name, name) for name in self._tensors()]
        if len(set(renamed)) < len(renamed):
            raise ValueError(f"rename {names} would give two columns the same name")
        return replace(
            self,
            batch=_tensordict(dict(zip(renamed, self._tensors().values(), strict=True)), len(self)),
        )

    def union(self, other: "DataProto") -> "DataProto":
        """Columns and entries of both. Those that both have must be equal (NaN equals NaN), else ValueError names the key."""
        if (
            len(self) != len(other)
            and self._rows_or_none() is not None
            and other._rows_or_none() is not None
        ):
            raise ValueError(f"union of {len(self)} and {len(other)} rows")
        merged: list[dict[str, Any]] = []
        for kind, mine, theirs in (
            ("batch", self._tensors(), other._tensors()),
            ("non_tensor_batch", self.non_tensor_batch, other.non_tensor_batch),
            ("meta_info", self.meta_info, other.meta_info),
        ):
            for name in mine.keys() & theirs.keys():
                if not _equal(mine[name], theirs[name]):
                    raise ValueError(
                        f"union: {kind}[{name!r}] differs between the two; rename or drop one of them"
                    )
            merged.append({**mine, **theirs})
        return DataProto(_tensordict(merged[0]), merged[1], merged[2])

    def to(self, device: torch.device | str) -> "DataProto":
        """Tensors on `device`."""
        return replace(self, batch=None if self.batch is None else self.batch.to(device))

    # ---- between processes and on disk

    def __getstate__(self) -> dict[str, Any]:
        """State for pickle: tensors as numpy arrays, which pickle protocol 5 (and so Ray) moves without copies.

        torch's own pickling would copy, and would send the whole storage behind a view of a few rows.
        """
        return {
            "rows": None if self.batch is None else len(self),
            "tensors": {name: _to_numpy(tensor) for name, tensor in self._tensors().items()},
            "non_tensor_batch": self.non_tensor_batch,
            "meta_info": self.meta_info,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        tensors = {
            name: _from_numpy(array, dtype) for name, (array, dtype) in state["tensors"].items()
        }
        object.__setattr__(
            self, "batch", None if state["rows"] is None else _tensordict(tensors, state["rows"])
        )
        object.__setattr__(self, "non_tensor_batch", state["non_tensor_batch"])
        object.__setattr__(self, "meta_info", state["meta_info"])

    def save_to_disk(self, folder: str | Path) -> None:
        """Write tensors.safetensors and rest.json into `folder`. Objects and meta_info must be JSON (numpy values are converted)."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        tensors = {
            name: tensor.detach().cpu().contiguous() for name, tensor in self._tensors().items()
        }
        rest = {
            "rows": None if self.batch is None else len(self),
            "non_tensor_batch": {
                name: column.tolist() for name, column in self.non_tensor_batch.items()
            },
            "meta_info": self.meta_info,
        }
        text = json.dumps(rest, default=_jsonable, ensure_ascii=False)
        # Columns may share memory (views of one tensor), which safetensors refuses.
        save_file(
            {name: tensor.clone() for name, tensor in tensors.items()}, path / "tensors.safetensors"
        )
        (path / "rest.json").write_text(text, encoding="utf-8")

    @staticmethod
    def load_from_disk(folder: str | Path) -> "DataProto":
        """Read what save_to_disk wrote. Nothing is unpickled, so a foreign folder cannot run code."""
        path = Path(folder)
        rest = json.loads((path / "rest.json").read_text(encoding="utf-8"))
        tensors = load_file(path / "tensors.safetensors")
        objects = {name: object_array(values) for name, values in rest["non_tensor_batch"].items()}
        return DataProto(
            None if rest["rows"] is None else _tensordict(tensors, rest["rows"]),
            objects,
            rest["meta_info"],
        )


def pad_dataproto_to_divisor(data: DataProto, divisor: int) -> tuple[DataProto, int]:
    """(data with rows repeated from its start until `divisor` divides their number, how many were added)."""
    if not len(data):
        raise ValueError("cannot pad a batch without rows: there is no row to repeat")
    extra = -len(data) % divisor
    return (data.select_idxs(np.arange(len(data) + extra) % len(data)) if extra else data), extra


def unpad_dataproto(data: DataProto, extra: int) -> DataProto:
    """data without its last `extra` rows."""
    return data[: len(data) - extra] if extra else data


def near_equal_bounds(rows: int, n: int) -> list[tuple[int, int]]:
    """n consecutive (start, stop) ranges over `rows`, sizes differing by at most one, longer first; empty ones when rows < n."""
    size, longer = divmod(rows, n)
    starts = [i * size + min(i, longer) for i in range(n + 1)]
    return list(zip(starts[:-1], starts[1:], strict=True))


def object_array(values: Any) -> np.ndarray:
    """One object per entry, even where the entries are equally long lists that numpy would turn into a matrix."""
    if isinstance(values, np.ndarray) and values.dtype == object and values.ndim == 1:
        return values
    if isinstance(values, np.ndarray):
        values = values.tolist()  # Python's own numbers and strings
    out = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        out[i] = value
    return out


def _tensordict(tensors: dict[str, torch.Tensor], rows: int | None = None) -> TensorDict | None:
    """Tensors as a TensorDict of `rows` rows (None: as many as the first tensor has). No tensors and no rows: None."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or tensor.ndim == 0:
            raise ValueError(
                f"batch[{name!r}] must be a tensor whose first dimension counts rows, got {type(tensor).__name__}"
            )
        rows = tensor.shape[0] if rows is None else rows
        if tensor.shape[0] != rows:
            raise ValueError(
                f"batch[{name!r}] has {tensor.shape[0]} rows, but the batch has {rows}"
            )
    return None if rows is None else TensorDict(tensors, batch_size=[rows])


def _row_numbers(rows: Rows, count: int) -> torch.Tensor:
    """Any kind of row selection (but a slice) as an int64 tensor on the CPU."""
    index = torch.as_tensor(np.asarray(rows) if not isinstance(rows, torch.Tensor) else rows).cpu()
    if index.numel() == 0:
        return torch.zeros(0, dtype=torch.int64)
    if index.ndim != 1:
        raise ValueError(
            f"rows are chosen by a one-dimensional list, got shape {tuple(index.shape)}"
        )
    if index.dtype == torch.bool:
        if len(index) != count:
            raise ValueError(f"boolean row mask of {len(index)} entries for {count} rows")
        return index.nonzero().squeeze(1)
    if index.is_floating_point():
        raise ValueError("rows are chosen by whole numbers or a boolean mask, got floats")
    index = index.to(torch.int64)
    low, high = int(index.min()), int(index.max())
    if low < -count or high >= count:
        raise IndexError(f"row {high if high >= count else low} asked of a batch with {count} rows")
    return torch.where(index < 0, index + count, index)


def _pick(columns: Mapping[str, Any], names: Sequence[str] | None, kind: str) -> dict[str, Any]:
    if names is None:
        return dict(columns)
    missing = [name for name in names if name not in columns]
    if missing:
        raise KeyError(f"{kind} has no {missing}; it has {sorted(columns)}")
    return {name: columns[name] for name in names}


def _equal(a: Any, b: Any) -> bool:
    """Deep equality in which NaN equals NaN."""
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
            _equal(x, y) for x, y in zip(a.ravel().tolist(), b.ravel().tolist(), strict=True)
        )
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_equal(a[name], b[name]) for name in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return (
            type(a) is type(b)
            and len(a) == len(b)
            and all(_equal(x, y) for x, y in zip(a, b, strict=True))
        )
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (a != a and b != b)
    return type(a) is type(b) and bool(a == b)


_CARRIER = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""numpy has no bfloat16 or float8: their bits travel in an integer type of the same size."""


def _to_numpy(tensor: torch.Tensor) -> tuple[np.ndarray, torch.dtype | None]:
    tensor = tensor.detach().cpu().contiguous()
    try:
        return tensor.numpy(), None
    except TypeError:
        return tensor.view(_CARRIER[tensor.element_size()]).numpy(), tensor.dtype


def _from_numpy(array: np.ndarray, dtype: torch.dtype | None) -> torch.Tensor:
    # Arrays from the object store are read-only, of which torch.from_numpy warns each time; from_dlpack shares them silently.
    # The rule at the top of this file (no in-place edits) is what keeps them safe.
    tensor = torch.from_dlpack(array)
    return tensor if dtype is None else tensor.view(dtype)


def _jsonable(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be saved as JSON: {value!r:.80}")
