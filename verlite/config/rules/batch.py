"""Batch sizes, micro-batches, sequence lengths and dynamic sampling."""

import math
from collections.abc import Iterator

from verlite.config import plan
from verlite.config.keys import get
from verlite.config.problems import Problem
from verlite.config.rules.context import Context, nearest_legal

ACTOR = "actor_rollout_ref.actor."
ROLLOUT = "actor_rollout_ref.rollout."


def mini_batches(context: Context) -> Iterator[Problem]:
    """The mini-batches of a step are equally large. One that is larger than the batch is cut."""
    config = context.config
    prompts = config.data.train_batch_size
    sizes = {f"{ACTOR}ppo_mini_batch_size": config.actor_rollout_ref.actor.ppo_mini_batch_size}
    if plan.needs_critic(config) and config.critic.ppo_mini_batch_size is not None:
        sizes["critic.ppo_mini_batch_size"] = config.critic.ppo_mini_batch_size
    for key, size in sizes.items():
        if not context.ok("data.train_batch_size", key):
            continue
        if size < prompts and prompts % size:
            yield Problem(
                key,
                size,
                f"does not divide data.train_batch_size={prompts}: the last update of each step "
                "would be smaller than the others",
                nearest_legal(prompts, size),
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
    longest = config.data.max_prompt_length + config.data.max_response_length
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


def lengths(context: Context) -> Iterator[Problem]:
    """The engine accepts the longest sequence."""
    data = context.config.data
    rollout = context.config.actor_rollout_ref.rollout
    longest = data.max_prompt_length + data.max_response_length
    if rollout.max_model_len is not None and rollout.max_model_len < longest:
        yield Problem(
            f"{ROLLOUT}max_model_len",
            rollout.max_model_len,
            f"is less than data.max_prompt_length + data.max_response_length = {longest}",
            f"Leave it out, or use at least {longest}.",
        )
    if rollout.enable_chunked_prefill or plan.resolve_rollout(rollout.name) != "vllm":
        return
    needed = rollout.max_model_len or longest
    if rollout.max_num_batched_tokens < needed:
        yield Problem(
            f"{ROLLOUT}max_num_batched_tokens",
            rollout.max_num_batched_tokens,
            f"is less than the longest sequence, {needed} tokens, while "
            "enable_chunked_prefill=false",
            f"Use at least {needed}, or {ROLLOUT}enable_chunked_prefill=true.",
        )


def dynamic_sampling(context: Context) -> Iterator[Problem]:
    """Dynamic sampling can fill a step."""
    config = context.config
    groups = config.algorithm.filter_groups
    prompts = config.data.train_batch_size
    n = config.actor_rollout_ref.rollout.n
    metric = "algorithm.filter_groups.metric"
    limit_key = "algorithm.filter_groups.max_num_gen_batches"
    if not groups.enable:
        return
    if n == 1:
        yield Problem(
            f"{ROLLOUT}n",
            n,
            "the single sample of a prompt never differs, so algorithm.filter_groups.enable=true "
            "leaves no prompt to train on",
            "Use 4 to 16.",
        )
    drawn = plan.prompts_drawn(config)[1]
    limit = groups.max_num_gen_batches
    sizes_ok = context.ok("data.train_batch_size", "data.gen_batch_size", limit_key)
    if 0 < limit * drawn < prompts and sizes_ok:
        yield Problem(
            limit_key,
            limit,
            f"generations of {drawn} prompts never fill data.train_batch_size={prompts}",
            f"Use at least {math.ceil(2 * prompts / drawn)}, so that half of the prompts may be "
            "left out; or 0.",
        )
    builtin = (None, "score", "acc", "seq_reward", "seq_final_reward")
    own = config.custom_reward_function.path is not None or plan.scores_remotely(config.reward)
    if groups.metric not in builtin and not own:
        yield Problem(
            metric,
            groups.metric,
            "the built-in reward functions return only a score",
            "Use score or seq_reward.",
        )
    if groups.metric == "seq_final_reward":
        yield Problem(
            metric,
            groups.metric,
            "contains the KL penalty, which is known only after prompts are selected",
            "Use seq_reward or score.",
        )
