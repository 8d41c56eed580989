"""What a reward function is asked and what it answers: a score, or the class of what went wrong, never a silent 0."""

import math
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

CALLER = "verlite.rewards.process"  # the module that calls reward functions
TRACEBACK_LIMIT = 4000  # characters of a traceback that are kept, from its end


@dataclass(frozen=True)
class RewardItem:
    """One response to be scored."""

    data_source: str
    """Which data the prompt is from."""
    solution_str: str
    """The response, decoded without special tokens."""
    ground_truth: Any
    """reward_model.ground_truth of the prompt's row."""
    extra_info: dict[str, Any] = field(default_factory=dict)
    """extra_info of the prompt's row."""

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of verl's compute_score."""
        return {
            "data_source": self.data_source,
            "solution_str": self.solution_str,
            "ground_truth": self.ground_truth,
            "extra_info": self.extra_info,
        }


@dataclass(frozen=True)
class RewardResult:
    """One response's score, or why there is none."""

    score: float | None
    """The reward; None when the function failed."""
    parts: dict[str, float | str] = field(default_factory=dict)
    """The other entries of the dict that the function returned."""
    error: str | None = None
    """Class of the failure: an exception's name, BadReturn, Timeout or Died. None: no failure."""
    traceback: str | None = None
    """The function's traceback, or one line on what happened."""


class BadReturn(ValueError):
    """A reward function returned something that is not a score."""


def result_of(value: Any) -> RewardResult:
    """Read what a reward function returned: a finite number, or a dict with a finite number under "score".

    Other entries of a dict become parts: numbers as float, anything else as text. Raises BadReturn.
    """
    if isinstance(value, Mapping):
        if "score" not in value:
            raise BadReturn(
                f'returned a dict without "score"; its keys are {", ".join(map(str, value)) or "none"}'
            )
        parts = {str(key): _part(part) for key, part in value.items() if key != "score"}
        return RewardResult(_score(value["score"], 'under "score"'), parts)
    return RewardResult(_score(value, ""))


def failure(error: BaseException) -> RewardResult:
    """The result of a call that raised `error`."""
    if isinstance(error, BadReturn):
        return RewardResult(None, error=BadReturn.__name__, traceback=str(error))
    frames = error.__traceback__
    while (
        frames is not None
        and frames.tb_next is not None
        and frames.tb_frame.f_globals.get("__name__") == CALLER
    ):
        frames = frames.tb_next  # the user knows their own file, not what calls it
    text = "".join(traceback.format_exception(type(error), error, frames))
    return RewardResult(None, error=type(error).__name__, traceback=text[-TRACEBACK_LIMIT:])


def _score(value: Any, where: str) -> float:
    wrong = BadReturn(
        " ".join(f"returned {value!r:.200} {where}".split())
        + '; expected a finite number or a dict with one under "score"'
    )
    if value is None or isinstance(value, (str, bytes)):
        raise wrong
    try:
        score = float(value)
    except (TypeError, ValueError) as error:
        raise wrong from error
    if not math.isfinite(score):
        raise wrong
    return score


def _part(value: Any) -> float | str:
    if isinstance(value, str):
        return value
    try:
        return float(value)
    except (TypeError, ValueError):
        return str(value)
