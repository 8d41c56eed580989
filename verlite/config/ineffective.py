"""Notes on keys that have no effect in a configuration, and on legal settings that are rarely
meant.

When a key is used is declared on its schema field. Only keys that the user set are reported.
"""

from collections.abc import Collection, Iterator, Mapping

from verlite.config import conditions, keys, placement, plan
from verlite.config.schema import Config
from verlite.spec import catalog

ACTOR = "actor_rollout_ref.actor."
ROLLOUT = "actor_rollout_ref.rollout."
PLACEMENT = "cluster.component_placement"
ENGINE_KWARGS = ROLLOUT + "engine_kwargs."


def keys_without_effect(config: Config, user_keys: Collection[str]) -> dict[str, str]:
    """Return each key that the user set and that has no effect, with the reason."""
    reasons = {}
    for name in sorted(user_keys):
        reason = why_unused(name, config)
        if reason is not None:
            reasons[name] = reason
    # A mapping that was set by its entries is reported by its entries.
    return {
        name: reason
        for name, reason in reasons.items()
        if not any(other.startswith(name + ".") for other in reasons)
    }


def why_unused(name: str, config: Config) -> str | None:
    """Return why a key has no effect in a configuration, or None if it has one."""
    if name.startswith(ENGINE_KWARGS):
        return _why_engine_is_unused(name, config)
    key = keys.find(name)
    if key is None or key.section:
        return None
    if key.facts.unused:
        return key.facts.unused
    for condition in key.conditions:
        if not conditions.holds(condition.text, config):
            addition = f" ({condition.note})" if condition.note else ""
            return f"used only {conditions.words(condition.text)}{addition}"
    return None


def _why_engine_is_unused(name: str, config: Config) -> str | None:
    """Return why an entry of engine_kwargs has no effect: it is for another engine."""
    wanted = name.removeprefix(ENGINE_KWARGS).split(".")[0]
    if wanted == "sglang":
        return "SGLang is not supported"
    engine = plan.resolve_rollout(config.actor_rollout_ref.rollout.name)
    is_entry = "." in name.removeprefix(ENGINE_KWARGS)
    return f"the rollout engine is {engine}" if is_entry and wanted != engine else None


def remarks(config: Config, old_names: Mapping[str, str]) -> list[str]:
    """Return notes on settings that are legal but may not do what the user expects.

    Args:
        config: the whole configuration.
        old_names: names that the user typed, to the keys they are called now.
    """
    return [
        *_placement_remarks(config),
        *_rollout_remarks(config),
        *_batch_remarks(config),
        *_loss_remarks(config),
        *_kl_remarks(config),
        *_filter_remarks(config),
        *_length_remarks(config),
        *_search_r1_remarks(config, old_names),
        *_validation_remarks(config),
    ]


def _placement_remarks(config: Config) -> Iterator[str]:
    typed = {
        name.strip()
        for names in config.cluster.component_placement or {}
        for name in names.split(",")
    }
    for name in sorted(typed & placement.RENAMED.keys()):
        yield f"{PLACEMENT}: {name} is called {placement.RENAMED[name]} here"
    for name in sorted(typed & placement.IGNORED.keys()):
        yield f"{PLACEMENT}: {name} has no effect: {placement.IGNORED[name]}"


def _rollout_remarks(config: Config) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    truncating = []
    if rollout.top_p < 1:
        truncating.append(f"{ROLLOUT}top_p={rollout.top_p}")
    if rollout.top_k > 0:
        truncating.append(f"{ROLLOUT}top_k={rollout.top_k}")
    if truncating:
        yield (
            f"{' and '.join(truncating)}: samples come from a truncated distribution, but training "
            "uses the full one; rollout and training log-probs will differ"
        )
    if rollout.name == "auto":
        chosen = plan.resolve_rollout("auto")
        why = "" if chosen == "vllm" else ": vLLM is not installed"
        yield f"{ROLLOUT}name=auto chose {chosen}{why}"


def _batch_remarks(config: Config) -> Iterator[str]:
    prompts = config.data.train_batch_size
    sizes = {f"{ACTOR}ppo_mini_batch_size": config.actor_rollout_ref.actor.ppo_mini_batch_size}
    if plan.needs_critic(config) and config.critic.ppo_mini_batch_size is not None:
        sizes["critic.ppo_mini_batch_size"] = config.critic.ppo_mini_batch_size
    for key, size in sizes.items():
        if size > prompts:
            yield (
                f"{key}={size} is more than data.train_batch_size={prompts}; both count prompts: "
                "one update per step"
            )
    estimator = config.algorithm.adv_estimator
    if config.actor_rollout_ref.rollout.n == 1 and catalog.compares(estimator):
        score = "the sum of its reward parts" if estimator == "gdpo" else "the score itself"
        yield (
            f"algorithm.adv_estimator={estimator} with {ROLLOUT}n=1: a prompt has no other sample "
            f"to compare with, so the advantage is {score}, without a baseline; usual: 4 to 16"
        )


def _loss_remarks(config: Config) -> Iterator[str]:
    actor = config.actor_rollout_ref.actor
    loss = catalog.POLICY_LOSSES.get(actor.policy_loss.loss_mode)
    if loss and loss.aggregation and loss.aggregation != actor.loss_agg_mode:
        yield (
            f"{ACTOR}loss_agg_mode={actor.loss_agg_mode}: the paper of "
            f"policy_loss.loss_mode={actor.policy_loss.loss_mode} uses {loss.aggregation}"
        )


def _kl_remarks(config: Config) -> Iterator[str]:
    actor = config.actor_rollout_ref.actor
    algorithm = config.algorithm
    unused = "the KL to the reference is computed, which costs a reference, but has no influence"
    if algorithm.use_kl_in_reward and actor.use_kl_loss:
        yield (
            "the KL to the reference counts twice: algorithm.use_kl_in_reward and "
            f"{ACTOR}use_kl_loss are both on"
        )
    if actor.use_kl_loss and actor.kl_loss_coef == 0:
        yield f"{ACTOR}kl_loss_coef=0: {unused}"
    if actor.use_kl_loss and actor.kl_loss_type in ("kl", "k1"):
        yield (
            f"{ACTOR}kl_loss_type={actor.kl_loss_type}: the expected gradient of this estimator is "
            f"0, so it adds noise and no constraint; use {actor.kl_loss_type}+ or low_var_kl"
        )
    if not algorithm.use_kl_in_reward:
        if algorithm.adv_estimator == "rloo_token_kl":
            yield (
                "algorithm.adv_estimator=rloo_token_kl is rloo with clipped advantages while "
                "algorithm.use_kl_in_reward is off"
            )
        return
    if algorithm.kl_ctrl.type == "fixed" and algorithm.kl_ctrl.kl_coef == 0:
        yield f"algorithm.kl_ctrl.kl_coef=0: {unused}"
    if algorithm.kl_penalty.endswith("+"):
        yield (
            f"algorithm.kl_penalty={algorithm.kl_penalty}: a reward has no gradient, so the + has "
            "no effect"
        )


def _filter_remarks(config: Config) -> Iterator[str]:
    if not config.algorithm.filter_groups.enable:
        return
    if config.trainer.epochs() is not None:
        yield (
            "trainer.total_epochs counts data.train_batch_size prompts per step, but "
            "algorithm.filter_groups draws more: set trainer.total_training_steps for an exact "
            "length"
        )
    several = config.actor_rollout_ref.rollout.n > 1
    if several and "values" in catalog.measured(config.algorithm.adv_estimator):
        yield (
            "algorithm.filter_groups leaves out prompts whose samples agree: the critic never "
            "learns their values"
        )


def _length_remarks(config: Config) -> Iterator[str]:
    fits = config.data.max_prompt_length + config.data.max_response_length
    if plan.max_turns(config) and plan.worst_case(config) > fits:
        yield f"samples may not fit: {plan.length_arithmetic(config)}"


def _search_r1_remarks(config: Config, old_names: Mapping[str, str]) -> Iterator[str]:
    n = config.actor_rollout_ref.rollout.n
    if "actor_rollout_ref.rollout.n_agent" in old_names and n > 1:
        yield (
            f"{ACTOR}ppo_mini_batch_size counts prompts here, {n} samples each; Search-R1 counted "
            f"samples, so its runs made {n} times as many updates"
        )


def _validation_remarks(config: Config) -> Iterator[str]:
    sampling = config.actor_rollout_ref.rollout.val_kwargs
    if not plan.files_of(config.data.val_files):
        return
    samples = sampling.do_sample and sampling.temperature > 0
    if sampling.n > 1 and not samples:
        yield (
            f"{ROLLOUT}val_kwargs.n={sampling.n}: validation is greedy, so all samples of a prompt "
            "are the same"
        )
    elif sampling.do_sample and sampling.temperature == 0:
        yield f"{ROLLOUT}val_kwargs.temperature=0 is greedy although do_sample is on"
