"""DataProto: a batch of rows, exchanged between the driver and its workers.

Names and arguments of the methods are those of verl's DataProto. What differs:

- No method edits in place: each returns a new object. `union`, `rename` and `to` must be assigned:
  `batch = batch.union(other)`. `pop` returns two batches: what was taken out, and the rest. verl's
  `reorder` and `padding`, whose only effect is the edit, raise an error that names the expression.
- Old and new objects share tensors, and tensors from Ray's object store are read-only views of
  shared memory, so never write to a tensor of a DataProto. Replace it with `with_batch`.
- Without tensor columns `batch` is an empty TensorDict, not None, and the object columns count the
  rows.
- There is one batch dimension. Object columns are one-dimensional object arrays, so a list per row
  stays a list. A missing column and different values of one name are errors everywhere.
- `concat` ignores parts without rows. `metrics` that only some parts have are merged too.
- `save_to_disk` writes a folder without pickle. Automatic padding (`VERL_AUTO_PADDING`) and
  `DataProtoFuture` do not exist: ranks may get different numbers of rows.

The methods that only files written for verl call are in `verl_verbs`; `reshaping` has verl's
functions for batches: `pad_dataproto_to_divisor`, `fold_batch_dim` and their inverses.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tensordict import TensorDict

from verlite.protocol.verl_verbs import VerlVerbs

Rows = slice | Sequence[int] | np.ndarray | torch.Tensor
"""A slice, row numbers in any order with or without repeats, or a boolean mask over the rows."""


@dataclass(frozen=True, eq=False)
class DataProtoItem:
    """One row: `data[i]`.

    batch: Tensors without the dimension of rows.
    non_tensor_batch: Objects by name.
    meta_info: Values of the whole batch.
    """

    batch: TensorDict
    non_tensor_batch: dict[str, Any]
    meta_info: dict[str, Any]


@dataclass(frozen=True, eq=False)
class DataProto(VerlVerbs):
    """A batch of rows. Build one with `from_dict`.

    batch: Tensors whose first dimension counts rows. Empty without tensor columns; it may then be
        given as None.
    non_tensor_batch: Object arrays of shape [rows].
    meta_info: Values of the whole batch. Selecting rows does not change them.

    Raises:
        ValueError: The columns have different numbers of rows.
    """

    batch: TensorDict = field(default_factory=lambda: TensorDict({}, batch_size=[0]))
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.batch is None:
            rows = max((len(column) for column in self.non_tensor_batch.values()), default=0)
            object.__setattr__(self, "batch", TensorDict({}, batch_size=[rows]))
        if self.batch.batch_dims != 1:
            raise ValueError(
                "DataProto.batch must have one batch dimension, got "
                f"batch_size={list(self.batch.batch_size)}"
            )
        rows = len(self)
        for name, column in self.non_tensor_batch.items():
            if not isinstance(column, np.ndarray) or column.dtype != object:
                raise ValueError(
                    f"non_tensor_batch[{name!r}] must be an object array; build batches with "
                    "DataProto.from_dict"
                )
            if column.shape != (rows,):
                raise ValueError(
                    f"non_tensor_batch[{name!r}] has shape {column.shape}, but the batch has "
                    f"{rows} rows"
                )
            if name in self.batch.keys():
                raise ValueError(f"column {name!r} is both in batch and in non_tensor_batch")

    # ---- construction

    @staticmethod
    def from_dict(
        tensors: Mapping[str, torch.Tensor] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> "DataProto":
        """Build a batch. non_tensors are lists or arrays with one entry per row."""
        objects = {name: object_array(values) for name, values in (non_tensors or {}).items()}
        return _build(dict(tensors or {}), objects, dict(meta_info or {}))

    def with_batch(self, **tensors: torch.Tensor) -> "DataProto":
        """Add or replace tensor columns."""
        both = {**self.tensors(), **tensors}
        return _build(both, self.non_tensor_batch, self.meta_info, self._rows_or_none())

    def with_non_tensor(self, **columns: Any) -> "DataProto":
        """Add or replace object columns."""
        new = {name: object_array(values) for name, values in columns.items()}
        both = {**self.non_tensor_batch, **new}
        return _build(self.tensors(), both, self.meta_info, self._rows_or_none())

    def with_meta(self, **values: Any) -> "DataProto":
        """Add or replace entries of meta_info."""
        return replace(self, meta_info={**self.meta_info, **values})

    # ---- size and rows

    def __len__(self) -> int:
        return int(self.batch.batch_size[0])

    @property
    def nbytes(self) -> int:
        """Return the size in bytes of tensors, and of arrays in object columns."""
        tensors = sum(tensor.nbytes for tensor in self.tensors().values())
        columns = self.non_tensor_batch.values()
        values = (value for column in columns for value in column)
        return tensors + sum(value.nbytes for value in values if isinstance(value, np.ndarray))

    def _rows_or_none(self) -> int | None:
        """Return the number of rows, None without rows and columns: then any column fits."""
        if len(self) or self.tensors() or self.non_tensor_batch:
            return len(self)
        return None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensor columns by name."""
        return {str(k): v for k, v in self.batch.items() if isinstance(v, torch.Tensor)}

    @overload
    def __getitem__(self, rows: int) -> DataProtoItem: ...

    @overload
    def __getitem__(self, rows: Rows) -> "DataProto": ...

    def __getitem__(self, rows: Rows | int) -> "DataProto | DataProtoItem":
        """Return one row for a number; else the chosen rows, as `select_idxs`."""
        if not isinstance(rows, int | np.integer):
            return self.select_idxs(rows)
        if not -len(self) <= rows < len(self):
            raise IndexError(f"row {rows} does not exist in a batch with {len(self)} rows")
        objects = {name: column[rows] for name, column in self.non_tensor_batch.items()}
        return DataProtoItem(self.batch[rows], objects, self.meta_info)

    def select_idxs(self, rows: Rows) -> "DataProto":
        """Return the chosen rows, in the chosen order. A slice is a view; other choices copy."""
        if isinstance(rows, slice):
            chosen = range(*rows.indices(len(self)))
            if chosen.step < 0:  # torch has no negative strides
                return self.select_idxs(list(chosen))
            tensors = {name: tensor[rows] for name, tensor in self.tensors().items()}
            return self._with_rows(tensors, rows, len(chosen))
        index = _row_numbers(rows, len(self))
        tensors = {
            name: tensor.index_select(0, index.to(tensor.device))
            for name, tensor in self.tensors().items()
        }
        return self._with_rows(tensors, index.numpy(), len(index))

    def _with_rows(self, tensors: dict[str, torch.Tensor], rows: Any, count: int) -> "DataProto":
        objects = {name: column[rows] for name, column in self.non_tensor_batch.items()}
        return _build(tensors, objects, self.meta_info, count)

    @staticmethod
    def concat(data: Sequence["DataProto"]) -> "DataProto":
        """Return the rows of all parts, in order. Parts without rows are ignored.

        meta_info["metrics"] becomes {name: [value of each part that has it]}.

        Raises:
            ValueError: Parts have different columns, row shapes or dtypes, or different values of
                a meta_info entry. The message names it.
        """
        if not data:
            raise ValueError("concat needs at least one DataProto")
        meta = joined_meta([part.meta_info for part in data])
        full = [part for part in data if len(part)] or [data[0]]
        if len(full) == 1:
            return replace(full[0], meta_info=meta)
        tensors = [part.tensors() for part in full]
        objects = [part.non_tensor_batch for part in full]
        require_same_columns(tensors)
        require_same_columns(objects)
        for name in tensors[0]:
            require_same_rows(name, [part[name] for part in tensors])
        joined = {name: torch.cat([part[name] for part in tensors]) for name in tensors[0]}
        columns = {name: np.concatenate([part[name] for part in objects]) for name in objects[0]}
        return _build(joined, columns, meta, sum(len(part) for part in full))

    # ---- columns

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> "DataProto":
        """Return only the named columns and entries; None keeps all of a kind.

        Raises:
            KeyError: A name does not exist.
        """
        tensors = _pick(self.tensors(), batch_keys, "batch")
        objects = _pick(self.non_tensor_batch, non_tensor_batch_keys, "non_tensor_batch")
        meta = _pick(self.meta_info, meta_info_keys, "meta_info")
        return _build(tensors, objects, meta, len(self))

    def pop(
        self,
        batch_keys: Sequence[str] = (),
        non_tensor_batch_keys: Sequence[str] = (),
        meta_info_keys: Sequence[str] = (),
    ) -> tuple["DataProto", "DataProto"]:
        """Return two batches: the named columns and entries, and the rest."""
        popped = self.select(batch_keys, non_tensor_batch_keys, meta_info_keys)
        rest = self.select(
            [name for name in self.tensors() if name not in batch_keys],
            [name for name in self.non_tensor_batch if name not in non_tensor_batch_keys],
            [name for name in self.meta_info if name not in meta_info_keys],
        )
        return popped, rest

    def union(self, other: "DataProto") -> "DataProto":
        """Return the columns and entries of both.

        Raises:
            ValueError: A name is in both with different values (NaN equals NaN).
        """
        rows = {self._rows_or_none(), other._rows_or_none()} - {None}
        if len(rows) > 1:
            raise ValueError(f"union of {len(self)} and {len(other)} rows")
        return _build(
            merged("batch", self.tensors(), other.tensors()),
            merged("non_tensor_batch", self.non_tensor_batch, other.non_tensor_batch),
            merged("meta_info", self.meta_info, other.meta_info),
            max(len(self), len(other)),
        )

    # ---- between processes and on disk

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickle: tensors as numpy arrays.

        Pickle protocol 5, which Ray uses, moves arrays without copies. torch's own pickling copies,
        and sends the whole storage behind a view of a few rows. Numbers per row are joined into
        bytes per dtype, because each array costs more time than a rank's rows of it.
        """
        tensors = self.tensors()
        names: dict[torch.dtype, list[str]] = {dtype: [] for dtype in _JOINED}
        for name, tensor in tensors.items():
            if tensor.ndim == 1 and tensor.dtype in names and tensor.device.type == "cpu":
                names[tensor.dtype].append(name)
        in_one = {name for own in names.values() for name in own}
        return {
            "rows": len(self),
            "names": list(tensors),
            "joined": [
                (own, _JOINED[dtype], b"".join(tensors[n].detach().numpy().tobytes() for n in own))
                for dtype, own in names.items()
                if own
            ],
            "tensors": {n: _to_numpy(t) for n, t in tensors.items() if n not in in_one},
            "non_tensor_batch": {n: _by_field(c) for n, c in self.non_tensor_batch.items()},
            "meta_info": self.meta_info,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        found = {name: _from_numpy(*array) for name, array in state["tensors"].items()}
        for names, dtype, values in state["joined"]:
            array = np.frombuffer(values, dtype).reshape(len(names), state["rows"])
            found |= zip(names, _from_numpy(array, None).unbind(), strict=True)
        tensors = {name: found[name] for name in state["names"]}
        object.__setattr__(self, "batch", _tensordict(tensors, state["rows"]))
        columns = {name: _by_row(column) for name, column in state["non_tensor_batch"].items()}
        object.__setattr__(self, "non_tensor_batch", columns)
        object.__setattr__(self, "meta_info", state["meta_info"])

    def save_to_disk(self, folder: str | Path) -> None:
        """Write tensors.safetensors and rest.json into `folder`.

        Objects and meta_info must be JSON values; numpy values are converted. A column of
        one-dimensional arrays of one dtype (a ragged column) is read as it was.
        """
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        tensors = {
            name: tensor.detach().cpu().contiguous() for name, tensor in self.tensors().items()
        }
        ragged = {n: c for n, c in self.non_tensor_batch.items() if _is_ragged(c)}
        tensors |= {name: torch.from_numpy(np.concatenate(c)) for name, c in ragged.items()}
        rest = {
            "rows": len(self),
            "lengths": {name: [len(row) for row in c] for name, c in ragged.items()},
            "non_tensor_batch": {
                name: column.tolist()
                for name, column in self.non_tensor_batch.items()
                if name not in ragged
            },
            "meta_info": self.meta_info,
        }
        text = json.dumps(rest, default=_jsonable, ensure_ascii=False)
        # safetensors does not accept columns that share memory, such as views of one tensor.
        save_file(
            {name: tensor.clone() for name, tensor in tensors.items()}, path / "tensors.safetensors"
        )
        (path / "rest.json").write_text(text, encoding="utf-8")

    @staticmethod
    def load_from_disk(folder: str | Path) -> "DataProto":
        """Read a folder of save_to_disk. Nothing is unpickled, so the folder cannot run code."""
        path = Path(folder)
        rest = json.loads((path / "rest.json").read_text(encoding="utf-8"))
        tensors = load_file(path / "tensors.safetensors")
        objects = {name: object_array(values) for name, values in rest["non_tensor_batch"].items()}
        for name, lengths in rest.get("lengths", {}).items():
            rows = np.split(tensors.pop(name).numpy(), np.cumsum(lengths[:-1], dtype=np.int64))
            objects[name] = object_array(rows)
        return _build(tensors, objects, rest["meta_info"], rest["rows"])


def near_equal_bounds(rows: int, n: int) -> list[tuple[int, int]]:
    """Return n consecutive (start, stop) ranges over `rows`.

    Their sizes differ by at most one, longer ranges first; some are empty if rows < n.
    """
    size, longer = divmod(rows, n)
    starts = [i * size + min(i, longer) for i in range(n + 1)]
    return list(zip(starts[:-1], starts[1:], strict=True))


def object_array(values: Any) -> np.ndarray:
    """Return an object array with one element per entry.

    numpy would turn entries that are lists of the same length into a matrix.
    """
    if isinstance(values, np.ndarray) and values.dtype == object and values.ndim == 1:
        return values
    if isinstance(values, np.ndarray):
        values = values.tolist()  # Python's own numbers and strings
    return np.fromiter(values, object, len(values))


def _build(
    tensors: Mapping[str, torch.Tensor],
    objects: dict[str, np.ndarray],
    meta_info: dict[str, Any],
    rows: int | None = None,
) -> DataProto:
    """Return a DataProto. rows: None takes the length of the first column, 0 without columns."""
    if rows is None:
        columns: list[Any] = [*tensors.values(), *objects.values()]
        rows = next((column.shape[0] for column in columns if column.ndim), 0)
    return DataProto(_tensordict(tensors, rows), objects, meta_info)


def _tensordict(tensors: Mapping[str, torch.Tensor], rows: int) -> TensorDict:
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or tensor.ndim == 0:
            raise ValueError(
                f"batch[{name!r}] must be a tensor whose first dimension counts rows, got "
                f"{type(tensor).__name__}"
            )
        if tensor.shape[0] != rows:
            raise ValueError(
                f"batch[{name!r}] has {tensor.shape[0]} rows, but the batch has {rows}"
            )
    return TensorDict(dict(tensors), batch_size=[rows])


def _row_numbers(rows: Rows, count: int) -> torch.Tensor:
    """Convert a row selection other than a slice to an int64 tensor on the CPU."""
    index = torch.as_tensor(np.asarray(rows) if not isinstance(rows, torch.Tensor) else rows).cpu()
    if index.numel() == 0:
        return torch.zeros(0, dtype=torch.int64)
    if index.ndim != 1:
        raise ValueError(f"rows must be a one-dimensional list, got shape {tuple(index.shape)}")
    if index.dtype == torch.bool:
        if len(index) != count:
            raise ValueError(f"boolean row mask of {len(index)} entries for {count} rows")
        return index.nonzero().squeeze(1)
    if index.is_floating_point():
        raise ValueError("rows must be integers or a boolean mask, got floats")
    index = index.to(torch.int64)
    low, high = int(index.min()), int(index.max())
    if low < -count or high >= count:
        row = high if high >= count else low
        raise IndexError(f"row {row} does not exist in a batch with {count} rows")
    return torch.where(index < 0, index + count, index)


def _pick(columns: Mapping[str, Any], names: Sequence[str] | None, kind: str) -> dict[str, Any]:
    if names is None:
        return dict(columns)
    missing = [name for name in names if name not in columns]
    if missing:
        raise KeyError(f"{kind} has no {missing}; it has {sorted(columns)}")
    return {name: columns[name] for name in names}


def _by_field(column: np.ndarray) -> list[Any] | tuple[Any, list[tuple[Any, ...]]]:
    """Return the rows; of one kind of NamedTuple (the class, a tuple per field), which is pickled
    in a tenth of the time."""
    kinds = set(map(type, column))
    kind = kinds.pop() if len(kinds) == 1 else None
    by_field = hasattr(kind, "_fields")
    return (kind, list(zip(*column, strict=True))) if by_field else column.tolist()


def _by_row(column: list[Any] | tuple[Any, list[tuple[Any, ...]]]) -> np.ndarray:
    """Undo `_by_field`."""
    if isinstance(column, tuple):
        kind, fields = column
        column = [*map(partial(tuple.__new__, kind), zip(*fields, strict=True))]
    return object_array(column)


_JOINED = {torch.int64: "i8", torch.float32: "f4", torch.float64: "f8", torch.bool: "?"}
"""numpy's names of the dtypes of numbers per row."""
_CARRIER = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Integer types by size. They carry bfloat16 and float8, which numpy does not have."""


def _to_numpy(tensor: torch.Tensor) -> tuple[np.ndarray, torch.dtype | None]:
    tensor = tensor.detach().cpu().contiguous()
    try:
        return tensor.numpy(), None
    except TypeError:
        return tensor.view(_CARRIER[tensor.element_size()]).numpy(), tensor.dtype


def _from_numpy(array: np.ndarray, dtype: torch.dtype | None) -> torch.Tensor:
    # Arrays from the object store are read-only, about which torch.from_numpy warns and from_dlpack
    # does not. The rule against in-place edits protects them.
    tensor = torch.from_dlpack(array)
    return tensor if dtype is None else tensor.view(dtype)


def _is_ragged(column: np.ndarray) -> bool:
    """Whether all entries are one-dimensional arrays of one dtype that torch has."""
    kinds = {(v.dtype.str, v.ndim) if isinstance(v, np.ndarray) else None for v in column}
    return kinds in [{(dtype, 1)} for dtype in _RAGGED]


_RAGGED = ("|b1", "|i1", "<i4", "<i8", "<f4", "<f8")
"""Dtypes of columns that are saved as one array."""


def _jsonable(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be saved as JSON: {value!r:.80}")


# What joining batches requires of their columns and entries, and how two values are compared

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
