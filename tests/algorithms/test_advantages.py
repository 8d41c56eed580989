"""Every estimator against hand values and a naive reference.

The order of rows, padding and failed rows must not change the result.
"""

import dataclasses
import math

import numpy as np
import pytest
import torch

from tests.algorithms.differential import COMPARISONS, check, inputs_of
from tests.algorithms.reference import Case, random_case
from verlite.algorithms.advantages import (
    AdvantageInputs,
    compute_advantages,
    discounted_to_go,
    place_scores,
)
from verlite.spec.catalog import ESTIMATORS

NAN = math.nan


def fields_of(case: Case) -> dict:
    return {f.name: getattr(case, f.name) for f in dataclasses.fields(case)}


def group_inputs(rewards: list[float], uid: list[str], **settings) -> AdvantageInputs:
    """Return inputs whose responses have one token each."""
    return AdvantageInputs(
        token_level_rewards=torch.tensor(rewards).unsqueeze(1),
        response_mask=torch.ones(len(rewards), 1, dtype=torch.int64),
        uid=np.array(uid, dtype=object),
        **{"gdpo_rewards": torch.tensor(rewards).unsqueeze(1), **settings},
    )


@pytest.mark.parametrize("name", ESTIMATORS)
def test_agrees_with_the_naive_reference(name: str) -> None:
    check(COMPARISONS["Advantage estimators"][name])


@pytest.mark.parametrize("name", ESTIMATORS)
def test_order_of_rows_does_not_matter(name: str) -> None:
    for seed in range(20):
        case = random_case(seed)
        order = torch.randperm(len(case.uid), generator=torch.Generator().manual_seed(seed))
        moved = Case(
            **{
                key: x[order.numpy()] if isinstance(x, np.ndarray) else x[order]
                for key, x in fields_of(case).items()
            }
        )
        for before, after in zip(
            compute_advantages(name, inputs_of(case)),
            compute_advantages(name, inputs_of(moved)),
            strict=True,
        ):
            torch.testing.assert_close(before[order], after)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_padding_columns_do_not_matter(name: str) -> None:
    case = random_case(3)
    rows, width = case.shape
    wider = Case(
        **{
            k: torch.cat([x, x.new_full((rows, 5), 0 if k == "mask" else NAN)], 1)
            if torch.is_tensor(x) and x.dim() == 2 and k != "parts"
            else x
            for k, x in fields_of(case).items()
        }
    )
    for before, after in zip(
        compute_advantages(name, inputs_of(case)),
        compute_advantages(name, inputs_of(wider)),
        strict=True,
    ):
        torch.testing.assert_close(torch.cat([before, torch.zeros(rows, 5)], 1), after)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_failed_rows_are_excluded(name: str) -> None:
    """The other rows get the same numbers as in a batch without the failed row."""
    case = random_case(11)
    case.valid[:] = True
    case.mask[:, 0] = 1
    for x in (case.rewards, case.values, case.scores, case.old, case.pi_squared):
        x[:, 0] = torch.linspace(-1, 0.5, len(x))
    case.valid[1] = False
    others = [i for i in range(len(case.uid)) if i != 1]
    without = Case(**{key: x[others] for key, x in fields_of(case).items()})
    case.rewards[1] = case.values[1] = NAN
    for full, small in zip(
        compute_advantages(name, inputs_of(case)),
        compute_advantages(name, inputs_of(without)),
        strict=True,
    ):
        torch.testing.assert_close(full[others], small)
        assert (full[1] == 0).all()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_batch_without_trainable_tokens_gives_zero(name: str) -> None:
    case = random_case(0)
    case.mask[:] = 0
    for result in compute_advantages(name, inputs_of(case)):
        assert (result == 0).all()


@pytest.mark.parametrize("name", [name for name, one in ESTIMATORS.items() if one.compares])
def test_group_of_one_and_equal_rewards_give_exactly_zero(name: str) -> None:
    for rewards, uid in (
        ([5.0, 0.1, 0.1, 0.1], ["a", "b", "b", "b"]),
        ([0.7] * 3, ["a", "b", "c"]),
    ):
        ones = torch.ones(len(rewards), 1)
        advantages, _ = compute_advantages(
            name, group_inputs(rewards, uid, old_log_probs=-ones, sum_pi_squared=ones / 2)
        )
        # The token baseline is a weighted mean, which rounds. The other means are exact here.
        assert advantages.abs().max() <= (1e-6 if name == "optimal_token_baseline" else 0), (
            advantages
        )


@pytest.mark.parametrize("name", [name for name, one in ESTIMATORS.items() if one.compares])
def test_the_only_sample_of_a_prompt_has_its_score_as_advantage(name: str) -> None:
    """With rollout.n=1, as in verl: baseline 0, standard deviation 1. A failed row still has 0."""
    if ESTIMATORS[name].needs_several:
        pytest.skip("refused with one sample")
    scores = torch.tensor([2.0, 0.0, -1.0, 5.0])
    ones = torch.ones(4, 1)
    inputs = group_inputs(
        scores.tolist(),
        ["a", "b", "c", "d"],
        old_log_probs=-ones,
        sum_pi_squared=ones / 2,
        alone=True,
        valid=torch.tensor([True, True, True, False]),
    )
    expected = scores * torch.tensor([1.0, 1.0, 1.0, 0.0])
    if name == "gpg":
        expected = expected * 3 / 2  # rows that count / rows with a reward
    if name in ("reinforce_plus_plus_baseline", "gdpo"):
        counted = scores[:3].double()
        whitened = (counted - counted.mean()) / counted.std()
        expected[:3] = whitened.float()
    advantages, _ = compute_advantages(name, inputs)
    torch.testing.assert_close(advantages[:, 0], expected, rtol=2e-6, atol=1e-6)


def test_gae_hand_example() -> None:
    """Three tokens with a tool token before the third, gamma 0.5, lambda 0.5."""
    inputs = AdvantageInputs(
        token_level_rewards=torch.tensor([[0.0, 0.0, NAN, 1.0, NAN]]),
        values=torch.tensor([[0.2, 0.4, NAN, 0.6, NAN]]),
        response_mask=torch.tensor([[1, 1, 0, 1, 0]]),
        uid=np.array(["a"], dtype=object),
        gamma=0.5,
        lam=0.5,
    )
    advantages, returns = compute_advantages("gae", inputs)
    # Last token: 1 - 0.6 = 0.4.
    # Second: 0.5 * 0.6 - 0.4 + 0.25 * 0.4 = 0.
    # First: 0.5 * 0.4 - 0.2 + 0.25 * 0 = 0.
    torch.testing.assert_close(returns, torch.tensor([[0.2, 0.4, 0.0, 1.0, 0.0]]))
    raw = torch.tensor([0.0, 0.0, 0.4])
    torch.testing.assert_close(advantages[0, [0, 1, 3]], (raw - raw.mean()) / raw.std())


def test_grpo_and_rloo_hand_example() -> None:
    inputs = group_inputs([1.0, 0.0, 0.0, 3.0, 5.0], ["a", "a", "a", "b", "b"])
    scores = torch.tensor([1.0, 0.0, 0.0])
    grpo = torch.cat(
        [(scores - 1 / 3) / (scores.std() + 1e-6), torch.tensor([-1.0, 1.0]) / (2**0.5 + 1e-6)]
    )
    torch.testing.assert_close(compute_advantages("grpo", inputs)[0].squeeze(1), grpo)
    torch.testing.assert_close(
        compute_advantages("rloo", inputs)[0].squeeze(1), torch.tensor([1.0, -0.5, -0.5, -2.0, 2.0])
    )
    inputs = group_inputs(
        [1.0, 0.0, 0.0, 3.0, 5.0], ["a", "a", "a", "b", "b"], norm_adv_by_std_in_grpo=False
    )
    torch.testing.assert_close(
        compute_advantages("grpo", inputs)[0].squeeze(1),
        torch.tensor([2 / 3, -1 / 3, -1 / 3, -1.0, 1.0]),
    )


def test_gdpo_hand_example() -> None:
    """Two prompts of two samples with two parts. Both groups have the sums 1, 1 and 0, 11."""
    inputs = group_inputs(
        [1.0, 1.0, 0.0, 11.0],
        ["a", "a", "b", "b"],
        gdpo_rewards=torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [1.0, 10.0]]),
        gdpo_reward_weights=(3.0, 1.0),
    )
    # A part that differs between two samples becomes -1 / sqrt(2) and 1 / sqrt(2), 10 as well as 1.
    # Weighted sums, times sqrt(2): 3 - 1 = 2, -2, -4, 4. Their variance is (4 + 4 + 16 + 16) / 3.
    expected = torch.tensor([2.0, -2.0, -4.0, 4.0]) / (40 / 3) ** 0.5
    advantages, returns = compute_advantages("gdpo", inputs)
    torch.testing.assert_close(advantages.squeeze(1), expected, rtol=2e-6, atol=0)
    assert torch.equal(advantages, returns)
    inputs = dataclasses.replace(inputs, gdpo_reward_weights=None)
    # The parts of prompt a cancel: 0, 0, -2, 2.
    expected = torch.tensor([0.0, 0.0, -2.0, 2.0]) / (8 / 3) ** 0.5
    torch.testing.assert_close(
        compute_advantages("gdpo", inputs)[0].squeeze(1), expected, rtol=2e-6, atol=1e-7
    )


def test_gdpo_whitens_over_tokens_and_ignores_the_scale_of_a_part() -> None:
    parts = torch.tensor([[1.0, 3.0], [0.0, 5.0], [0.5, 3.0]])
    inputs = AdvantageInputs(
        token_level_rewards=torch.zeros(3, 3),
        response_mask=torch.tensor([[1, 1, 1], [1, 0, 0], [1, 0, 1]]),
        uid=np.array(["a"] * 3, dtype=object),
        gdpo_rewards=parts,
    )
    # Normalized parts: 1, -1, 0 and -d, 2d, -d with d = 1 / sqrt(3).
    d = 3**-0.5
    tokens = torch.tensor([1 - d] * 3 + [2 * d - 1] + [-d] * 2)
    expected = (tokens - tokens.mean()) / tokens.std()
    advantages, _ = compute_advantages("gdpo", inputs)
    # The 1e-6 beside a standard deviation of 0.5 changes quotients by 2e-6, and whitening adds up.
    torch.testing.assert_close(advantages[inputs.mask], expected, rtol=0, atol=1e-5)
    assert (advantages[~inputs.mask] == 0).all()
    scaled = dataclasses.replace(inputs, gdpo_rewards=parts * torch.tensor([1e4, 1e30]) + 7)
    torch.testing.assert_close(compute_advantages("gdpo", scaled)[0], advantages, rtol=0, atol=1e-5)


def test_gdpo_names_the_row_and_part_that_is_not_finite() -> None:
    parts = torch.tensor([[1.0, 0.0], [0.0, NAN], [0.0, 1.0]])
    inputs = group_inputs([0.0] * 3, ["a", "b", "b"], gdpo_rewards=parts)
    with pytest.raises(
        ValueError, match=r"reward part 1 that is not finite.*row 1 \(uid b\) with nan"
    ):
        compute_advantages("gdpo", inputs)
    with pytest.raises(ValueError, match="adv_estimator=gdpo needs the input gdpo_rewards"):
        compute_advantages("gdpo", dataclasses.replace(inputs, gdpo_rewards=None))


def test_rloo_token_kl_hand_example() -> None:
    """KL is not part of the baseline, and a token does not pay for the KL of earlier tokens.

    Two rows of two tokens have scores 1 and 0 on the last token, and KL penalties 0.1 to 0.4.
    """
    scores = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    rewards = scores - torch.tensor([[0.1, 0.2], [0.3, 0.4]])
    inputs = AdvantageInputs(
        token_level_rewards=rewards,
        token_level_scores=scores,
        response_mask=torch.ones(2, 2),
        uid=np.array(["a", "a"], dtype=object),
    )
    torch.testing.assert_close(
        compute_advantages("rloo_token_kl", inputs)[0], torch.tensor([[0.7, 0.8], [-1.7, -1.4]])
    )
    torch.testing.assert_close(
        compute_advantages("rloo", inputs)[0], torch.tensor([[1.4, 1.4], [-1.4, -1.4]])
    )


def test_opo_gpg_and_passk_hand_examples() -> None:
    inputs = AdvantageInputs(
        token_level_rewards=torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 4.0], [0.0, 0.0, 0.0]]),
        response_mask=torch.tensor([[1, 0, 0], [1, 1, 1], [1, 1, 0]]),
        uid=np.array(["a"] * 3, dtype=object),
        norm_adv_by_std_in_grpo=False,
    )
    baseline = (1 * 1 + 3 * 4 + 2 * 0) / 6
    torch.testing.assert_close(
        compute_advantages("opo", inputs)[0][:, 0],
        torch.tensor([1 - baseline, 4 - baseline, -baseline]),
    )
    torch.testing.assert_close(
        compute_advantages("gpg", inputs)[0][:, 0], 3 / 2 * (torch.tensor([1.0, 4.0, 0.0]) - 5 / 3)
    )
    assert compute_advantages("grpo_passk", inputs)[0].tolist() == [[0, 0, 0], [3, 3, 3], [0, 0, 0]]


def test_nan_reward_of_a_valid_row_raises() -> None:
    with pytest.raises(ValueError, match=r"first row 1 \(uid b\) with nan.*valid=False"):
        compute_advantages(
            "gae",
            AdvantageInputs(
                token_level_rewards=torch.tensor([[1.0], [NAN]]),
                response_mask=torch.ones(2, 1),
                values=torch.zeros(2, 1),
                uid=np.array(["a", "b"], dtype=object),
            ),
        )


def test_missing_inputs_unknown_names_and_wrong_shapes_raise() -> None:
    inputs = group_inputs([1.0, 2.0], ["a", "a"])
    with pytest.raises(ValueError, match="adv_estimator=gae needs the input values"):
        compute_advantages("gae", inputs)
    with pytest.raises(
        ValueError, match="adv_estimator=optimal_token_baseline needs the input old_log_probs"
    ):
        compute_advantages("optimal_token_baseline", inputs)
    with pytest.raises(ValueError, match="adv_estimator=remax needs the input reward_baselines"):
        compute_advantages("remax", inputs)
    with pytest.raises(ValueError, match="unknown advantage estimator 'gropo': did you mean grpo"):
        compute_advantages("gropo", inputs)
    with pytest.raises(ValueError, match=r"no_such_package.*cannot be loaded"):
        compute_advantages("no_such_package.mine:advantage", inputs)
    with pytest.raises(ValueError, match="has no function or class 'undefined'"):
        compute_advantages("tests.algorithms.test_advantages:undefined", inputs)
    with pytest.raises(ValueError, match=r"returned shapes \(2,\) and \(2,\), expected \(2, 1\)"):
        compute_advantages("tests.algorithms.test_advantages:flat", inputs)


def test_non_finite_result_raises() -> None:
    inputs = group_inputs([1.0, 2.0, 3.0], ["a", "b", "b"])
    with pytest.raises(
        ValueError,
        match=r"returned advantages that are not finite in 1 of 3 rows, first in row 0 \(uid a\)",
    ):
        compute_advantages("tests.algorithms.test_advantages:std_of_one_row", inputs)
    with pytest.raises(
        ValueError, match=r"returned returns that are not finite in \d of 3 rows, first in row 1"
    ):
        compute_advantages("tests.algorithms.test_advantages:infinite_returns", inputs)


def std_of_one_row(inputs: AdvantageInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return NaN for groups of one: a user estimator with the standard deviation of one row."""
    a = torch.stack([inputs.rewards[np.flatnonzero(inputs.uid == u)].std(0) for u in inputs.uid])
    return a, torch.zeros_like(a)


def infinite_returns(inputs: AdvantageInputs) -> tuple[torch.Tensor, torch.Tensor]:
    zeros = torch.zeros_like(inputs.rewards)
    return zeros, torch.where(torch.arange(3)[:, None] == 1, torch.inf, zeros)


def flat(inputs: AdvantageInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the wrong shape, as a user estimator may."""
    return inputs.rewards[:, 0], inputs.rewards[:, 0]


def test_scores_are_placed_on_the_last_trainable_token() -> None:
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 1], [0, 0, 0, 0], [0, 1, 1, 0]])
    placed = place_scores(torch.tensor([1.0, 2.0, NAN, 4.0]), mask)
    assert placed.tolist() == [[0, 1, 0, 0], [0, 0, 0, 2], [0, 0, 0, 0], [0, 0, 4, 0]]
    assert place_scores(torch.ones(3), torch.zeros(3, 5)).sum() == 0
    for seed in range(50):
        mask = random_case(seed).mask
        scores = torch.randn(len(mask), generator=torch.Generator().manual_seed(seed))
        placed = place_scores(scores, mask)
        assert torch.equal((placed * mask).sum(1), placed.sum(1)) and torch.equal(
            placed.sum(1), scores * mask.any(1)
        )


def test_discounted_to_go() -> None:
    x, mask = torch.tensor([[1.0, 0.0, 2.0, 4.0]]), torch.tensor([[True, False, True, True]])
    assert discounted_to_go(x, mask, 0.5).tolist() == [[1 + 0.5 * 4, 4, 2 + 0.5 * 4, 4]]
    assert discounted_to_go(x, mask, 1.0).tolist() == [[7, 6, 6, 4]]
    assert x.tolist() == [[1, 0, 2, 4]]
    assert discounted_to_go(torch.zeros(2, 0), torch.zeros(2, 0, dtype=torch.bool), 0.5).shape == (
        2,
        0,
    )
