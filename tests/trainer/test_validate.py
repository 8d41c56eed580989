"""Validation metrics equal hand-computed values."""

import itertools

import numpy as np
import pytest

from verlite.trainer.validate import validation_metrics


def test_means_by_source_leave_failed_rewards_out():
    metrics = validation_metrics(["a", "a", "b"], ["1", "2", "3"], {"reward": [1.0, 0.0, None]})
    assert metrics == {"val-core/a/reward/mean@1": 0.5}


def test_acc_is_the_core_variable_if_it_exists():
    metrics = validation_metrics(
        ["a", "b"], ["1", "2"], {"reward": [-1.0, 0.5], "acc": [0.0, None]}
    )
    assert metrics == {
        "val-core/a/acc/mean@1": 0.0,
        "val-aux/a/reward/mean@1": -1.0,
        "val-core/b/reward/mean@1": 0.5,
    }


def test_best_and_worst_are_expectations_over_draws():
    metrics = validation_metrics(
        ["a"] * 8, ["1"] * 4 + ["2"] * 4, {"reward": [0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0]}
    )
    assert metrics["val-core/a/reward/mean@4"] == 0.5
    for k in (2, 4):
        draws = list(itertools.product(range(4), repeat=k))
        exact = np.mean(
            [np.mean([max(g[i] for i in d) for d in draws]) for g in ([0, 0, 0, 1], [0, 1, 1, 1])]
        )
        section = "val-core" if k == 4 else "val-aux"
        assert metrics[f"{section}/a/reward/best@{k}/mean"] == pytest.approx(
            exact, abs=0.03
        )  # 1000 draws
        exact = np.mean(
            [np.mean([min(g[i] for i in d) for d in draws]) for g in ([0, 0, 0, 1], [0, 1, 1, 1])]
        )
        assert metrics[f"val-aux/a/reward/worst@{k}/mean"] == pytest.approx(exact, abs=0.03)
    assert metrics["val-aux/a/reward/std@4"] == pytest.approx(np.sqrt(3) / 4)


def test_majority_scores_the_most_frequent_answer():
    values = {"reward": [1.0, 0.0, 0.0, 0.0, 1.0, 0.0]}
    metrics = validation_metrics(
        ["a"] * 6, ["1"] * 3 + ["2"] * 3, values, ["7", "8", "8", "x", "y", "y"]
    )
    draws = list(itertools.product(range(3), repeat=3))

    def expected(answers, scores):
        total = 0.0
        for draw in draws:
            drawn = [answers[i] for i in draw]
            winner = max(drawn, key=drawn.count)  # the first of equally frequent answers
            total += scores[draw[drawn.index(winner)]]
        return total / len(draws)

    exact = (expected(["7", "8", "8"], [1, 0, 0]) + expected(["x", "y", "y"], [0, 1, 0])) / 2
    # the answer "y" has two scores, and the score of its first draw is used
    assert metrics["val-core/a/reward/maj@3/mean"] == pytest.approx(exact, abs=0.03)  # 1000 draws
    assert not any(
        "maj@" in key
        for key in validation_metrics(["a"] * 2, ["1"] * 2, {"reward": [1.0, 0.0]}, ["7", None])
    )
