"""Masked reductions against plain Python, with NaN in masked entries and with empty masks."""

import math
import statistics

import pytest
import torch

from verlite.algorithms.masked import masked_mean, masked_sum, masked_whiten

X = torch.tensor([[1.0, math.nan, 4.0], [math.inf, 10.0, math.nan]])
MASK = torch.tensor([[1, 0, 1], [0, 1, 0]])


def test_hand_values() -> None:
    assert masked_sum(X, MASK) == 15
    assert masked_sum(X, MASK, dim=1).tolist() == [5, 10]
    assert masked_mean(X, MASK) == 5
    assert masked_mean(X, MASK, dim=0).tolist() == [1, 10, 4]
    deviation = math.sqrt(statistics.variance([1, 4, 10]) + 1e-8)
    torch.testing.assert_close(
        masked_whiten(X, MASK), torch.tensor([[-4, 0, -1], [0, 5, 0]]) / deviation
    )


@pytest.mark.parametrize("function", [masked_sum, masked_mean, masked_whiten])
def test_empty_mask_gives_zero(function) -> None:
    assert (function(X, torch.zeros_like(MASK)) == 0).all()


def test_a_single_entry_whitens_to_zero() -> None:
    assert (masked_whiten(X, torch.tensor([[0, 0, 1], [0, 0, 0]])) == 0).all()


def test_mean_of_an_empty_row_is_zero() -> None:
    assert masked_mean(X, torch.tensor([[0, 0, 0], [0, 1, 0]]), dim=1).tolist() == [0, 10]


def test_whitening_is_accurate_for_a_large_mean() -> None:
    x = 1000 + torch.tensor([0.01, -0.01, 0.03, -0.03])
    got = masked_whiten(x, torch.ones(4))
    x = x.double()
    torch.testing.assert_close(got.double(), (x - x.mean()) / x.std(), rtol=1e-2, atol=1e-2)


def test_masked_entries_have_no_gradient() -> None:
    x = X.clone().requires_grad_()
    masked_mean(x.square(), MASK).backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad[MASK == 1], 2 * X[MASK == 1] / 3)
