"""The table of batch fields: `fields.toml` has name, shape, dtype, writer and meaning of each.

B: rows. P: prompt tokens. R: response tokens. S = P + R. Entry j of a [B, R] field belongs to
response token j, and float fields are 0 on padding and tool text. A [B, R] field may be ragged
(protocol.ragged), or [B, 1] where all tokens of a row have the same number. To add a field, add a
row there.

Masks. Two columns say which tokens count, and no other column does:

- `response_mask` is 1 on tokens that the policy sampled, in rows whose generation and reward
  succeeded. It is used for estimation: KL in the reward, GAE, whitening, rollout metrics.
- `loss_mask` is 1 on tokens that the losses train on (policy, entropy, KL, critic). It is
  `response_mask` without the tokens that rollout correction rejects and, with
  `algorithm.mask_truncated`, without truncated responses. If nothing is removed, both columns have
  the same entries. In an update the engine gets it under the name `response_mask`.

A mask is stored when it changes, together with its number of tokens per row, and is not recombined
from other columns. `valid` is not a mask: it says whether the row has a usable score, which
statistics of its group use.
"""

import difflib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from verlite import toml_tables
from verlite.protocol.data import DataProto


class Field(NamedTuple):
    """One field.

    shape: letters of its dimensions.
    dtype: a name in DTYPES.
    writer: stages of the trainer that write it, or the package that does.
    """

    shape: str
    dtype: str
    writer: str
    meaning: str

    @property
    def types(self) -> torch.dtype | tuple[type, ...]:
        """The entry of DTYPES."""
        return DTYPES[self.dtype]


DTYPES: dict[str, torch.dtype | tuple[type, ...]] = {
    "int64": torch.int64,
    "float32": torch.float32,
    "float64": torch.float64,
    "bool": torch.bool,
    "text": (str,),
    "text or none": (str, type(None)),
    "int": (int,),
    "list": (list,),
    "dict": (dict,),
    "any": (),
}
"""Name -> a torch dtype; for object columns the Python types of an entry, () for any."""
_RAGGED = (np.ndarray, list, tuple)  # a reference is a tuple

FIELDS: dict[str, Field] = {
    name: field
    for section in toml_tables.read(Path(__file__).with_suffix(".toml"), {}, Field).values()
    for name, field in section.items()
}
"""The rows of fields.toml."""

MASK_COUNTS = {"response_mask": "sampled_tokens", "loss_mask": "trained_tokens"}
"""Each mask, and the field with its number of tokens per row."""


def check(data: DataProto) -> DataProto:
    """Return `data` if all of its fields agree with the table.

    Raises:
        ValueError: It lists every disagreement, one per line.
    """
    problems: list[str] = []
    sizes: dict[str, tuple[int, str]] = {"B": (len(data), "the batch")}
    tensors = data.tensors()
    for name in [*tensors, *data.non_tensor_batch]:
        field = FIELDS.get(name)
        if field is None:
            problems.append(_unknown(name))
        elif name in tensors:
            problems += _check_tensor(name, tensors[name], field, sizes)
        else:
            problems += _check_objects(name, data.non_tensor_batch[name], field)
    if {"P", "R", "S"} <= sizes.keys() and sizes["P"][0] + sizes["R"][0] != sizes["S"][0]:
        parts = ", ".join(f"{letter}={sizes[letter][0]} ({sizes[letter][1]})" for letter in "PRS")
        problems.append(f"S must be P + R, but {parts}")
    if problems:
        raise ValueError("batch disagrees with the field table:\n  " + "\n  ".join(problems))
    return data


def check_stage(stage: str, before: DataProto, after: DataProto) -> DataProto:
    """Check what a stage returns: all fields, and that the table names it as writer of new ones.

    It costs a few milliseconds, so it runs in production too.

    Raises:
        ValueError: As `check`, or the stage added a field of another writer.
    """
    check(after)
    old = columns(before)
    for name in columns(after) - old:
        writers = FIELDS[name].writer.split(", ")
        if stage not in writers:
            raise ValueError(
                f"stage {stage} added the field {name}, whose writer is {FIELDS[name].writer}; "
                "correct the stage or protocol/fields.toml"
            )
    return after


def columns(data: DataProto) -> set[str]:
    """Return the names of all columns."""
    return {*data.tensors(), *data.non_tensor_batch}


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name, FIELDS, n=2)
    if near:
        return f"{name}: unknown field; did you mean {' or '.join(near)}?"
    return f"{name}: unknown field; add it to protocol/fields.toml"


def _check_tensor(
    name: str, tensor: torch.Tensor, field: Field, sizes: dict[str, tuple[int, str]]
) -> list[str]:
    if not isinstance(field.types, torch.dtype):
        return [f"{name}: must be an object column, is a tensor"]
    problems = []
    if tensor.dtype != field.types:
        problems.append(f"{name}: dtype must be {field.types}, is {tensor.dtype}")
    letters = field.shape.split()
    if len(letters) != tensor.ndim:
        return [*problems, f"{name}: must be [{field.shape}], has shape {list(tensor.shape)}"]
    for letter, size in zip(letters, tensor.shape, strict=True):
        if letter == "R" and size == 1:  # one number for the whole row
            continue
        known, where = sizes.setdefault(letter, (size, name))
        if size != known:
            problems.append(
                f"{name} [{field.shape}]: {letter} is {size}, but it is {known} in {where}"
            )
    return problems


def _check_objects(name: str, column: np.ndarray, field: Field) -> list[str]:
    allowed = field.types
    if isinstance(allowed, torch.dtype):
        if field.shape != "B R":
            return [f"{name}: must be a tensor [{field.shape}], is an object column"]
        allowed = _RAGGED
    if not allowed:
        return []
    wrong = {kind for kind in set(map(type, column)) if not issubclass(kind, allowed)}
    if not wrong:
        return []
    row = next(i for i, value in enumerate(column) if type(value) in wrong)
    names = " or ".join(kind.__name__ for kind in allowed)
    return [f"{name}: entries must be {names}, row {row} is {type(column[row]).__name__}"]
