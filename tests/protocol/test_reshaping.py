"""Rows that are added, and rows in one, with their inverses."""

import pytest
import torch

from verlite.protocol.data import DataProto
from verlite.protocol.reshaping import (
    fold_batch_dim,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    unpad_dataproto,
)


def batch(rows: int) -> DataProto:
    tensors = {"a": torch.arange(rows), "b": torch.arange(rows * 2).reshape(rows, 2)}
    objects = {"uid": [f"u{row}" for row in range(rows)], "list": [[row] for row in range(rows)]}
    return DataProto.from_dict(tensors, objects, {"step": 1})


@pytest.mark.parametrize(
    ("rows", "divisor", "expected"),
    [(3, 2, [0, 1, 2, 0]), (2, 7, [0, 1, 0, 1, 0, 1, 0]), (4, 2, [0, 1, 2, 3]), (0, 2, [])],
)
def test_padding_to_a_divisor(rows, divisor, expected):
    padded, added = pad_dataproto_to_divisor(batch(rows), size_divisor=divisor)
    assert padded.batch["a"].tolist() == expected and added == len(expected) - rows
    assert padded.non_tensor_batch["uid"].tolist() == [f"u{row}" for row in expected]
    back = unpad_dataproto(padded, pad_size=added)
    assert back.batch["a"].tolist() == list(range(rows)) and back.meta_info == {"step": 1}


def test_fold_and_unfold():
    folded = fold_batch_dim(batch(6), new_batch_size=2)
    assert len(folded) == 2 and folded.meta_info == {"step": 1}
    assert folded.batch["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert folded.batch["b"].shape == (2, 3, 2)
    assert folded.non_tensor_batch["uid"].tolist() == [["u0", "u1", "u2"], ["u3", "u4", "u5"]]
    again = unfold_batch_dim(folded[[1, 0]])
    assert again.batch["a"].tolist() == [3, 4, 5, 0, 1, 2]
    assert again.batch["b"].tolist()[0] == [6, 7]
    assert again.non_tensor_batch["list"].tolist() == [[3], [4], [5], [0], [1], [2]]
    with pytest.raises(ValueError, match="6 rows cannot be folded into 4"):
        fold_batch_dim(batch(6), 4)
    with pytest.raises(ValueError, match="batch_dims=3"):
        unfold_batch_dim(folded, 3)
    with pytest.raises(ValueError, match="0 rows cannot be folded into 2"):
        fold_batch_dim(batch(0), 2)


def test_columns_that_are_not_folded_are_not_unfolded():
    """Otherwise texts would become their characters."""
    with pytest.raises(ValueError, match=r"columns \['uid'\] are not folded"):
        unfold_batch_dim(batch(2).select([], ["uid"]))
    with pytest.raises(ValueError, match=r"columns \['a', 'uid'\] are not folded"):
        unfold_batch_dim(batch(2))


@pytest.mark.parametrize("added", [-1, 4])
def test_more_padding_than_rows(added):
    with pytest.raises(ValueError, match=f"pad_size={added} for a batch with 3 rows"):
        unpad_dataproto(batch(3), added)
