"""verl's functions that add rows to a batch or group its rows, and their inverses."""

from verlite.protocol.data import DataProto, object_array


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Return the batch with rows from its start appended, until size_divisor divides their number,
    and how many they are. A batch without rows stays as it is.
    """
    missing = -len(data) % size_divisor
    rows = [row % len(data) for row in range(len(data) + missing)]
    return (data.select_idxs(rows) if missing else data), missing


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Return the batch without its last pad_size rows.

    Raises:
        ValueError: The batch has fewer rows.
    """
    if not 0 <= pad_size <= len(data):
        raise ValueError(f"pad_size={pad_size} for a batch with {len(data)} rows")
    return data[: len(data) - pad_size]


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """Return the batch with k = rows / new_batch_size neighboring rows in one.

    Tensors [rows, ...] become [new_batch_size, k, ...], objects lists of k.

    Raises:
        ValueError: new_batch_size does not divide the rows.
    """
    rows = len(data)
    if new_batch_size < 1 or not rows or rows % new_batch_size:
        raise ValueError(f"{rows} rows cannot be folded into {new_batch_size}")
    k = rows // new_batch_size
    tensors = {
        name: tensor.reshape(new_batch_size, k, *tensor.shape[1:])
        for name, tensor in data.tensors().items()
    }
    objects = {
        name: object_array([column[row : row + k].tolist() for row in range(0, rows, k)])
        for name, column in data.non_tensor_batch.items()
    }
    return DataProto.from_dict(tensors, objects, data.meta_info)


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """Undo `fold_batch_dim`: tensors [rows, k, ...] become [rows * k, ...], lists k rows each.

    batch_dims: must be 2.

    Raises:
        ValueError: another batch_dims, a column that is not folded, or columns with different k.
    """
    if batch_dims != 2:
        raise ValueError(f"batch_dims={batch_dims}: only 2 dimensions can be unfolded")
    flat = [name for name, tensor in data.tensors().items() if tensor.ndim < 2]
    for name, column in data.non_tensor_batch.items():
        flat += [name] * (not all(isinstance(values, list) for values in column))
    if flat:
        raise ValueError(f"columns {flat} are not folded: they have one value per row")
    tensors = {name: tensor.flatten(0, 1) for name, tensor in data.tensors().items()}
    objects = {
        name: object_array([value for values in column for value in values])
        for name, column in data.non_tensor_batch.items()
    }
    return DataProto.from_dict(tensors, objects, data.meta_info)
