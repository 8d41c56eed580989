"""What the schema's fields declare: legal names, bounds, and when a key has an effect.

A bound is such as ">= 1 or -1", "> 0 and <= 1" or "finite". `used_when` has conditions:

KEY=VALUE, KEY!=VALUE, KEY>NUMBER   the value of another key
estimator reads FIELD               the advantage estimator reads this input
loss reads FIELD                    the policy loss reads this setting
any other text                      an entry of PREDICATES

A leading "." in KEY stands for the section of the declared key. Durations are text: 14400, 90m, 4h,
2d, 03:50:00, 2-12:00:00.
"""

import difflib
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from verlite.config import plan, schema
from verlite.config.keys import Key, find, get
from verlite.config.problems import Problem
from verlite.config.rules.context import KEYS, Context
from verlite.spec import catalog

OWN_NAME = re.compile(r"([\w.]+|.*\.py):\w+")

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    ">": operator.gt,
    "<=": operator.le,
    "<": operator.lt,
}


def names(config: Any, known: Mapping[str, Key]) -> Iterator[Problem]:
    """Report values that are not among the legal names of their key."""
    for key in known.values():
        if key.facts.choices:
            for item in _items(get(config, key.name)):
                # A number may stand in place of a name; its bound is checked below.
                if isinstance(item, str) and not _is_legal(key, item):
                    yield _unknown_name(key, item)


def numbers(config: Any, known: Mapping[str, Key]) -> Iterator[Problem]:
    """Report numbers out of the bounds of their key."""
    for key in known.values():
        if key.facts.bound:
            value = get(config, key.name)
            for item in _items(value):
                if not isinstance(item, str) and not within(item, key.facts.bound):
                    rule = f"must be {key.facts.bound}"
                    if not math.isfinite(item) and key.facts.bound != "finite":
                        rule = f"must be a finite number, {key.facts.bound}"
                    yield Problem(key.name, value, rule, key.facts.remedy)


def within(value: float, bound: str) -> bool:
    """Return whether a number satisfies a bound such as ">= 1 or -1" or "finite"."""
    if not math.isfinite(value):
        return False
    if bound == "finite":
        return True
    return any(
        all(_satisfies(value, part.split()) for part in alternative.split(" and "))
        for alternative in bound.split(" or ")
    )


def _satisfies(value: float, part: list[str]) -> bool:
    if len(part) == 1:
        return value == float(part[0])
    return _OPERATORS[part[0]](value, float(part[1]))


def _items(value: Any) -> list[Any]:
    items = value if isinstance(value, list) else [value]
    return [item for item in items if item is not None]


def _is_legal(key: Key, item: str) -> bool:
    own = bool(key.facts.own) and OWN_NAME.fullmatch(item) is not None
    return item in key.facts.choices or own


def _unknown_name(key: Key, item: str) -> Problem:
    facts = key.facts
    remedy = f"Legal: {key.legal_names()}."
    close = difflib.get_close_matches(item.lower(), facts.choices, n=1, cutoff=0.5)
    if close and item not in facts.hints:
        remedy = f"Did you mean {close[0]}? {remedy}"
    if item in facts.hints:
        remedy = f"{remedy} {facts.hints[item]}"
    return Problem(key.name, item, "is not a legal name", remedy)


ESTIMATOR = "algorithm.adv_estimator"
LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
ENGINE_KWARGS = "actor_rollout_ref.rollout.engine_kwargs."

COMPARISON = re.compile(r"([\w.]+)(=|!=|>)(\S+)")
READS = re.compile(r"(estimator|loss) reads (\w+)")


def holds(condition: str, c: Context) -> bool:
    """Return whether a condition of `used_when` is true."""
    compared = compare(condition, c.config)
    if compared is not None:
        return compared
    reads = READS.fullmatch(condition)
    if reads:
        key, table = _readers(reads[1])
        return catalog.reads(table, get(c.config, key), reads[2])
    return PREDICATES[condition](c)


def compare(condition: str, config: Any) -> bool | None:
    """Return whether a comparison of a key is true, in the configuration of any command; None if
    the condition is none."""
    comparison = COMPARISON.fullmatch(condition)
    if not comparison:
        return None
    key, operator, wanted = comparison.groups()
    value = get(config, key)
    if operator == ">":
        return value > float(wanted)
    text = {None: "null", True: "true", False: "false"}.get(value, value)
    return (str(text) == wanted) == (operator == "=")


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


def _readers(kind: str) -> tuple[str, Any]:
    if kind == "estimator":
        return ESTIMATOR, catalog.ESTIMATORS
    return LOSS, catalog.POLICY_LOSSES


PASSES = ("actor", "rollout", "ref", "critic")


def _may_be_on(c: Context, device: str) -> bool:
    """Return whether the run may be on this kind of device. trainer.device=auto takes what a
    cluster has, which only joining it tells."""
    unknown = c.trainer.device == "auto" and plan.joins_cluster(c.config)
    return unknown or plan.resolve_device(c.trainer.device) == device


def _divides_by_constant(c: Context) -> bool:
    modes = [c.actor.loss_agg_mode]
    if c.needs_critic:
        modes.append(c.critic.loss_agg_mode or c.actor.loss_agg_mode)
    return "seq-mean-token-sum-norm" in modes


# fmt: off
PREDICATES: dict[str, Callable[[Context], bool]] = {
    schema.GIVEN_VALIDATION: lambda c: bool(c.val_files),
    # A teacher has the settings of the reference's passes.
    schema.KL_TERM: lambda c: plan.needs_reference(c.config) or c.config.distillation.enabled,
    schema.REFERENCE: lambda c: plan.needs_reference(c.config),
    schema.PROGRAM: lambda c: c.program is not None,
    schema.CRITIC: lambda c: c.needs_critic,
    schema.ROW_ESTIMATOR: lambda c: catalog.estimator(c.estimator).by_row,
    schema.UNWHITENED: lambda c: not catalog.estimator(c.estimator).whitens,
    schema.VLLM: lambda c: c.engine not in ("hf", "server"),
    schema.OWN_ENGINES: lambda c: c.rollout.name != "server",
    schema.GPU: lambda c: _may_be_on(c, "cuda"),
    "the run is on CPUs": lambda c: _may_be_on(c, "cpu"),
    "a reference or teacher has its own worker":
        lambda c: bool({"ref", "teacher"} & set(plan.roles(c.config))),
    schema.NOT_THE_ACTOR: lambda c: not plan.uses_lora(c.model),
    schema.OWN_REFERENCE: lambda c: c.own_reference,
    "a pass counts samples (use_dynamic_bsz=false)":
        lambda c: not all(map(c.by_tokens, PASSES)),
    "a pass fills micro-batches by tokens (use_dynamic_bsz=true)":
        lambda c: any(map(c.by_tokens, PASSES)),
    "old log-prob passes count samples (log_prob_use_dynamic_bsz=false)":
        lambda c: not c.by_tokens("rollout"),
    "old log-prob passes fill batches by tokens (log_prob_use_dynamic_bsz=true)":
        lambda c: c.by_tokens("rollout"),
    "reference passes count samples (log_prob_use_dynamic_bsz=false)":
        lambda c: c.own_reference and not c.by_tokens("ref"),
    "reference passes fill micro-batches by tokens (log_prob_use_dynamic_bsz=true)":
        lambda c: c.own_reference and c.by_tokens("ref"),
    "critic passes count samples (critic.use_dynamic_bsz=false)":
        lambda c: not c.by_tokens("critic"),
    "critic passes fill micro-batches by tokens (critic.use_dynamic_bsz=true)":
        lambda c: c.by_tokens("critic"),
    "clip_ratio_low or clip_ratio_high is null":
        lambda c: None in (c.actor.clip_ratio_low, c.actor.clip_ratio_high),
    "a loss uses loss_agg_mode=seq-mean-token-sum-norm": _divides_by_constant,
    "actor.shuffle or critic.shuffle is on, or the loss is clip_cov": lambda c: bool(
        c.loss is None or c.loss_mode == "clip_cov" or c.actor.shuffle or c.critic.shuffle),
    "policy_loss.loss_mode names your own function": lambda c: c.loss is None,
    "algorithm.adv_estimator names your own function":
        lambda c: c.estimator not in catalog.ESTIMATORS,
    "env.name names your own class, or env.openenv is given":
        lambda c: plan.env_name(c.config) not in ("search", "calculator"),
    "the loss has rollout_is weights": lambda c: bool(c.correction.rollout_is),
    "the loss is not bypass mode's ppo_clip":
        lambda c: not (c.correction.bypass_mode and c.correction.loss_type == "ppo_clip"),
    "rollout_rs rejects tokens or responses": lambda c: bool(c.correction.rollout_rs),
    "bypass mode is on": lambda c: c.correction.bypass_mode,
    "trainer.val_only is off or trainer.val_before_train is on":
        lambda c: not c.trainer.val_only or c.trainer.val_before_train,
    "the run has a critic, or trainer.critic_warmup is 0":
        lambda c: c.needs_critic or c.trainer.critic_warmup == 0,
    schema.OWN_ROWS: lambda c: bool(c.data.custom_cls.path or c.data.sampler.class_path),
}
# fmt: on
"""Conditions that a comparison cannot express. The text is what users read."""


def keys_without_effect(c: Context) -> dict[str, str]:
    """Return each key that the user set and that has no effect, with the reason."""
    reasons = {name: why for name in sorted(c.user_keys) if (why := why_unused(name, c))}
    # A mapping that was set by its entries is reported by its entries.
    return {
        name: reason
        for name, reason in reasons.items()
        if not any(other.startswith(name + ".") for other in reasons)
    }


def why_unused(name: str, c: Context) -> str | None:
    """Return why a key has no effect in a configuration, or None if it has one."""
    if name.startswith(ENGINE_KWARGS):
        return _why_engine_is_unused(name.removeprefix(ENGINE_KWARGS), c.engine)
    key = find(name, KEYS)
    if key is None or key.section:
        return None
    if key.facts.unused:
        return key.facts.unused
    for condition in key.conditions:
        if not holds(condition.text, c):
            addition = f" ({condition.note})" if condition.note else ""
            return f"used only {words(condition.text)}{addition}"
    return None


def _why_engine_is_unused(entry: str, engine: str) -> str | None:
    """Return why an entry of engine_kwargs has no effect: it is for another engine."""
    wanted, dot, _ = entry.partition(".")
    if wanted == "sglang":
        return "SGLang is not supported"
    return f"the rollout engine is {engine}" if dot and wanted != engine else None


UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
NUMBER = re.compile(r"(\d+(?:\.\d+)?)([smhd]?)")
CLOCK = re.compile(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)")
"""Slurm's form, days-hours:minutes:seconds."""


def duration_s(text: str) -> float:
    """Return a duration in seconds. Raises ValueError."""
    number = NUMBER.fullmatch(text)
    if number:
        seconds = float(number[1]) * UNITS[number[2]]
    else:
        clock = CLOCK.fullmatch(text)
        if clock is None:
            raise ValueError("is not a duration such as 14400, 90m, 4h or 2-12:00:00")
        days, hours, minutes, rest = (int(part or 0) for part in clock.groups())
        seconds = float(days * 86400 + hours * 3600 + minutes * 60 + rest)
    if seconds <= 0:
        raise ValueError("must be longer than 0 s")
    return seconds
