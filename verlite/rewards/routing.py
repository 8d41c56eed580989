"""Which built-in scorer belongs to which data source."""

from collections.abc import Iterable

from verlite.config.catalog import SCORERS, scorer_for

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
    path = scorer_for(data_source)
    if path is not None:
        return path
    raise unknown([data_source])


def unknown(data_sources: Iterable[str]) -> UnknownDataSource:
    """The error that names data sources without a scorer and what to do."""
    return UnknownDataSource(
        f"no scorer belongs to data source {', '.join(map(repr, data_sources))}; built-in scorers know {', '.join(SCORERS)}. "
        "Give your own function with custom_reward_function.path=FILE.py, or name a known source in the data"
    )
