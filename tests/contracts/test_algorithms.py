"""The contract checks pass for the built-in algorithms and report typical mistakes."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from verlite.algorithms.advantages import AdvantageInputs
from verlite.algorithms.losses import PolicyLossInputs
from verlite.contracts.algorithms import check_estimator, check_policy_loss
from verlite.spec.catalog import ESTIMATORS, LOSSES, load
from verlite.spec.correction import RolloutCorrection

POPULATION = {
    "gpg",
    *(name for name, entry in ESTIMATORS.items() if entry.whitens),
}  # estimators that use statistics of the whole batch by design


@pytest.mark.parametrize("name", ESTIMATORS)
def test_built_in_estimators_pass(name: str) -> None:
    assert check_estimator(load(ESTIMATORS[name].path), whitens=name in POPULATION) == []


@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"clip_cov", "kl_cov"}))
def test_built_in_losses_pass(name: str) -> None:
    assert (
        check_policy_loss(
            load(LOSSES[name].path), {"rollout_correction": RolloutCorrection(bypass_mode=True)}
        )
        == []
    )


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_check_reports_losses_that_depend_on_the_micro_batch(name: str) -> None:
    assert any(
        "sum over micro-batches" in problem
        for problem in check_policy_loss(
            load(LOSSES[name].path), {"clip_cov_lb": 0, "clip_cov_ub": 99}
        )
    )


def test_examples_in_the_docs_pass() -> None:
    page = (Path(__file__).parents[2] / "docs" / "extending.md").read_text(encoding="utf-8")
    examples: dict = {}
    for source in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(source, examples)
    assert check_estimator(examples["centered"], whitens=True) == []
    assert check_policy_loss(examples["unclipped"]) == []
    assert examples["compute_score"]("mine", " 72\n", "72") == 1.0


def per_row(inputs: AdvantageInputs, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.where(inputs.mask, row.float().unsqueeze(-1), 0)
    return out, out


def by_position(inputs: AdvantageInputs):
    pairs = inputs.scores.view(-1, 2)
    return per_row(inputs, (pairs - pairs.mean(1, keepdim=True)).flatten())


def over_batch(inputs: AdvantageInputs):
    return per_row(inputs, inputs.scores - inputs.scores.mean())


def on_padding(inputs: AdvantageInputs):
    out = inputs.groups.centered(inputs.scores).float().unsqueeze(-1).expand(inputs.mask.shape)
    return out, out


def reading_padding(inputs: AdvantageInputs):
    out = inputs.token_level_rewards.sum(-1, keepdim=True) * inputs.mask
    return out, out


def one_number(inputs: AdvantageInputs):
    return inputs.scores, inputs.scores


def single_tensor(inputs: AdvantageInputs):
    return per_row(inputs, inputs.scores)[0]


def in_place(inputs: AdvantageInputs):
    inputs.token_level_rewards.nan_to_num_(0.0)
    return per_row(inputs, inputs.groups.centered(inputs.scores))


def counts_failed_rows(inputs: AdvantageInputs):
    total = torch.zeros_like(inputs.groups.sizes).index_add_(0, inputs.groups.group, inputs.scores)
    size = torch.zeros_like(total).index_add_(
        0, inputs.groups.group, torch.ones_like(inputs.scores)
    )
    return per_row(inputs, inputs.scores - (total / size)[inputs.groups.group])


def raising(inputs: AdvantageInputs):
    raise RuntimeError("invalid group")


@pytest.mark.parametrize(
    "estimator,message",
    [
        (by_position, "order of rows matters"),
        (over_batch, "rewards of other prompts"),
        (on_padding, "advantages: not 0 outside the mask"),
        (reading_padding, "NaN under mask 0 leaked"),
        (one_number, r"advantages: shape \(6,\), expected \(6, 5\)"),
        (single_tensor, "returned Tensor, expected a pair"),
        (in_place, "token_level_rewards was edited in place"),
        (counts_failed_rows, "valid=False influences other rows"),
        (raising, "raised RuntimeError: invalid group"),
    ],
)
def test_check_reports_each_estimator_mistake(estimator, message: str) -> None:
    problems = check_estimator(estimator)
    assert len(problems) >= 1
    with pytest.raises(AssertionError, match=message):
        raise AssertionError("\n".join(problems))


def per_token(inputs: PolicyLossInputs) -> torch.Tensor:
    return -inputs.advantages * inputs.log_ratio.exp()


def wrong_sign(inputs: PolicyLossInputs):
    return -inputs.total(per_token(inputs)), {}


def micro_batch_mean(inputs: PolicyLossInputs):
    return per_token(inputs)[inputs.mask].sum() / inputs.mask.sum().clamp(min=1), {}


def unmasked(inputs: PolicyLossInputs):
    return (inputs.log_prob - inputs.advantages * inputs.log_prob).mean(), {}


def overflowing(inputs: PolicyLossInputs):
    return inputs.total(
        -inputs.advantages * (3 * (inputs.log_prob - inputs.old_log_prob)).exp()
    ), {}


def no_gradient(inputs: PolicyLossInputs):
    return inputs.total(per_token(inputs)).detach(), {}


def vector(inputs: PolicyLossInputs):
    return per_token(inputs), {}


def float_metric(inputs: PolicyLossInputs):
    return inputs.total(per_token(inputs)), {"mine/kl": 1.0}


def mean_metric(inputs: PolicyLossInputs):
    return inputs.total(per_token(inputs)), {"mine/kl": inputs.log_ratio.detach().mean()}


def never_zero(inputs: PolicyLossInputs):
    return inputs.total(per_token(inputs)) + 1, {}


@pytest.mark.parametrize(
    "loss,message",
    [
        (wrong_sign, "the sign is wrong"),
        (micro_batch_mean, "sum over micro-batches is not the whole"),
        (unmasked, "sum over micro-batches is not the whole"),
        (overflowing, r"differences of \+-60"),
        (no_gradient, "loss has no gradient"),
        (vector, r"loss is Tensor of shape \(6, 5\)"),
        (float_metric, "metric 'mine/kl': float"),
        (mean_metric, "metric 'mine/kl' does not add up"),
        (never_zero, "without trainable tokens has loss 1.0"),
    ],
)
def test_check_reports_each_loss_mistake(loss, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        raise AssertionError("\n".join(check_policy_loss(loss)))


def test_correct_user_loss_passes() -> None:
    def mine(inputs: PolicyLossInputs):
        return inputs.total(per_token(inputs)), {"mine/kl": inputs.token_mean(-inputs.log_ratio)}

    assert check_policy_loss(mine) == []
    assert check_policy_loss(lambda inputs: mine(replace(inputs, clip_low=0.1))) == []
