"""Choose the built-in scorer of a data source, and the scale of its scores."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from verlite.rewards.process import FunctionError
from verlite.rewards.result import RewardResult
from verlite.spec.catalog import SCORE_SCALES, SCORERS, scorer_for, source_name

IN_PROCESS = {
    "verlite.rewards.gsm8k:compute_score",
    "verlite.rewards.exact:compute_score",
    "verlite.rewards.qa:compute_score",
}
"""Built-in scorers that always end quickly, so they do not need a separate process."""

SIGNED_SOURCES = ("math_dapo", "math_dapo_reasoning", "math", "aime*")
"""Data sources whose scores are +1 and -1 by default. verl scores all of them with math_dapo."""


class UnknownDataSource(ValueError):
    """A data source has no built-in scorer."""


def scorer_of(data_source: str) -> str:
    """Return the scorer of a data source as `package.module:function`. Raises UnknownDataSource."""
    path = scorer_for(data_source)
    if path is None:
        raise unknown([data_source])
    return path


def unknown(data_sources: Iterable[str]) -> UnknownDataSource:
    """Return the error for data sources without a scorer, with the remedy."""
    return UnknownDataSource(
        f"no scorer belongs to data source {', '.join(map(repr, data_sources))}; "
        f"built-in scorers know {', '.join(SCORERS)}. Give your own function with "
        "custom_reward_function.path=FILE.py, or name a known source in the data"
    )


def check_scales(scales: Mapping[str, str]) -> dict[str, str]:
    """Return reward.score_scale. Raises FunctionError for a value that is not in SCORE_SCALES."""
    for source, scale in scales.items():
        if scale not in SCORE_SCALES:
            raise FunctionError(
                f"reward.score_scale.{source}={scale} is not one of {', '.join(SCORE_SCALES)}"
            )
    return dict(scales)


def scale_of(data_source: str, scales: Mapping[str, str]) -> str:
    """Return the scale of a built-in scorer's scores for a data source.

    `scales` is reward.score_scale. The most specific entry counts: the source's own name, then the
    longest pattern that ends in *, then "default". Without one, SIGNED_SOURCES are signed.
    """
    name = source_name(scales, data_source) or "default"
    if name in scales:
        return scales[name]
    return "signed" if source_name(SIGNED_SOURCES, data_source) else "zero_one"


def rescaled(result: RewardResult, scale: str) -> RewardResult:
    """Return a built-in scorer's result on its scale.

    Signed scores are 2 * score - 1, so a right answer scores +1 and a wrong one -1, as in verl's
    math_dapo. The part `acc` is the score before that, unless the scorer returned its own.
    """
    if scale != "signed" or result.score is None:
        return result
    parts = {"acc": result.score} | result.parts
    return replace(result, score=2.0 * result.score - 1.0, parts=parts)
