"""Values of each aggregation mode, and their independence of micro-batch and rank splits."""

import pytest
import torch

from tests.algorithms.differential import COMPARISONS, check
from verlite.algorithms.aggregation import AGGREGATION_MODES, token_weights


def test_hand_values() -> None:
    """Two sequences of length 1 and 9 with losses 1 and 2 per token."""
    mask = torch.zeros(2, 12)
    mask[0, 0], mask[1, :9] = 1, 1
    losses = torch.tensor([[1.0], [2.0]]).expand(2, 12)
    got = {
        m: float((losses * token_weights(mask, m, tokens=10, sequences=2, scale=20)).sum())
        for m in AGGREGATION_MODES
    }
    want = {
        "token-mean": 1.9,
        "token-sum": 19,
        "seq-mean-token-sum": 9.5,
        "seq-mean-token-mean": 1.5,
        "seq-mean-token-sum-norm": 0.475,
    }
    assert got == pytest.approx(want)


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_agrees_with_the_naive_reference_and_any_split(mode: str) -> None:
    check(COMPARISONS["Aggregation"][mode])


def test_empty_mask_gives_zero_weights() -> None:
    for mode in AGGREGATION_MODES:
        assert (token_weights(torch.zeros(2, 3), mode, tokens=0, sequences=0, scale=1) == 0).all()


def test_errors() -> None:
    with pytest.raises(ValueError, match="unknown loss_agg_mode 'mean'.*token-mean"):
        token_weights(torch.ones(1, 1), "mean", tokens=1, sequences=1)
    with pytest.raises(ValueError, match="loss_scale_factor=None must be above 0"):
        token_weights(torch.ones(1, 1), "seq-mean-token-sum-norm", tokens=1, sequences=1)
