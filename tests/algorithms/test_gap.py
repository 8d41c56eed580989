"""Metrics of the gap between trainer and rollout engine, on whole tensors and on parts."""

import math

import pytest
import torch

from verlite.algorithms.gap import gap_metrics, gap_sums


def draw():
    generator = torch.Generator().manual_seed(0)
    mask = (torch.rand(6, 9, generator=generator) > 0.3).long()
    mask[2] = 0
    a = -torch.rand(6, 9, generator=generator) * 3
    b = a + 0.1 * torch.randn(6, 9, generator=generator)
    # Masked entries may have any value.
    a[mask == 0] = torch.nan
    b[mask == 0] = -torch.inf
    return a, b, mask


SIZES = [f"training/rollout_eff_sample_size_{level}" for level in ("token", "seq")]


def sample_size(old, rollout, mask, level):
    """A naive reference: (sum w)^2 / (n * sum w^2) in loops."""
    weights = []
    for row in range(len(old)):
        logs = [float(old[row, i]) - float(rollout[row, i]) for i in mask[row].nonzero().flatten()]
        if level == "seq" and logs:
            logs = [sum(logs)]
        weights += [math.exp(log) for log in logs]
    return sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights))


def test_effective_sample_size_of_hand_worked_weights():
    """Tokens: w = 1, 3, 2, 1 of mean 1.75 and mean square 3.75. Rows: 3 and 2."""
    rollout = torch.full((3, 2), -5.0)
    ratios = torch.tensor([[1.0, 3.0], [2.0, 1.0], [9.0, 9.0]])
    mask = torch.tensor([[1, 1], [1, 1], [0, 0]])
    found = gap_metrics(gap_sums(rollout + ratios.log(), rollout, mask))
    assert [found[key] for key in SIZES] == pytest.approx([1.75**2 / 3.75, 2.5**2 / 6.5])


def test_effective_sample_size_is_1_if_all_weights_are_equal():
    old, _, mask = draw()
    found = gap_metrics(gap_sums(old + 0.5, old, mask))
    assert found["training/rollout_eff_sample_size_token"] == pytest.approx(1.0, rel=1e-12)
    equal_lengths = torch.ones_like(mask)
    found = gap_metrics(gap_sums(old.nan_to_num() + 0.5, old.nan_to_num(), equal_lengths))
    assert found["training/rollout_eff_sample_size_seq"] == pytest.approx(1.0, rel=1e-12)


def test_metrics_equal_whole_tensor_formulas():
    a, b, mask = draw()
    x, y = a[mask == 1].double(), b[mask == 1].double()
    diff = (x.exp() - y.exp()).abs()
    assert gap_metrics(gap_sums(a, b, mask)) == pytest.approx(
        {
            "training/log_prob_gap": (x - y).abs().mean().item(),
            "training/log_prob_gap_max": (x - y).abs().max().item(),
            "training/rollout_probs_diff_valid": 1.0,
            "training/rollout_probs_diff_mean": diff.mean().item(),
            "training/rollout_probs_diff_max": diff.max().item(),
            "training/rollout_probs_diff_std": diff.std().item(),
            "training/rollout_actor_probs_pearson_corr": torch.corrcoef(
                torch.stack([x.exp(), y.exp()])
            )[0, 1].item(),
            **{key: sample_size(a, b, mask, key.rpartition("_")[2]) for key in SIZES},
        },
        rel=1e-9,
    )


def test_sums_over_parts_add_up():
    a, b, mask = draw()
    parts = [gap_sums(a[rows], b[rows], mask[rows]) for rows in ([0, 1, 2], [2], [3], [4, 5])]
    total = {
        name: (max if name.endswith("_max") else sum)(part[name] for part in parts)
        for name in parts[0]
    }
    assert gap_metrics(total) == pytest.approx(gap_metrics(gap_sums(a, b, mask)), rel=1e-12)


def test_empty_mask_gives_no_metrics_and_equal_log_probs_no_gap():
    a, _, mask = draw()
    assert gap_metrics(gap_sums(a, a, torch.zeros_like(mask))) == {}
    assert gap_metrics({}) == {}
    same = gap_metrics(gap_sums(a, a, mask))
    assert same["training/log_prob_gap"] == 0 and same[
        "training/rollout_actor_probs_pearson_corr"
    ] == pytest.approx(1)
    one = torch.full((2, 2), -0.5)
    assert (
        gap_metrics(gap_sums(one, one, torch.ones(2, 2)))[
            "training/rollout_actor_probs_pearson_corr"
        ]
        == 0
    )
