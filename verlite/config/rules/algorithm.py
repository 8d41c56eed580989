"""Rules on batch sizes, reward parts, score scales, dynamic sampling and rollout correction."""

import dataclasses
import math
from collections.abc import Iterator

from verlite.config import plan
from verlite.config.keys import get
from verlite.config.problems import Problem
from verlite.config.rules.context import Context, nearest_legal
from verlite.spec import catalog
from verlite.spec.correction import PRESETS, RolloutCorrection, settings

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
        rule = "a part with the weight 0 has no influence"
        yield Problem(GDPO_WEIGHTS, weights, rule, f"Leave it out of {GDPO_KEYS}.")
    if c.groups.enable and keys and (c.groups.metric or "score") not in keys:
        rule = f"algorithm.adv_estimator=gdpo compares only {', '.join(keys)}"
        yield Problem("algorithm.filter_groups.metric", c.groups.metric, rule, "Use one of these.")


def score_scale(context: Context) -> Iterator[Problem]:
    """Each entry of reward.score_scale names a scale."""
    legal = ", ".join(catalog.SCORE_SCALES)
    for source, scale in context.config.reward.score_scale.items():
        if scale not in catalog.SCORE_SCALES:
            yield Problem(
                f"reward.score_scale.{source}", scale, "is not a legal name", f"Legal: {legal}."
            )


ACTOR = "actor_rollout_ref.actor."
ROLLOUT = "actor_rollout_ref.rollout."


def mini_batches(c: Context) -> Iterator[Problem]:
    """The mini-batches of a step are equally large. One that is larger than the batch is cut."""
    sizes = {f"{ACTOR}ppo_mini_batch_size": c.actor.ppo_mini_batch_size}
    if c.needs_critic and c.critic.ppo_mini_batch_size is not None:
        sizes["critic.ppo_mini_batch_size"] = c.critic.ppo_mini_batch_size
    for key, size in sizes.items():
        if c.ok("data.train_batch_size", key) and size < c.prompts and c.prompts % size:
            rule = (
                f"does not divide data.train_batch_size={c.prompts}: the last update of each step "
                "would be smaller than the others"
            )
            yield Problem(key, size, rule, nearest_legal(c.prompts, size))


def micro_batches(context: Context) -> Iterator[Problem]:
    """Each kind of pass has a number of samples, or enough tokens for the longest sequence."""
    config = context.config
    yield from _passes(context, ACTOR, "", "ppo_", "actor")
    yield from _passes(context, ROLLOUT, "log_prob_", "log_prob_", "actor")
    if plan.computes_reference(config) or plan.computes_teacher(config):
        yield from _passes(context, "actor_rollout_ref.ref.", "log_prob_", "log_prob_", "ref")
    if plan.needs_critic(config):
        yield from _passes(context, "critic.", "", "ppo_", "critic")


def _passes(
    context: Context, section: str, switch: str, prefix: str, role: str
) -> Iterator[Problem]:
    """Check the micro-batches of one kind of pass. null inherits the actor's setting."""
    config = context.config
    actor = config.actor_rollout_ref.actor
    switch_key = f"{section}{switch}use_dynamic_bsz"
    own_switch = get(config, switch_key)
    inherits = own_switch is None or own_switch == actor.use_dynamic_bsz
    by_tokens = actor.use_dynamic_bsz if own_switch is None else own_switch
    if by_tokens:
        yield from _token_budget(context, f"{section}{prefix}max_token_len_per_gpu", role, inherits)
        return
    size_key = f"{section}{prefix}micro_batch_size_per_gpu"
    needs_own = not inherits and actor.ppo_micro_batch_size_per_gpu is None
    if get(config, size_key) is None and (section == ACTOR or needs_own):
        rule = "must be given: samples per pass on one device"
        yield Problem(size_key, None, rule, f"Start with {size_key}=4, or set {switch_key}=true.")


def _token_budget(context: Context, key: str, role: str, inherits: bool) -> Iterator[Problem]:
    """The longest sequence fits a micro-batch.

    An inherited budget is reported once, for the actor, unless the actor counts samples or has more
    devices for it.
    """
    config = context.config
    longest = context.longest
    devices = plan.sequence_parallel(config)
    shared = max(1, devices[role])
    budget = get(config, key)
    if budget is None and (not inherits or shared < devices["actor"]):
        budget = config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu
    if budget is None or budget * shared >= longest:
        return
    if context.ok("data.max_prompt_length", "data.max_response_length", key):
        yield Problem(
            key,
            budget,
            f"is less than data.max_prompt_length + data.max_response_length = {longest}: such a "
            "sequence fits no micro-batch",
            f"Use at least {math.ceil(longest / shared)}; a few times that uses devices better.",
        )


def dynamic_sampling(c: Context) -> Iterator[Problem]:
    """The generations of dynamic sampling can fill a step."""
    drawn = plan.prompts_drawn(c.config)[1]
    limit = c.groups.max_num_gen_batches
    key = "algorithm.filter_groups.max_num_gen_batches"
    sizes_ok = c.ok("data.train_batch_size", "data.gen_batch_size", key)
    if c.groups.enable and 0 < limit * drawn < c.prompts and sizes_ok:
        yield Problem(
            key,
            limit,
            f"generations of {drawn} prompts never fill data.train_batch_size={c.prompts}",
            f"Use at least {math.ceil(2 * c.prompts / drawn)}, so that half of the prompts may be "
            "left out; or 0.",
        )


SECTION = "algorithm.rollout_correction."


def rollout_correction(context: Context) -> Iterator[Problem]:
    """The settings are complete, consistent, and fit loss and estimator."""
    section = context.config.algorithm.rollout_correction
    if not context.ok(f"{SECTION}preset", f"{SECTION}rollout_is", f"{SECTION}loss_type"):
        return
    others = sorted(key for key in context.user_keys if key.startswith(SECTION))
    others = [key for key in others if key != f"{SECTION}preset"]
    if section.preset is not None and others:
        yield Problem(
            others[0],
            get(context.config, others[0]),
            f"{SECTION}preset={section.preset} is set too, and determines all of these keys",
            f"Keep the preset alone, or set its values: {_written_out(section.preset)}.",
        )
        return
    try:
        correction = settings(section)
    except ValueError as error:
        assignment, _, rule = str(error).partition(": ")
        key, _, value = assignment.partition("=")
        yield Problem(f"{SECTION}{key}", value, rule)
        return
    yield from _bands(context, correction)
    yield from _bypass(context, correction)


def _bands(context: Context, correction: RolloutCorrection) -> Iterator[Problem]:
    """Every band of ratios contains 1."""
    bands = []
    if correction.rollout_is:
        bands.append(("rollout_is_threshold", *correction.is_band))
    for name, low, high in correction.rejections:
        if name.endswith("k1"):
            bands.append(("rollout_rs_threshold", math.exp(low), math.exp(high)))
    for key, low, high in bands:
        if not low <= 1 <= high:
            yield Problem(
                f"{SECTION}{key}",
                get(context.config.algorithm.rollout_correction, key),
                "excludes 1, the ratio of samples without any difference",
                "Usual: 2 or 0.5_5.0 for weights, 0.5_2.0 for rejection.",
            )
            break


def _bypass(context: Context, correction: RolloutCorrection) -> Iterator[Problem]:
    """Bypass mode determines the loss, and computes no old log-probs."""
    if not correction.bypass_mode:
        return
    loss = context.config.actor_rollout_ref.actor.policy_loss.loss_mode
    estimator = context.config.algorithm.adv_estimator
    if loss != "vanilla":
        rule = f"{SECTION}bypass_mode determines the loss ({correction.loss_type})"
        remedy = f"Leave one of the two out; {SECTION}loss_type selects ppo_clip or reinforce."
        yield Problem("actor_rollout_ref.actor.policy_loss.loss_mode", loss, rule, remedy)
    if plan.places_inference(context.config):
        yield Problem(
            "cluster.component_placement",
            context.config.cluster.component_placement,
            f"inference computes old log-probs, and {SECTION}bypass_mode uses the engines' instead",
            "Leave inference or the mode out.",
        )
    if "sum_pi_squared" in catalog.estimator(estimator).measured:
        rule = f"needs results of the forward pass that {SECTION}bypass_mode skips"
        remedy = f"Use {SECTION}bypass_mode=false, or another estimator."
        yield Problem("algorithm.adv_estimator", estimator, rule, remedy)


def _written_out(preset: str) -> str:
    """Return a preset as the assignments that it stands for."""
    default = RolloutCorrection()
    assignments = [
        f"{key}={value}"
        for key, value in dataclasses.asdict(PRESETS[preset]).items()
        if value != getattr(default, key)
    ]
    return " ".join(assignments) or "none"
