"""From ragged columns to padded tensors and back."""

import numpy as np
import pytest
import torch

from verlite.protocol import fields
from verlite.protocol.data import DataProto
from verlite.protocol.ragged import pad, padded, ragged


def thin(rows, **more) -> DataProto:
    """rows: (prompt ids, response ids, mask, log-probs)."""
    return DataProto.from_dict(
        {
            "prompt_length": torch.tensor([len(row[0]) for row in rows]),
            "response_length": torch.tensor([len(row[1]) for row in rows]),
            "trained_tokens": torch.tensor([sum(row[2]) for row in rows]),
        },
        {
            "prompt_ids": [np.array(row[0]) for row in rows],
            "response_ids": [np.array(row[1]) for row in rows],
            "response_mask": [np.array(row[2]) for row in rows],
            "rollout_log_probs": [np.array(row[3]) for row in rows],
            **more,
        },
    )


ROWS = [([5, 6], [10, 0, 11], [1, 0, 1], [-0.5, 0.0, -1.5]), ([7, 8, 9], [12], [1], [-2.0])]


def test_padded_rows_by_hand():
    batch = padded(thin(ROWS))
    t = batch.batch
    assert t["prompts"].tolist() == [[0, 5, 6], [7, 8, 9]]
    assert t["responses"].tolist() == [[10, 0, 11], [12, 0, 0]]
    assert t["input_ids"].tolist() == [[0, 5, 6, 10, 0, 11], [7, 8, 9, 12, 0, 0]]
    # The sampled 0 in the first row is a real token although padding is 0 too: lengths decide, not values.
    assert t["attention_mask"].tolist() == [[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]
    assert t["position_ids"].tolist() == [[0, 0, 1, 2, 3, 4], [0, 1, 2, 3, 3, 3]]
    assert t["response_mask"].tolist() == [[1, 0, 1], [1, 0, 0]]
    assert t["rollout_log_probs"].tolist() == [[-0.5, 0.0, -1.5], [-2.0, 0.0, 0.0]]
    fields.check(batch)
    fields.check(thin(ROWS))


def test_rows_without_a_vote_and_rejected_tokens_are_not_trained():
    silent = thin(ROWS).with_batch(trained_tokens=torch.tensor([2, 0]))
    assert padded(silent).batch["response_mask"].tolist() == [[1, 0, 1], [0, 0, 0]]
    left = thin(ROWS, rejected_tokens=[np.array([False, False, True]), np.array([False])])
    left = left.with_batch(trained_tokens=torch.tensor([1, 1]))
    assert padded(left).batch["response_mask"].tolist() == [[1, 0, 0], [1, 0, 0]]


def test_one_number_of_a_row_is_spread_over_its_trained_tokens():
    batch = padded(thin(ROWS).with_batch(advantages=torch.tensor([[2.0], [-1.0]])))
    assert batch.batch["advantages"].tolist() == [[2, 0, 2], [-1, 0, 0]]
    alone = padded(thin(ROWS[1:]).with_batch(advantages=torch.tensor([[-1.0]])))
    assert alone.batch["advantages"].tolist() == [[-1]]


def test_another_rows_tokens_are_noticed():
    batch = thin(ROWS)
    swapped = batch.with_non_tensor(
        response_mask=batch.non_tensor_batch["response_mask"][::-1].copy()
    )
    with pytest.raises(
        ValueError,
        match="row 0 has trained_tokens=2, but its response_mask has 1: these are another row's tokens",
    ):
        padded(swapped)


def test_empty_responses_and_no_rows_at_all_have_a_width():
    empty = padded(thin([([5], [], [], [])])).batch
    assert (
        empty["responses"].shape == (1, 1)
        and not empty["response_mask"].any()
        and empty["attention_mask"].tolist() == [[1, 0]]
    )
    none = padded(thin(ROWS)[:0]).batch
    assert none["responses"].shape == (0, 1) and none["input_ids"].shape == (0, 2)


def test_ragged_is_the_way_back():
    batch = padded(thin(ROWS))
    rows = ragged(batch.batch["rollout_log_probs"], batch.batch["response_length"])
    assert [row.tolist() for row in rows] == [[-0.5, 0.0, -1.5], [-2.0]]
    assert all(row.base is None for row in rows), "a view would keep the padding alive, and send it"


def test_pad_sides():
    assert pad([[1, 2], [3]], 3, torch.int64, "left").tolist() == [[0, 1, 2], [0, 0, 3]]
    assert pad([[1.5], []], 2, torch.float32).tolist() == [[1.5, 0.0], [0.0, 0.0]]
