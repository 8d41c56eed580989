"""Estimators, losses, KL terms, training scores and optimizers."""

from collections.abc import Iterator

from verlite.config.problems import Problem
from verlite.config.rules.context import Context
from verlite.spec import catalog

ACTOR = "actor_rollout_ref.actor."
GDPO_KEYS = "algorithm.gdpo_reward_keys"
GDPO_WEIGHTS = "algorithm.gdpo_reward_weights"


def samples_per_prompt(context: Context) -> Iterator[Problem]:
    """An estimator that ranks samples has several of each prompt."""
    name = context.config.algorithm.adv_estimator
    n = context.config.actor_rollout_ref.rollout.n
    entry = catalog.ESTIMATORS.get(name)
    if entry and entry.needs_several and n == 1:
        yield Problem(
            "actor_rollout_ref.rollout.n",
            n,
            f"algorithm.adv_estimator={name} compares the samples of one prompt, so it needs at "
            "least 2",
            "Use 4 to 16.",
        )


def gdpo(context: Context) -> Iterator[Problem]:
    """gdpo has parts to compare, and no setting changes the score, which it does not read."""
    config = context.config
    algorithm, reward = config.algorithm, config.reward
    if algorithm.adv_estimator != "gdpo":
        return
    keys, weights = algorithm.gdpo_reward_keys or [], algorithm.gdpo_reward_weights
    repeated = sorted({name for name in keys if keys.count(name) > 1})
    if not keys:
        yield Problem(
            GDPO_KEYS,
            algorithm.gdpo_reward_keys,
            "does not name the reward parts that algorithm.adv_estimator=gdpo compares",
            "Such as [accuracy_reward,format_reward]: numbers that the reward function returns.",
        )
    elif repeated:
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
    if algorithm.use_kl_in_reward:
        yield Problem(
            "algorithm.use_kl_in_reward",
            True,
            "algorithm.adv_estimator=gdpo compares the parts of the reward, which have no KL",
            f"Use {ACTOR}use_kl_loss=true.",
        )
    shaping = {
        "reward.mean": (reward.mean, reward.mean != 0),
        "reward.std": (reward.std, reward.std != 1),
        "reward.clip_range": (reward.clip_range, reward.clip_range is not None),
        "reward.overlong_buffer.enable": (True, reward.overlong_buffer.enable),
    }
    for key, (value, changes) in shaping.items():
        if changes:
            yield Problem(
                key,
                value,
                "changes the score, and algorithm.adv_estimator=gdpo compares the parts of the "
                "reward",
                "Leave it out; let the reward function return such a part.",
            )
    metric = algorithm.filter_groups.metric
    if algorithm.filter_groups.enable and keys and (metric or "score") not in keys:
        yield Problem(
            "algorithm.filter_groups.metric",
            metric,
            f"algorithm.adv_estimator=gdpo compares only {', '.join(keys)}",
            "Use one of these.",
        )


def critic(context: Context) -> Iterator[Problem]:
    """An estimator that reads values has a critic."""
    name = context.config.algorithm.adv_estimator
    if "values" in catalog.measured(name) and context.config.critic.enable is False:
        yield Problem(
            "critic.enable",
            False,
            f"algorithm.adv_estimator={name} needs a critic",
            "Leave critic.enable out, or use grpo.",
        )


def clip_range(context: Context) -> Iterator[Problem]:
    """The clip range is a range of ratios, and dual clip lies above it."""
    actor = context.config.actor_rollout_ref.actor
    loss = actor.policy_loss.loss_mode
    entry = catalog.POLICY_LOSSES.get(loss)
    low = actor.clip_ratio_low
    low_key = f"{ACTOR}clip_ratio_low"
    if low is None:
        low = actor.clip_ratio
        low_key = f"{ACTOR}clip_ratio"
    if entry and entry.ratio_clip and low > 1 and context.ok(low_key):
        yield Problem(low_key, low, "must be at most 1: a ratio is never below 0", "Usual: 0.2.")
    high = actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high
    if loss != "vanilla" or not context.ok(f"{ACTOR}clip_ratio_c", f"{ACTOR}clip_ratio_high"):
        return
    if actor.clip_ratio_c <= 1 + high:
        yield Problem(
            f"{ACTOR}clip_ratio_c",
            actor.clip_ratio_c,
            f"must be more than 1 + the upper clip range = {1 + high:g}, otherwise it replaces "
            "the clip",
            "Usual: 3.",
        )


def clip_cov_bounds(context: Context) -> Iterator[Problem]:
    """clip_cov has tokens to choose from."""
    loss = context.config.actor_rollout_ref.actor.policy_loss
    if loss.loss_mode == "clip_cov" and loss.clip_cov_lb >= loss.clip_cov_ub:
        yield Problem(
            f"{ACTOR}policy_loss.clip_cov_ub",
            loss.clip_cov_ub,
            f"must be above clip_cov_lb={loss.clip_cov_lb:g}: no token has a covariance between "
            "them",
            "Usual: 1 and 5.",
        )


def kl(context: Context) -> Iterator[Problem]:
    """An adaptive KL coefficient does not start from 0."""
    algorithm = context.config.algorithm
    control = algorithm.kl_ctrl
    if algorithm.use_kl_in_reward and control.type == "adaptive" and control.kl_coef == 0:
        yield Problem(
            "algorithm.kl_ctrl.kl_coef",
            0,
            "algorithm.kl_ctrl.type=adaptive multiplies this weight to follow the KL, so 0 stays 0",
            "Start from 0.001, or use algorithm.use_kl_in_reward=false for no KL.",
        )


def optimizers(context: Context) -> Iterator[Problem]:
    """AdamW has two averaging coefficients."""
    config = context.config
    sections = {
        "actor_rollout_ref.actor": config.actor_rollout_ref.actor.optim,
        "critic": config.critic.optim,
    }
    for section, optim in sections.items():
        if len(optim.betas) != 2:
            yield Problem(
                f"{section}.optim.betas", optim.betas, "must be two numbers", "Usual: [0.9,0.999]."
            )


def no_think_rl(context: Context) -> Iterator[Problem]:
    """Search-R1's key has its only supported value."""
    if context.config.algorithm.no_think_rl:
        yield Problem(
            "algorithm.no_think_rl",
            True,
            "only false is supported: the whole response is trained",
            "Leave it out.",
        )


def score_scale(context: Context) -> Iterator[Problem]:
    """Each entry of reward.score_scale names a scale."""
    legal = ", ".join(catalog.SCORE_SCALES)
    for source, scale in context.config.reward.score_scale.items():
        if scale not in catalog.SCORE_SCALES:
            yield Problem(
                f"reward.score_scale.{source}", scale, "is not a legal name", f"Legal: {legal}."
            )


def training_scores(context: Context) -> Iterator[Problem]:
    """Clipping and length penalty of training scores are well defined."""
    bounds = context.config.reward.clip_range
    buffer = context.config.reward.overlong_buffer
    longest = context.config.data.max_response_length
    if bounds is not None and (len(bounds) != 2 or bounds[0] >= bounds[1]):
        yield Problem(
            "reward.clip_range",
            bounds,
            "must be two numbers, the lower one first",
            "Such as [-10,10].",
        )
    if not buffer.enable or not context.ok("data.max_response_length"):
        return
    full = longest if buffer.max_resp_len is None else buffer.max_resp_len
    if full < longest and context.ok("reward.overlong_buffer.max_resp_len"):
        yield Problem(
            "reward.overlong_buffer.max_resp_len",
            full,
            f"is less than data.max_response_length={longest}: responses would be longer than the "
            "length of the full penalty",
            "Leave it out, or lower data.max_response_length.",
        )
    if buffer.len == 0:
        yield Problem(
            "reward.overlong_buffer.len",
            0,
            "must be >= 1",
            "Usual: a fifth of the longest response.",
        )
    if buffer.len is not None and buffer.len > full and context.ok("reward.overlong_buffer.len"):
        yield Problem(
            "reward.overlong_buffer.len",
            buffer.len,
            f"is more than data.max_response_length={longest}: even an empty response would be "
            "penalized"
            if buffer.max_resp_len is None
            else f"is more than max_resp_len={full}: even an empty response would be penalized",
            "Usual: a fifth of it.",
        )
