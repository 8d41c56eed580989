"""Convert ragged columns to padded tensors and back."""

import numpy as np
import pytest
import torch

from verlite.protocol import fields
from verlite.protocol.data import DataProto
from verlite.protocol.ragged import clear_rows, pad, padded, ragged


def thin(rows, **more) -> DataProto:
    """Return a batch of rows (prompt ids, response ids, mask, log-probs)."""
    return DataProto.from_dict(
        {
            "prompt_length": torch.tensor([len(row[0]) for row in rows]),
            "response_length": torch.tensor([len(row[1]) for row in rows]),
            "sampled_tokens": torch.tensor([sum(row[2]) for row in rows]),
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


def test_padded_rows_equal_hand_computed_values():
    batch = padded(thin(ROWS))
    t = batch.batch
    assert t["prompts"].tolist() == [[0, 5, 6], [7, 8, 9]]
    assert t["responses"].tolist() == [[10, 0, 11], [12, 0, 0]]
    assert t["input_ids"].tolist() == [[0, 5, 6, 10, 0, 11], [7, 8, 9, 12, 0, 0]]
    # The sampled 0 in the first row is a real token although padding is 0 too: lengths decide.
    assert t["attention_mask"].tolist() == [[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]
    assert t["position_ids"].tolist() == [[0, 0, 1, 2, 3, 4], [0, 1, 2, 3, 3, 3]]
    assert t["response_mask"].tolist() == [[1, 0, 1], [1, 0, 0]]
    assert t["rollout_log_probs"].tolist() == [[-0.5, 0.0, -1.5], [-2.0, 0.0, 0.0]]
    fields.check(batch)
    fields.check(thin(ROWS))


def test_a_cleared_row_has_no_mask_and_shares_the_others():
    batch = thin(ROWS)
    mask = batch.non_tensor_batch["response_mask"]
    lengths = batch.batch["response_length"]
    cleared = clear_rows(mask, lengths, torch.tensor([False, True]))
    assert cleared[0] is mask[0] and cleared[1].tolist() == [0]
    assert mask[1].tolist() == [1], "the old column does not change"
    batch = batch.with_non_tensor(response_mask=cleared)
    batch = batch.with_batch(sampled_tokens=torch.tensor([2, 0]))
    assert padded(batch).batch["response_mask"].tolist() == [[1, 0, 1], [0, 0, 0]]


def with_loss_mask(batch) -> DataProto:
    """Return a batch where the last token of the first row is not trained."""
    batch = batch.with_non_tensor(loss_mask=[np.array([1, 0, 0]), np.array([1])])
    return batch.with_batch(trained_tokens=torch.tensor([1, 1]))


def test_the_loss_mask_is_a_column_beside_the_response_mask():
    t = padded(with_loss_mask(thin(ROWS))).batch
    assert t["response_mask"].tolist() == [[1, 0, 1], [1, 0, 0]]
    assert t["loss_mask"].tolist() == [[1, 0, 0], [1, 0, 0]]


def test_one_number_per_row_is_expanded_over_the_mask():
    batch = thin(ROWS).with_batch(advantages=torch.tensor([[2.0], [-1.0]]))
    assert padded(batch).batch["advantages"].tolist() == [[2, 0, 2], [-1, 0, 0]]
    t = padded(with_loss_mask(batch)).batch
    assert t["advantages"].tolist() == [[2, 0, 0], [-1, 0, 0]]
    alone = padded(thin(ROWS[1:]).with_batch(advantages=torch.tensor([[-1.0]])))
    assert alone.batch["advantages"].tolist() == [[-1]]


def test_columns_without_tokens_are_padded_to_the_rows_lengths():
    batch = thin(ROWS).select(non_tensor_batch_keys=["rollout_log_probs"])
    t = padded(batch).batch
    assert t["rollout_log_probs"].tolist() == [[-0.5, 0.0, -1.5], [-2.0, 0.0, 0.0]]
    assert "input_ids" not in t.keys()


@pytest.mark.parametrize(
    ("mask", "count"), [("response_mask", "sampled_tokens"), ("loss_mask", "trained_tokens")]
)
def test_a_mask_of_other_rows_is_an_error(mask, count):
    """Each mask is compared with the row's number of tokens."""
    batch = with_loss_mask(thin(ROWS))
    if mask == "loss_mask":
        batch = batch.with_non_tensor(loss_mask=[np.array([1, 1, 1]), np.array([1])])
        found = "row 0 has trained_tokens=1, but its loss_mask has 3 tokens"
    else:
        swapped = batch.non_tensor_batch["response_mask"][::-1].copy()
        batch = batch.with_non_tensor(response_mask=swapped)
        found = "row 0 has sampled_tokens=2, but its response_mask has 1 tokens"
    with pytest.raises(ValueError, match=f"{found}: these are another row's tokens"):
        padded(batch)


def test_empty_responses_and_empty_batches_have_width_one():
    empty = padded(thin([([5], [], [], [])])).batch
    assert (
        empty["responses"].shape == (1, 1)
        and not empty["response_mask"].any()
        and empty["attention_mask"].tolist() == [[1, 0]]
    )
    none = padded(thin(ROWS)[:0]).batch
    assert none["responses"].shape == (0, 1) and none["input_ids"].shape == (0, 2)


def test_ragged_inverts_padding():
    batch = padded(thin(ROWS))
    rows = ragged(batch.batch["rollout_log_probs"], batch.batch["response_length"])
    assert [row.tolist() for row in rows] == [[-0.5, 0.0, -1.5], [-2.0]]
    assert all(row.base is None for row in rows), "a view would keep and send the padding"


def test_padding_is_on_the_requested_side():
    assert pad([[1, 2], [3]], 3, torch.int64, "left").tolist() == [[0, 1, 2], [0, 0, 3]]
    assert pad([[1.5], []], 2, torch.float32).tolist() == [[1.5, 0.0], [0.0, 0.0]]
