"""The legal names of configuration keys, where the code for each name is, and what it needs.

Entries are literals that name code by dotted path, such as "verlite.algorithms.advantages:gae", so
that checking a configuration imports neither torch nor the packages above this one.
`tests/test_catalog.py` proves that every entry agrees with the code. To add an estimator, a loss,
an environment, ...: write it, and add one entry here.

Users name their own code as "package.module:name" wherever `resolve` is used.
"""

import difflib
import importlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from verlite.importing import OwnCodeError, find, names_a_file


@dataclass(frozen=True)
class Estimator:
    """An advantage estimator."""

    path: str
    reads: tuple[str, ...] = ()
    """Fields of AdvantageInputs that it reads, besides those that every estimator may read."""
    compares: bool = True
    """It compares the samples of one prompt. With rollout.n=1 the advantage is the score."""
    needs_several: bool = False
    """It has no advantage for a prompt with one sample."""
    by_row: bool = False
    """It needs one reward per row and gives all tokens of a row the same advantage."""
    whitens: bool = False
    """Its advantages have mean 0 and standard deviation 1 over the tokens of the step."""
    by_group: bool = True
    """The advantages of a prompt's samples depend on no other prompt of the step."""

    @property
    def measured(self) -> tuple[str, ...]:
        """The MEASURED_INPUTS that it reads."""
        return tuple(field for field in self.reads if field in MEASURED_INPUTS)


OWN_ESTIMATOR = Estimator("", compares=False, by_group=False)
"""What is known of a user's own estimator."""

MEASURED_INPUTS = ("values", "reward_baselines", "old_log_probs", "sum_pi_squared", "gdpo_rewards")
"""Inputs that cost a forward pass or an extra sample, or that keys of the estimator choose.

They are produced only for estimators that read them.
"""

# fmt: off
ESTIMATORS: dict[str, Estimator] = {
    "gae": Estimator("verlite.algorithms.advantages:gae", reads=("values", "gamma", "lam"),
        compares=False, whitens=True, by_group=False),
    "grpo": Estimator("verlite.algorithms.advantages:grpo", reads=("norm_adv_by_std_in_grpo",),
        by_row=True),
    "gdpo": Estimator("verlite.algorithms.advantages:gdpo",
        reads=("gdpo_rewards", "gdpo_reward_weights"), whitens=True, by_group=False),
    "grpo_passk": Estimator("verlite.algorithms.advantages:grpo_passk",
        reads=("norm_adv_by_std_in_grpo",), needs_several=True, by_row=True),
    "rloo": Estimator("verlite.algorithms.advantages:rloo", by_row=True),
    "rloo_token_kl": Estimator("verlite.algorithms.advantages:rloo_token_kl",
        reads=("token_level_scores", "reward_clip_range")),
    "reinforce_plus_plus": Estimator("verlite.algorithms.advantages:reinforce_plus_plus",
        reads=("gamma",), compares=False, whitens=True, by_group=False),
    "reinforce_plus_plus_baseline": Estimator(
        "verlite.algorithms.advantages:reinforce_plus_plus_baseline", whitens=True, by_group=False),
    "remax": Estimator("verlite.algorithms.advantages:remax", reads=("reward_baselines", "gamma"),
        compares=False),
    "opo": Estimator("verlite.algorithms.advantages:opo"),
    "gpg": Estimator("verlite.algorithms.advantages:gpg", by_row=True, by_group=False),
    "optimal_token_baseline": Estimator("verlite.algorithms.advantages:optimal_token_baseline",
        reads=("old_log_probs", "sum_pi_squared", "rollout_is_weights", "gamma")),
}
# fmt: on
"""algorithm.adv_estimator."""


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss."""

    path: str
    reads: tuple[str, ...] = ()
    """Settings that it reads: clip_low, clip_high, clip_c, and entries of PolicyLossInputs.extra.
    """
    aggregation: str | None = None
    """The loss_agg_mode of its paper, if the paper requires one."""
    selector: str | None = None
    """Path of the function that selects tokens over the whole training step, for extra["selected"].
    """
    ratio_clip: bool = False
    """It clips the probability ratio at 1 - clip_low, so clip_low must be at most 1."""


# fmt: off
POLICY_LOSSES: dict[str, PolicyLoss] = {
    "vanilla": PolicyLoss("verlite.algorithms.losses:vanilla",
        reads=("clip_low", "clip_high", "clip_c"), ratio_clip=True),
    "gspo": PolicyLoss("verlite.algorithms.losses:gspo", reads=("clip_low", "clip_high"),
        aggregation="seq-mean-token-mean", ratio_clip=True),
    "sapo": PolicyLoss("verlite.algorithms.losses:sapo", reads=("tau_pos", "tau_neg"),
        aggregation="seq-mean-token-mean"),
    "gpg": PolicyLoss("verlite.algorithms.losses:gpg"),
    "geo_mean": PolicyLoss("verlite.algorithms.losses:geo_mean", reads=("clip_low", "clip_high"),
        aggregation="seq-mean-token-mean"),
    "cispo": PolicyLoss("verlite.algorithms.losses:cispo", reads=("clip_low", "clip_high")),
    "dppo_tv": PolicyLoss("verlite.algorithms.losses:dppo_tv",
        reads=("clip_low", "clip_high", "clip_c")),
    "dppo_kl": PolicyLoss("verlite.algorithms.losses:dppo_kl",
        reads=("clip_low", "clip_high", "clip_c")),
    "clip_cov": PolicyLoss("verlite.algorithms.losses:clip_cov",
        reads=("clip_low", "clip_high", "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub"),
        selector="verlite.algorithms.losses:select_clip_cov", ratio_clip=True),
    "kl_cov": PolicyLoss("verlite.algorithms.losses:kl_cov", reads=("kl_cov_ratio", "ppo_kl_coef"),
        selector="verlite.algorithms.losses:select_kl_cov"),
}
# fmt: on
"""actor_rollout_ref.actor.policy_loss.loss_mode."""

BYPASS_LOSS = "bypass_mode"
"""The loss that algorithm.rollout_correction.bypass_mode selects.

It is not a value of loss_mode.
"""

# fmt: off
LOSSES: dict[str, PolicyLoss] = {
    **POLICY_LOSSES,
    BYPASS_LOSS: PolicyLoss("verlite.algorithms.losses:bypass_mode",
        reads=("clip_low", "clip_high", "clip_c", "rollout_correction"), ratio_clip=True),
}
# fmt: on
"""Every loss that a plan can name."""

AGGREGATION_MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)
"""loss_agg_mode, computed by verlite.algorithms.aggregation:token_weights."""

KL_BASE_KINDS = {
    "kl": "k1",
    "k1": "k1",
    "abs": "abs",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "k3",
    "k3": "k3",
}
"""KL estimators by verl's names, computed by verlite.algorithms.kl:kl_estimate."""
KL_KINDS = (*KL_BASE_KINDS, *(f"{kind}+" for kind in KL_BASE_KINDS))
"""kl_penalty and kl_loss_type. A trailing + uses k2's gradient with the estimator's value."""

ENV_FACTORIES = {
    "search": "verlite.envs.factory:SearchEnvFactory",
    "calculator": "verlite.envs.factory:CalculatorEnvFactory",
    "openenv": "verlite.envs.openenv:OpenEnv",
}
"""env.name."""

ENGINES = {
    "vllm": "verlite.rollout.engines.vllm:VLLMCore",
    "hf": "verlite.rollout.engines.hf:HFCore",
    "server": "verlite.rollout.engines.server:ServerCore",
}
"""actor_rollout_ref.rollout.name."""

TRACKERS = {
    "wandb": "verlite.trainer.trackers:WandbTracker",
    "tensorboard": "verlite.trainer.trackers:TensorBoardTracker",
    "mlflow": "verlite.trainer.trackers:MLflowTracker",
    "swanlab": "verlite.trainer.trackers:SwanLabTracker",
    "trackio": "verlite.trainer.trackers:TrackioTracker",
}
"""trainer.logger, besides console. Each needs the package of its name."""

SCORE_SCALES = ("zero_one", "signed")
"""Values of reward.score_scale: scores from 0 to 1, or from -1 to 1."""

_SOURCES = {
    "gsm8k": "openai/gsm8k",
    "math": "lighteval/MATH DigitalLearningGmbH/MATH-lighteval HuggingFaceH4/MATH-500 "
    "math math_dapo math_dapo_reasoning aime*",
    "exact": "verlite/arithmetic",
    "qa": "verlite/facts nq triviaqa popqa hotpotqa 2wikimultihopqa musique bamboogle "
    "web_questions strategyqa searchR1_*",
}
SCORERS = {
    source: f"verlite.rewards.{module}:compute_score"
    for module, sources in _SOURCES.items()
    for source in sources.split()
}
"""Data source to its built-in reward function.

A name that ends in * matches every source that begins with it.
"""

SCORER_SETTINGS = {
    "verlite.rewards.gsm8k:compute_score": ("method",),
    "verlite.rewards.math:compute_score": (),
    "verlite.rewards.exact:compute_score": (),
    "verlite.rewards.qa:compute_score": (
        "method",
        "structure_format_score",
        "final_format_score",
        "retrieval_score",
    ),
}
"""Keyword arguments of each built-in reward function: entries that
custom_reward_function.reward_kwargs may have.
"""


def scorer_for(data_source: str) -> str | None:
    """Return the path of the built-in reward function for a data source, or None."""
    name = source_name(SCORERS, data_source)
    return SCORERS[name] if name else None


def source_name(names: Collection[str], data_source: str) -> str | None:
    """Return a data source's name among others: its own, else the longest pattern that ends in *
    and matches it, or None."""
    if data_source in names:
        return data_source
    found = [n for n in names if n.endswith("*") and data_source.startswith(n[:-1])]
    return max(found, key=len, default=None)


def estimator(name: str) -> Estimator:
    """Return the entry of a built-in estimator; OWN_ESTIMATOR for a user's own."""
    return ESTIMATORS.get(name, OWN_ESTIMATOR)


def reads(table: Mapping[str, Estimator | PolicyLoss], name: str, field: str) -> bool:
    """Return whether an estimator or loss reads a field.

    A user's own function may read any field.
    """
    return name not in table or field in table[name].reads


def load(path: str) -> Any:
    """Import the object at "package.module:name"."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def resolve(name: str, table: Mapping[str, Any], kind: str) -> Any:
    """Return the object called `name`: an entry of `table`, or the user's own
    "package.module:name".

    Args:
        name: the name as configured.
        table: names to dotted paths, or to entries that have a `path`.
        kind: what is looked up, for error messages, such as "advantage estimator".

    Raises:
        ValueError: the name is unknown (the message has the nearest known names) or names a file,
        its module cannot be imported or does not define it, or it is not callable.
    """
    if name in table:
        entry = table[name]
        return load(entry if isinstance(entry, str) else entry.path)
    module, colon, attribute = name.partition(":")
    if not colon:
        near = difflib.get_close_matches(name, table, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ValueError(
            f"unknown {kind} {name!r}: {hint}known: {', '.join(sorted(table))}; "
            "your own: package.module:name"
        )
    if names_a_file(module):
        raise ValueError(
            f"{kind} {name!r} names a file, but must name a module, package.module:name. Write "
            f"{PurePath(module).stem}:{attribute}, and put the file's folder on the Python path of "
            "every worker"
        )
    try:
        return find(module, attribute)
    except OwnCodeError as error:
        raise ValueError(f"{kind} {name!r}: {error}") from error
