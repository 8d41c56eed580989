"""The conditions of `used_when`: a small grammar over other keys, and named predicates.

KEY=VALUE, KEY!=VALUE, KEY>NUMBER   the value of another key
estimator reads FIELD               the advantage estimator reads this input
loss reads FIELD                    the policy loss reads this setting
any other text                      an entry of PREDICATES

A leading "." in KEY stands for the section of the declared key.
"""

import re
from collections.abc import Callable
from typing import Any

from verlite.config import plan
from verlite.config.keys import get
from verlite.config.schema import (
    CRITIC,
    GIVEN_VALIDATION,
    GPU,
    KL_TERM,
    NOT_THE_ACTOR,
    OWN_ENGINES,
    OWN_REFERENCE,
    OWN_ROWS,
    ROW_ESTIMATOR,
    UNWHITENED,
    VLLM,
    Config,
)
from verlite.spec import catalog, correction

ESTIMATOR = "algorithm.adv_estimator"
LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"

COMPARISON = re.compile(r"([\w.]+)(=|!=|>)(\S+)")
READS = re.compile(r"(estimator|loss) reads (\w+)")


def holds(condition: str, config: Any) -> bool:
    """Return whether a condition of `used_when` is true for a configuration, of any command if it
    compares a key and of main_ppo otherwise."""
    comparison = COMPARISON.fullmatch(condition)
    if comparison:
        key, operator, wanted = comparison.groups()
        return _compare(get(config, key), operator, wanted)
    reads = READS.fullmatch(condition)
    if reads:
        key, table = _readers(reads[1])
        return catalog.reads(table, get(config, key), reads[2])
    return PREDICATES[condition](config)


def words(condition: str) -> str:
    """Return a condition as the end of a sentence that begins with "used only"."""
    comparison = COMPARISON.fullmatch(condition)
    if comparison and comparison[2] == "!=":
        key, _, value = comparison.groups()
        return f"when {key} is set" if value == "null" else f"when {key} is not {value}"
    if comparison:
        return f"with {condition}"
    reads = READS.fullmatch(condition)
    if reads:
        key, table = _readers(reads[1])
        names = [name for name in table if catalog.reads(table, name, reads[2])]
        return f"with {key}={', '.join(names)} or your own function"
    return f"when {condition}"


def _compare(value: Any, operator: str, wanted: str) -> bool:
    if operator == ">":
        return value > float(wanted)
    text = {None: "null", True: "true", False: "false"}.get(value, value)
    return (str(text) == wanted) == (operator == "=")


def _readers(kind: str) -> tuple[str, Any]:
    if kind == "estimator":
        return ESTIMATOR, catalog.ESTIMATORS
    return LOSS, catalog.POLICY_LOSSES


def _by_tokens(section: str) -> Callable[[Config], bool]:
    """Return a predicate: passes of a section fill micro-batches by tokens."""
    return lambda config: plan.uses_dynamic_batches(config, section)


def _by_count(section: str) -> Callable[[Config], bool]:
    return lambda config: not plan.uses_dynamic_batches(config, section)


def _own_reference(condition: Callable[[Config], bool]) -> Callable[[Config], bool]:
    """Return a predicate: the condition holds, and no service computes the reference."""
    return lambda config: condition(config) and not plan.reference_urls(config)


PASSES = ("actor", "rollout", "ref", "critic")


def _any_by_count(config: Config) -> bool:
    return not all(plan.uses_dynamic_batches(config, section) for section in PASSES)


def _any_by_tokens(config: Config) -> bool:
    return any(plan.uses_dynamic_batches(config, section) for section in PASSES)


def _divides_by_constant(config: Config) -> bool:
    actor = config.actor_rollout_ref.actor.loss_agg_mode
    modes = [actor]
    if plan.needs_critic(config):
        modes.append(config.critic.loss_agg_mode or actor)
    return "seq-mean-token-sum-norm" in modes


def _selects_or_shuffles(config: Config) -> bool:
    actor = config.actor_rollout_ref.actor
    loss = actor.policy_loss.loss_mode
    selects = loss not in catalog.POLICY_LOSSES or loss == "clip_cov"
    return selects or actor.shuffle or bool(config.critic.shuffle)


def _corrected(config: Config) -> correction.RolloutCorrection:
    return correction.settings(config.algorithm.rollout_correction)


def _ratio_does_not_correct(config: Config) -> bool:
    settings = _corrected(config)
    return not (settings.bypass_mode and settings.loss_type == "ppo_clip")


def _one_clip_range_is_null(config: Config) -> bool:
    actor = config.actor_rollout_ref.actor
    return actor.clip_ratio_low is None or actor.clip_ratio_high is None


def _on(device: str) -> Callable[[Config], bool]:
    """Return a predicate: the run may be on this kind of device.

    trainer.device=auto takes what a cluster has, which only joining it tells.
    """

    def may_be(config: Config) -> bool:
        if config.trainer.device == "auto" and plan.joins_cluster(config):
            return True
        return plan.resolve_device(config.trainer.device) == device

    return may_be


def _validates_early(config: Config) -> bool:
    return not config.trainer.val_only or config.trainer.val_before_train


def _warms_up_a_critic(config: Config) -> bool:
    return plan.needs_critic(config) or config.trainer.critic_warmup == 0


PREDICATES: dict[str, Callable[[Config], bool]] = {
    GIVEN_VALIDATION: lambda config: bool(plan.files_of(config.data.val_files)),
    KL_TERM: plan.needs_reference,
    CRITIC: plan.needs_critic,
    ROW_ESTIMATOR: lambda config: catalog.is_by_row(get(config, ESTIMATOR)),
    UNWHITENED: lambda config: not catalog.whitens(get(config, ESTIMATOR)),
    VLLM: lambda config: (
        plan.resolve_rollout(config.actor_rollout_ref.rollout.name) not in ("hf", "server")
    ),
    OWN_ENGINES: lambda config: config.actor_rollout_ref.rollout.name != "server",
    GPU: _on("cuda"),
    "the run is on CPUs": _on("cpu"),
    "the reference has its own worker": lambda config: (
        not plan.reference_is_actor(config) and not plan.reference_urls(config)
    ),
    NOT_THE_ACTOR: lambda config: not plan.uses_lora(config.actor_rollout_ref.model),
    OWN_REFERENCE: lambda config: not plan.reference_urls(config),
    "a pass counts samples (use_dynamic_bsz=false)": _any_by_count,
    "a pass fills micro-batches by tokens (use_dynamic_bsz=true)": _any_by_tokens,
    "old log-prob passes count samples (log_prob_use_dynamic_bsz=false)": _by_count("rollout"),
    "old log-prob passes fill batches by tokens (log_prob_use_dynamic_bsz=true)": _by_tokens(
        "rollout"
    ),
    "reference passes count samples (log_prob_use_dynamic_bsz=false)": _own_reference(
        _by_count("ref")
    ),
    "reference passes fill micro-batches by tokens (log_prob_use_dynamic_bsz=true)": _own_reference(
        _by_tokens("ref")
    ),
    "critic passes count samples (critic.use_dynamic_bsz=false)": _by_count("critic"),
    "critic passes fill micro-batches by tokens (critic.use_dynamic_bsz=true)": _by_tokens(
        "critic"
    ),
    "clip_ratio_low or clip_ratio_high is null": _one_clip_range_is_null,
    "a loss uses loss_agg_mode=seq-mean-token-sum-norm": _divides_by_constant,
    "actor.shuffle or critic.shuffle is on, or the loss is clip_cov": _selects_or_shuffles,
    "policy_loss.loss_mode names your own function": lambda config: (
        get(config, LOSS) not in catalog.POLICY_LOSSES
    ),
    "algorithm.adv_estimator names your own function": lambda config: (
        get(config, ESTIMATOR) not in catalog.ESTIMATORS
    ),
    "env.name names your own class": lambda config: config.env.name not in catalog.ENV_FACTORIES,
    "the loss has rollout_is weights": lambda config: bool(_corrected(config).rollout_is),
    "the loss is not bypass mode's ppo_clip": _ratio_does_not_correct,
    "rollout_rs rejects tokens or responses": lambda config: bool(_corrected(config).rollout_rs),
    "bypass mode is on": lambda config: _corrected(config).bypass_mode,
    "trainer.val_only is off or trainer.val_before_train is on": _validates_early,
    "the run has a critic, or trainer.critic_warmup is 0": _warms_up_a_critic,
    OWN_ROWS: lambda config: bool(config.data.custom_cls.path or config.data.sampler.class_path),
}
"""Conditions that a comparison cannot express. The text is what users read."""
