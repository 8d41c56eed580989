"""Which built-in scorer belongs to which data source."""

from collections.abc import Iterable

SCORERS = {
    "openai/gsm8k": "verlite.rewards.gsm8k:compute_score",
    "lighteval/MATH": "verlite.rewards.math:compute_score",
    "DigitalLearningGmbH/MATH-lighteval": "verlite.rewards.math:compute_score",
    "HuggingFaceH4/MATH-500": "verlite.rewards.math:compute_score",
    "math": "verlite.rewards.math:compute_score",
    "math_dapo": "verlite.rewards.math:compute_score",
    "math_dapo_reasoning": "verlite.rewards.math:compute_score",
    "aime*": "verlite.rewards.math:compute_score",
    "verlite/arithmetic": "verlite.rewards.exact:compute_score",
    "verlite/facts": "verlite.rewards.qa:compute_score",
    "nq": "verlite.rewards.qa:compute_score",
    "triviaqa": "verlite.rewards.qa:compute_score",
    "popqa": "verlite.rewards.qa:compute_score",
    "hotpotqa": "verlite.rewards.qa:compute_score",
    "2wikimultihopqa": "verlite.rewards.qa:compute_score",
    "musique": "verlite.rewards.qa:compute_score",
    "bamboogle": "verlite.rewards.qa:compute_score",
    "web_questions": "verlite.rewards.qa:compute_score",
    "strategyqa": "verlite.rewards.qa:compute_score",
    "searchR1_*": "verlite.rewards.qa:compute_score",
}
"""Data source to module:function. A name that ends in * stands for all sources that begin with it."""

IN_PROCESS = {
    "verlite.rewards.gsm8k:compute_score",
    "verlite.rewards.exact:compute_score",
    "verlite.rewards.qa:compute_score",
}
"""Scorers whose time is bounded by their code: they need no process of their own."""


class UnknownDataSource(ValueError):
    """No built-in scorer belongs to a data source."""


def scorer_of(data_source: str) -> str:
    """The scorer of a data source, as module:function. Raises UnknownDataSource."""
    if data_source in SCORERS:
        return SCORERS[data_source]
    for name, scorer in SCORERS.items():
        if name.endswith("*") and data_source.startswith(name[:-1]):
            return scorer
    raise unknown([data_source])


def unknown(data_sources: Iterable[str]) -> UnknownDataSource:
    """The error that names data sources without a scorer and what to do."""
    return UnknownDataSource(
        f"no scorer belongs to data source {', '.join(map(repr, data_sources))}; built-in scorers know {', '.join(SCORERS)}. "
        "Give your own function with custom_reward_function.path=FILE.py, or name a known source in the data"
    )
