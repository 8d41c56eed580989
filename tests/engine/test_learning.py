"""Learning end to end with the real engines in one process: sample, score, update, sync."""

import random

import pytest

from tests.engine.batches import engine as train_engine
from tests.engine.test_sampled import answered, rollout_worker
from tests.workers.test_objectives import value_spec
from verlite.algorithms.advantages import AdvantageInputs, compute_advantages, place_scores
from verlite.config.compile import policy_loss_spec
from verlite.config.plan import Micro, Updates
from verlite.config.schema import Config
from verlite.data.dataset import PromptRow
from verlite.engine.micro import MicroBatching
from verlite.rollout.types import Sampling
from verlite.spec.correction import RolloutCorrection
from verlite.trainer.batch import requests, seeds
from verlite.workers.actor import policy_objective
from verlite.workers.critic import value_objective

pytestmark = pytest.mark.process

MICRO = MicroBatching(max_tokens=400)


class Numbers:
    """The plan's values that the objectives read."""

    clip_low = 0.2
    clip_high = 0.2
    loss_scale = 8.0
    loss_mode = "vanilla"
    correction = RolloutCorrection()
    critic = Updates(8, 1, 1, 64, Micro(16, None), False, "token-mean")


def learn(path: str, estimator: str, seed: int, sign: float = 1.0, steps: int = 12) -> list[float]:
    """Train, and return each step's mean score over 64 answers of 8 tokens.

    The score is the fraction of tokens with an id below 32, initially a quarter.
    """
    actor = train_engine(path, train=True, lr=2e-2, enable_gradient_checkpointing=False)
    critic = (
        train_engine(path, train=True, lr=2e-2, head="value", enable_gradient_checkpointing=False)
        if estimator == "gae"
        else None
    )
    worker = rollout_worker(path, pretrained=False)
    rng = random.Random(seed)
    curve = []
    try:
        for step in range(steps):
            worker.engine.load_weights(actor.export(), step + 1, actor.fingerprint())
            prompts = [
                PromptRow(i, [rng.randrange(4, 128) for _ in range(4)], [], "s", "")
                for i in range(8)
            ]
            samplings = [
                Sampling(max_tokens=8, seed=s, ignore_eos=True) for s in seeds(seed, step, 0, 64)
            ]
            asked = requests(
                [row for row in prompts for _ in range(8)],
                [f"{i // 8}" for i in range(64)],
                samplings,
            )
            batch = answered(worker, asked)
            t = batch.batch
            scores = (t["responses"] < 32).float().mean(1)
            curve.append(float(scores.mean()))
            values = critic.forward(batch, MICRO)["values"] if critic else None
            advantages, returns = compute_advantages(
                estimator,
                AdvantageInputs(
                    token_level_rewards=place_scores(scores, t["response_mask"]),
                    response_mask=t["response_mask"],
                    valid=t["valid"],
                    uid=batch.non_tensor_batch["uid"],
                    values=values,
                ),
            )
            if critic:
                critic.update(
                    batch.with_batch(values=values, returns=returns),
                    MICRO,
                    1.0,
                    value_objective(value_spec(Config(), Numbers())),
                )
            old = actor.forward(batch, MICRO)["log_probs"]
            actor.update(
                batch.with_batch(advantages=sign * advantages, old_log_probs=old),
                MICRO,
                1.0,
                policy_objective(policy_loss_spec(Config(), Numbers())),
            )
    finally:
        worker.engine.close()
    return curve


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("estimator", ["gae", "grpo", "rloo"])
def test_rewards_rise_and_fall_with_flipped_advantages(
    tiny_qwen2: str, estimator: str, seed: int
) -> None:
    curve = learn(tiny_qwen2, estimator, seed)
    assert curve[0] < 0.35 and curve[-1] > 0.8, curve
    curve = learn(tiny_qwen2, estimator, seed, sign=-1.0)
    assert curve[0] > 0.15 and curve[-1] < 0.05, curve
