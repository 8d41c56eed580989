"""Metrics of staleness against hand-worked values, naive loops and invariances."""

import random

import pytest
import torch

from verlite.algorithms.gap import age_metrics, length_distance


def test_ages_of_tokens():
    """Step 7: three tokens of age 0, five of age 1 and two of age 3; one of three rows is mixed."""
    spans = [[(4, 2), (6, 1)], [(6, 4)], [(7, 3)], [(2, 0)], []]
    assert age_metrics(7, spans) == {
        "age/mean": (5 * 1 + 2 * 3) / 10,
        "age/max": 3.0,
        "age/min": 0.0,
        "age/share_0": 0.3,
        "age/share_1": 0.5,
        "age/share_2": 0.0,
        "age/share_3": 0.2,
        "age/mixed_rows": 1 / 3,
    }


def test_synchronous_training_has_age_0():
    found = age_metrics(3, [[(3, 5)], [(3, 1)]])
    assert found == {
        "age/mean": 0.0, "age/max": 0.0, "age/min": 0.0, "age/share_0": 1.0, "age/mixed_rows": 0.0,
    }  # fmt: skip
    assert age_metrics(3, [[], [(1, 0)]]) == {}


def test_ages_do_not_depend_on_how_tokens_are_split_into_spans_and_rows():
    draw = random.Random(0)
    versions = [draw.randint(2, 6) for _ in range(50)]
    apart = age_metrics(6, [[(version, 1)] for version in versions])
    together = age_metrics(6, [[(version, 1) for version in versions]])
    assert apart.pop("age/mixed_rows") == 0.0 and together.pop("age/mixed_rows") == 1.0
    assert apart == together
    assert sum(apart[f"age/share_{age}"] for age in range(5)) == pytest.approx(1.0)


def naive_distance(some, others):
    return max(
        abs(sum(x <= at for x in some) / len(some) - sum(x <= at for x in others) / len(others))
        for at in {*some, *others}
    )


@pytest.mark.parametrize("seed", range(20))
def test_length_distance_agrees_with_a_naive_reference(seed):
    draw = random.Random(seed)
    some = [draw.randint(1, 30) for _ in range(draw.randint(1, 60))]  # with ties
    others = [draw.randint(1, 20 + seed) for _ in range(draw.randint(1, 60))]
    found = length_distance(torch.tensor(some), torch.tensor(others))
    assert found == pytest.approx(naive_distance(some, others), abs=1e-12)
    assert length_distance(torch.tensor(others), torch.tensor(some)) == found
    longer = [[x**2 + 1 for x in lengths] for lengths in (some, others)]
    assert length_distance(*map(torch.tensor, longer)) == found


def test_length_distance_of_hand_worked_lengths():
    """A batch without the longest of four responses: 3/3 against 3/4."""
    sampled = torch.tensor([10, 20, 30, 900])
    assert length_distance(sampled, sampled[[3, 1, 0, 2]]) == 0.0
    assert length_distance(sampled[:3], sampled) == 0.25
    assert length_distance(torch.tensor([1, 2]), torch.tensor([3])) == 1.0
    assert length_distance(sampled[:0], sampled) is None
