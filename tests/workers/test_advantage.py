"""Advantages over all tokens of a step: what the KL penalty in the reward does."""

from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict

from verlite.algorithms.advantages import AdvantageInputs, compute_advantages
from verlite.config.compile import advantage_spec
from verlite.config.schema import Config
from verlite.protocol.data import object_array
from verlite.spec import catalog
from verlite.workers.actor import ActorWorker
from verlite.workers.advantage import REWARD_KL, by_row, estimate_advantages


def test_kl_penalty_is_subtracted_from_the_reward_of_each_token():
    config = Config()
    config.algorithm.adv_estimator = "reinforce_plus_plus"
    config.algorithm.use_kl_in_reward = True
    config.algorithm.kl_penalty = "kl"
    mask = torch.tensor([[1, 0, 1], [1, 1, 0]])
    rows = TensorDict(
        {
            "scores": torch.tensor([1.0, 2.0]),
            "valid": torch.tensor([True, True]),
            "response_mask": mask,
            "loss_mask": mask,
            "old_log_probs": torch.tensor([[-1.0, -9.0, -2.0], [-3.0, -4.0, -9.0]]),
            "ref_log_prob": torch.tensor([[-2.0, 5.0, -2.5], [-3.0, -3.0, 5.0]]),
        },
        batch_size=[2],
    )
    result, metrics = estimate_advantages(
        advantage_spec(config), rows, object_array(["a", "b"]), kl_coefficient=0.5
    )
    # KL of each sampled token, old minus reference: row 0 has 1 and 0.5, row 1 has 0 and -1.
    # The score is on the last sampled token. Each token costs half of its own and all later KL.
    expected = torch.tensor([[1 - 0.25 - 0.5, 0.0, 1 - 0.25], [2 + 0.5, 2 + 0.5, 0.0]])
    torch.testing.assert_close(result.batch["returns"], expected)
    torch.testing.assert_close(result.batch["rewards"], torch.tensor([0.25, 2.5]))
    assert metrics[REWARD_KL] == pytest.approx((0.75 + -0.5) / 2)
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.5


def two_prompts(estimator: str, **settings) -> tuple[Config, TensorDict]:
    """Return a configuration with KL in the reward, and two samples of each of two prompts."""
    config = Config()
    config.algorithm.adv_estimator = estimator
    config.algorithm.use_kl_in_reward = True
    for name, value in settings.items():
        setattr(config.algorithm, name, value)
    mask = torch.tensor([[1, 1, 1], [1, 0, 1], [1, 1, 0], [1, 0, 0]])
    rows = TensorDict(
        {
            "scores": torch.tensor([3.0, 1.0, 0.0, 2.0]),
            "valid": torch.ones(4, dtype=torch.bool),
            "response_mask": mask,
            "loss_mask": mask,
            "old_log_probs": torch.tensor(
                [[-1.0, -1.0, -1.0], [-1.0, 7.0, -1.0], [-2.0, -1.0, 7.0], [-1.0, 7.0, 7.0]]
            ),
            "ref_log_prob": torch.tensor(
                [[-2.0, -1.5, -1.0], [-1.0, 9.0, -3.0], [-1.0, -1.0, 9.0], [-1.5, 9.0, 9.0]]
            ),
        },
        batch_size=[4],
    )
    return config, rows


UIDS = object_array(["a", "a", "b", "b"])
# KL per token, old minus reference, times the coefficient 2, summed over the token and later ones.
KL_TO_GO = [[-3.0, -1.0, 0.0], [-4.0, 0.0, -4.0], [2.0, 0.0, 0.0], [-1.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    ("estimator", "score_parts"),
    [
        ("rloo", [2.0, -2.0, -2.0, 2.0]),  # 3 - 1, 1 - 3, 0 - 2, 2 - 0
        ("grpo", [1.0, -1.0, -1.0, 1.0]),  # the score minus the mean of its prompt, 2 and 1
    ],
)
def test_kl_per_token_comes_after_the_baseline(estimator, score_parts):
    config, rows = two_prompts(estimator, kl_in_reward_mode="token", norm_adv_by_std_in_grpo=False)
    result, _ = estimate_advantages(advantage_spec(config), rows, UIDS, kl_coefficient=2.0)
    expected = torch.tensor(score_parts).unsqueeze(1) + torch.tensor(KL_TO_GO)
    expected = expected * rows["response_mask"]
    torch.testing.assert_close(result.batch["advantages"], expected)
    torch.testing.assert_close(result.batch["returns"], expected)
    # The reward of a response, which is logged, still contains its KL: 3 - 3, 1 - 4, 0 + 2, 2 - 1.
    torch.testing.assert_close(result.batch["rewards"], torch.tensor([0.0, -3.0, 2.0, 1.0]))


def test_rloo_with_kl_per_token_is_rloo_token_kl_without_its_clip():
    config, rows = two_prompts("rloo", kl_in_reward_mode="token")
    theirs, _ = two_prompts("rloo_token_kl")
    ours = estimate_advantages(advantage_spec(config), rows, UIDS, 2.0)[0].batch
    other = estimate_advantages(advantage_spec(theirs), rows, UIDS, 2.0)[0].batch
    torch.testing.assert_close(ours["advantages"], other["advantages"])


def test_kl_per_sequence_enters_the_baseline():
    config, rows = two_prompts("rloo")
    result, _ = estimate_advantages(advantage_spec(config), rows, UIDS, kl_coefficient=2.0)
    # Rewards with KL: 0 and -3; 2 and 1.
    expected = torch.tensor([[3.0], [-3.0], [1.0], [-1.0]]) * rows["response_mask"]
    torch.testing.assert_close(result.batch["advantages"], expected)


def test_the_only_sample_of_a_prompt_is_not_compared():
    """One sample a prompt by configuration, not because the others failed."""
    config, rows = two_prompts("rloo", use_kl_in_reward=False)
    names = object_array(["a", "b", "c", "d"])
    advantages = estimate_advantages(advantage_spec(config), rows, names, 0.0)[0].batch[
        "advantages"
    ]
    expected = rows["scores"].unsqueeze(1) * rows["response_mask"]
    torch.testing.assert_close(advantages, expected)
    config.actor_rollout_ref.rollout.n = 2
    assert (
        not estimate_advantages(advantage_spec(config), rows, names, 0.0)[0]
        .batch["advantages"]
        .any()
    )


def test_whitening_is_over_the_tokens_of_the_step_and_comes_last():
    plain, rows = two_prompts("rloo_token_kl")
    white, _ = two_prompts("rloo_token_kl", whiten_advantages=True)
    before = estimate_advantages(advantage_spec(plain), rows, UIDS, 2.0)[0].batch
    after = estimate_advantages(advantage_spec(white), rows, UIDS, 2.0)[0].batch
    mask = rows["response_mask"].bool()
    tokens = before["advantages"][mask].double()
    expected = (tokens - tokens.mean()) / tokens.std()
    torch.testing.assert_close(after["advantages"][mask].double(), expected, atol=1e-6, rtol=1e-6)
    assert (after["advantages"][~mask] == 0).all()
    torch.testing.assert_close(after["returns"], before["returns"])


def test_whitening_needs_the_tokens_of_each_row():
    config = Config()
    config.algorithm.adv_estimator = "grpo"
    assert by_row(advantage_spec(config))
    config.algorithm.whiten_advantages = True
    assert not by_row(advantage_spec(config))


@pytest.mark.parametrize("name", sorted(catalog.ESTIMATORS))
def test_the_catalog_knows_which_estimators_whiten(name):
    torch.manual_seed(0)
    mask = torch.ones(6, 4)
    inputs = AdvantageInputs(
        token_level_rewards=torch.randn(6, 4) * 7 + 3,
        response_mask=mask,
        uid=object_array(["a", "a", "a", "b", "b", "b"]),
        values=torch.randn(6, 4),
        reward_baselines=torch.randn(6),
        old_log_probs=-torch.rand(6, 4),
        sum_pi_squared=torch.rand(6, 4),
        gdpo_rewards=torch.randn(6, 2),
    )
    advantages = compute_advantages(name, inputs)[0]
    is_white = advantages.mean().abs() < 1e-5 and abs(advantages.std() - 1) < 1e-5
    assert bool(is_white) == catalog.estimator(name).whitens


@pytest.mark.parametrize(
    ("key", "own"),
    [
        ("actor_rollout_ref.actor.policy_loss.loss_mode", ("only_on_the_driver:loss", "grpo")),
        ("algorithm.adv_estimator", ("vanilla", "only_on_the_driver:estimator")),
    ],
)
def test_an_actor_that_cannot_import_the_users_function_does_not_start(key, own):
    config = Config()
    loss, config.algorithm.adv_estimator = own
    spec = SimpleNamespace(loss=SimpleNamespace(loss_mode=loss), advantage=advantage_spec(config))
    with pytest.raises(ValueError, match=f"{key}.*only_on_the_driver"):
        ActorWorker(spec)
