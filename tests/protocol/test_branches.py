"""Rows with several sequences, one row each for a model and back."""

import numpy as np
import pytest
import torch

from tests.protocol.test_ragged import thin
from verlite.protocol import fields
from verlite.protocol.branches import split
from verlite.protocol.ragged import padded

LINEAR = ([5, 6], [10, 11], [1, 1], [-1.0, -2.0])
BRANCHED = (
    [1, 2],
    [3, 4, 5, 6, 1, 2, 3, 4, 5, 7, 8, 9, 10],
    [1, 1, 0, 1, 0, 0, 0, 0, 0, 1, 1, 0, 1],
    [-3.0, -4, 0, -6, 0, 0, 0, 0, 0, -7, -8, 0, -10],
)
"""Prompt 1 2; answer 3 4, given 5, answer 6; after 5 again 7 8; a sub-agent: given 9, answer 10."""
LENGTHS = [(2, 4), (5, 2), (1, 1)]


def rows():
    batch = thin([LINEAR, BRANCHED], branches=[[(2, 2)], LENGTHS])
    return padded(batch.with_batch(scores=torch.tensor([0.5, 0.25])))


def test_rows_worked_out_by_hand():
    found, _ = split(rows())
    fields.check(found)
    t = found.batch
    assert t["prompts"].tolist() == [
        *([0, 0, 0, 5, 6], [0, 0, 0, 1, 2]),
        *([1, 2, 3, 4, 5], [0, 0, 0, 0, 9]),
    ]
    assert t["responses"].tolist() == [[10, 11, 0, 0], [3, 4, 5, 6], [7, 8, 0, 0], [10, 0, 0, 0]]
    assert t["input_ids"].tolist() == torch.cat([t["prompts"], t["responses"]], 1).tolist()
    assert t["attention_mask"].tolist() == [
        [0, 0, 0, 1, 1, 1, 1, 0, 0],
        [0, 0, 0, 1, 1, 1, 1, 1, 1],
        [1, 1, 1, 1, 1, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 1, 0, 0, 0],
    ]
    assert t["position_ids"][2].tolist() == [0, 1, 2, 3, 4, 5, 6, 6, 6]
    assert t["response_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 0, 1], [1, 1, 0, 0], [1, 0, 0, 0]]
    assert t["rollout_log_probs"].tolist() == [
        *([-1, -2, 0, 0], [-3, -4, 0, -6]),
        *([-7, -8, 0, 0], [-10, 0, 0, 0]),
    ]
    assert t["scores"].tolist() == [0.5, 0.25, 0.25, 0.25]
    assert t["sampled_tokens"].tolist() == [2, 6, 6, 6], "of the sample"
    assert t["prompt_length"].tolist() == [2, 2, 5, 1]
    assert t["response_length"].tolist() == [2, 4, 2, 1]
    assert t["first_branch"].tolist() == [1, 1, 0, 0]


def test_numbers_of_the_sequences_go_back_to_their_rows():
    batch = rows()
    _, places = split(batch)
    log_probs = batch.batch["rollout_log_probs"]
    assert places.put(places.take(log_probs)).equal(log_probs)


def test_the_first_branch_is_the_first_that_is_trained():
    batch = rows()
    mask = batch.batch["response_mask"].clone()
    mask[1, :4] = 0
    mask[0] = 0
    found, _ = split(batch.with_batch(response_mask=mask))
    assert found.batch["first_branch"].tolist() == [0, 0, 1, 0]


def test_a_batch_without_branches_is_returned_as_it_is():
    batch = padded(thin([LINEAR]))
    assert split(batch) == (batch, None)


def test_no_rows_and_rows_without_response():
    empty, places = split(rows()[[]])
    assert len(empty) == 0 and places.put(torch.zeros(0, 1)).shape == (0, 13)
    alone = padded(thin([([5], [], [], [])], branches=[[(1, 0)]]))
    found, places = split(alone)
    assert found.batch["attention_mask"].tolist() == [[1, 0]]
    assert found.batch["first_branch"].tolist() == [0]


def test_lengths_of_another_row_are_an_error():
    batch = rows()
    swapped = batch.non_tensor_batch["branches"][::-1].copy()
    with pytest.raises(ValueError, match=r"row 0 has 4 tokens, but its sequences .* have 15"):
        split(batch.with_non_tensor(branches=np.array(swapped, dtype=object)))
