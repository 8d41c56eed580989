"""Hand values and edge cases of score shaping, overlong penalty and group filtering."""

import math

import numpy as np
import pytest
import torch

from verlite.algorithms.advantages import overlong_penalty, rows_with_signal, shape_scores


def test_shape_scores() -> None:
    scores = torch.tensor([3.0, 5.0, 20.0, -20.0])
    assert shape_scores(scores, mean=3, std=2).tolist() == [0, 1, 8.5, -11.5]
    assert shape_scores(scores, mean=3, std=2, clip=(-10, 5)).tolist() == [0, 1, 5, -10]
    for std in (0, -1, math.nan):
        with pytest.raises(ValueError, match=f"^std={std} must be above 0"):
            shape_scores(scores, std=std)
    for clip in ((1, 1), (2, -2), (math.nan, 1)):
        with pytest.raises(ValueError, match=r"^clip=\(\S+, \S+\) needs a lower bound below"):
            shape_scores(scores, clip=clip)


def test_overlong_penalty() -> None:
    lengths = torch.tensor([0, 80, 81, 90, 100, 130])
    got = overlong_penalty(lengths, max_length=100, buffer=20, factor=2.0)
    torch.testing.assert_close(got, torch.tensor([0.0, 0.0, -0.1, -1.0, -2.0, -2.0]))
    for buffer in (0, 101):
        with pytest.raises(ValueError, match=f"^buffer={buffer} must be from 1 to max_length=100"):
            overlong_penalty(lengths, 100, buffer)


def test_rows_with_signal() -> None:
    uid = np.array(["a", "b", "a", "b", "c", "d", "d", "e", "e"], dtype=object)
    metric = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0, math.nan, 1.0])
    valid = torch.tensor([True] * 6 + [False, False, True])
    # Scores in a differ. Scores in b are equal. c has one row. d and e have one valid row each,
    # and the metric of the failed row in e is NaN.
    assert rows_with_signal(metric, uid, valid).tolist() == [
        True,
        False,
        True,
        False,
        False,
        False,
        False,
        False,
        False,
    ]
    assert rows_with_signal(metric[:7], uid[:7]).tolist() == [
        True,
        False,
        True,
        False,
        False,
        True,
        True,
    ]
