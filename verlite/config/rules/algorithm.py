"""Rules on reward parts and score scales, which name what is wrong in a list."""

from collections.abc import Iterator

from verlite.config.problems import Problem
from verlite.config.rules.context import Context
from verlite.spec import catalog

GDPO_KEYS = "algorithm.gdpo_reward_keys"
GDPO_WEIGHTS = "algorithm.gdpo_reward_weights"


def gdpo(c: Context) -> Iterator[Problem]:
    """The parts that gdpo compares are named once, and have weights."""
    if c.estimator != "gdpo":
        return
    keys, weights = c.algorithm.gdpo_reward_keys or [], c.algorithm.gdpo_reward_weights
    repeated = sorted({name for name in keys if keys.count(name) > 1})
    if repeated:
        yield Problem(
            GDPO_KEYS, keys, f"names {', '.join(repeated)} more than once", "Name each part once."
        )
    if keys and weights is not None and len(weights) != len(keys):
        yield Problem(
            GDPO_WEIGHTS,
            weights,
            f"has {len(weights)} weight{'s' * (len(weights) != 1)} for {len(keys)} "
            f"part{'s' * (len(keys) != 1)} in {GDPO_KEYS}",
            "Give one weight for each part, or leave it out: 1 each.",
        )
    elif weights and 0 in weights:
        yield Problem(
            GDPO_WEIGHTS,
            weights,
            "a part with the weight 0 has no influence",
            f"Leave it out of {GDPO_KEYS}.",
        )
    if c.groups.enable and keys and (c.groups.metric or "score") not in keys:
        yield Problem(
            "algorithm.filter_groups.metric",
            c.groups.metric,
            f"algorithm.adv_estimator=gdpo compares only {', '.join(keys)}",
            "Use one of these.",
        )


def score_scale(context: Context) -> Iterator[Problem]:
    """Each entry of reward.score_scale names a scale."""
    legal = ", ".join(catalog.SCORE_SCALES)
    for source, scale in context.config.reward.score_scale.items():
        if scale not in catalog.SCORE_SCALES:
            yield Problem(
                f"reward.score_scale.{source}", scale, "is not a legal name", f"Legal: {legal}."
            )
