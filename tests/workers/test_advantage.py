"""Advantages over all tokens of a step: what the KL penalty in the reward does."""

import pytest
import torch
from tensordict import TensorDict

from verlite.config.schema import Config
from verlite.protocol.data import object_array
from verlite.workers.advantage import REWARD_KL, estimate_advantages


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
        config, rows, object_array(["a", "b"]), kl_coefficient=0.5
    )
    # KL of each sampled token, old minus reference: row 0 has 1 and 0.5, row 1 has 0 and -1.
    # The score is on the last sampled token. Each token costs half of its own and all later KL.
    expected = torch.tensor([[1 - 0.25 - 0.5, 0.0, 1 - 0.25], [2 + 0.5, 2 + 0.5, 0.0]])
    torch.testing.assert_close(result.batch["returns"], expected)
    torch.testing.assert_close(result.batch["rewards"], torch.tensor([0.25, 2.5]))
    assert metrics[REWARD_KL] == pytest.approx((0.75 + -0.5) / 2)
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.5
