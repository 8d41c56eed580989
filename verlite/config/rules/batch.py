"""Batch sizes, micro-batches, sequence lengths and dynamic sampling."""

import math
from collections.abc import Iterator

from verlite.config import plan
from verlite.config.keys import get
from verlite.config.problems import Problem
from verlite.config.rules.context import Context, nearest_legal

ACTOR = "actor_rollout_ref.actor."
ROLLOUT = "actor_rollout_ref.rollout."


def mini_batches(c: Context) -> Iterator[Problem]:
    """The mini-batches of a step are equally large. One that is larger than the batch is cut."""
    sizes = {f"{ACTOR}ppo_mini_batch_size": c.actor.ppo_mini_batch_size}
    if c.needs_critic and c.critic.ppo_mini_batch_size is not None:
        sizes["critic.ppo_mini_batch_size"] = c.critic.ppo_mini_batch_size
    for key, size in sizes.items():
        if c.ok("data.train_batch_size", key) and size < c.prompts and c.prompts % size:
            yield Problem(
                key,
                size,
                f"does not divide data.train_batch_size={c.prompts}: the last update of each step "
                "would be smaller than the others",
                nearest_legal(c.prompts, size),
            )


def micro_batches(context: Context) -> Iterator[Problem]:
    """Each kind of pass has a number of samples, or enough tokens for the longest sequence."""
    config = context.config
    yield from _passes(context, ACTOR, "", "ppo_", "actor")
    yield from _passes(context, ROLLOUT, "log_prob_", "log_prob_", "actor")
    if plan.computes_reference(config):
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
        yield Problem(
            size_key,
            None,
            "must be given: samples per pass on one device",
            f"Start with {size_key}=4, or set {switch_key}=true.",
        )


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
