"""algorithm.rollout_correction."""

import dataclasses
import math
from collections.abc import Iterator

from verlite.config import plan
from verlite.config.keys import get
from verlite.config.problems import Problem
from verlite.config.rules.context import Context
from verlite.spec import catalog
from verlite.spec.correction import PRESETS, RolloutCorrection, settings

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
        yield Problem(
            "actor_rollout_ref.actor.policy_loss.loss_mode",
            loss,
            f"{SECTION}bypass_mode determines the loss ({correction.loss_type})",
            f"Leave one of the two out; {SECTION}loss_type selects ppo_clip or reinforce.",
        )
    if plan.places_inference(context.config):
        yield Problem(
            "cluster.component_placement",
            context.config.cluster.component_placement,
            f"inference computes old log-probs, and {SECTION}bypass_mode uses the engines' instead",
            "Leave inference or the mode out.",
        )
    if "sum_pi_squared" in catalog.measured(estimator):
        yield Problem(
            "algorithm.adv_estimator",
            estimator,
            f"needs results of the forward pass that {SECTION}bypass_mode skips",
            f"Use {SECTION}bypass_mode=false, or another estimator.",
        )


def _written_out(preset: str) -> str:
    """Return a preset as the assignments that it stands for."""
    default = RolloutCorrection()
    assignments = [
        f"{key}={value}"
        for key, value in dataclasses.asdict(PRESETS[preset]).items()
        if value != getattr(default, key)
    ]
    return " ".join(assignments) or "none"
