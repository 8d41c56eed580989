"""Inputs and results of reward functions.

A result has a score or the class of a failure. A failure never becomes a score of 0.
"""

import math
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verlite.importing import VERL_HINT, verl_hint

CALLER = "verlite.rewards.process"
"""The module that calls reward functions. Its frames are left out of tracebacks."""
TRACEBACK_LIMIT = 4000
"""Characters kept of a traceback, from its end."""
MAX_CHARACTERS = 100_000
"""Longest names and texts of a result's parts, together."""
MAX_PARTS = 200
"""Most parts of a result. The numbers among them are validation metrics."""
ONE_TURN = {"num_turns": 2}
"""Entries of extra_info in a run without tools: the prompt and the response count as turns."""


@dataclass(frozen=True)
class RewardItem:
    """One response to score."""

    data_source: str
    """Data source of the prompt."""
    solution_str: str
    """The response, decoded without special tokens."""
    ground_truth: Any
    """reward_model.ground_truth of the prompt's row."""
    extra_info: dict[str, Any] = field(default_factory=dict)
    """extra_info of the prompt's row, and `num_turns` as in verl: the prompt, the model's turns and
    the answers of tools."""
    prompt: str = ""
    """The prompt with special tokens. Set if `Scorer.needs_prompts`."""
    sequence: str = ""
    """Prompt and response with special tokens. Set if `Scorer.needs_prompts`."""

    @property
    def query(self) -> str:
        """Prompt and response."""
        return self.sequence or self.prompt + self.solution_str

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of verl's compute_score."""
        return {
            "data_source": self.data_source,
            "solution_str": self.solution_str,
            "ground_truth": self.ground_truth,
            "extra_info": self.extra_info,
        }

    def list_arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of OpenRLHF's reward_func: lists of one entry."""
        return {"queries": [self.query], "prompts": [self.prompt], "labels": [self.ground_truth]}


@dataclass(frozen=True)
class RewardResult:
    """The score of one response, or the failure."""

    score: float | None
    """The reward. None if the function failed."""
    parts: dict[str, float | str] = field(default_factory=dict)
    """The other entries of the dict that the function returned."""
    error: str | None = None
    """Class of the failure: an exception name, BadReturn, Timeout or Died. None if it succeeded."""
    traceback: str | None = None
    """Traceback of the function, or one line that describes the failure."""

    @property
    def cause(self) -> str:
        """The failure in one line, without its class."""
        lines = (self.traceback or "").strip().splitlines()
        return lines[-1].removeprefix(f"{self.error}: ") if lines else ""


class BadReturn(ValueError):
    """A reward function returned a value that is not a score."""


def result_of(value: Any) -> RewardResult:
    """Convert the return value of a reward function.

    The value is a finite number, or a dict with a finite number under "score". Other entries of a
    dict become parts: numbers as float, anything else as text. OpenRLHF's reward functions return
    a tensor of one entry, or a dict with "rewards", and perhaps "scores" (the part `acc`) and
    "extra_logs", each with lists or tensors of one entry.

    Raises:
        BadReturn: the value is neither, or there are more than MAX_PARTS parts, or they are longer
            than MAX_CHARACTERS.
    """
    if isinstance(value, Mapping):
        if "score" not in value and "rewards" in value:
            value = _of_lists(value)
        if "score" not in value:
            keys = ", ".join(map(str, value))[:1000] or "none"
            raise BadReturn(f'returned a dict without "score"; its keys are {keys}')
        parts = {str(key): _part(part) for key, part in value.items() if key != "score"}
        if len(parts) > MAX_PARTS:
            raise BadReturn(
                f"returned a dict with {len(parts):,} entries beside its score; "
                f"expected at most {MAX_PARTS}"
            )
        length = sum(
            len(key) + (len(part) if isinstance(part, str) else 0) for key, part in parts.items()
        )
        if length > MAX_CHARACTERS:
            raise BadReturn(
                f"returned a dict with {length:,} characters beside its score; "
                f"expected at most {MAX_CHARACTERS:,}"
            )
        return RewardResult(_score(value["score"], 'under "score"'), parts)
    return RewardResult(_score(value, ""))


def _of_lists(answer: Mapping[Any, Any]) -> dict[str, Any]:
    """Return OpenRLHF's dict about one response with `score` and parts."""
    logs = answer.get("extra_logs")
    parts = {str(name): _only(entry) for name, entry in (logs or {}).items()}
    if "scores" in answer:
        parts.setdefault("acc", _only(answer["scores"]))
    return {**parts, "score": _only(answer["rewards"])}


def _only(value: Any) -> Any:
    """Return the only entry of a list or tensor; any other value unchanged."""
    shape = getattr(value, "shape", None)
    if (shape is None and isinstance(value, list | tuple)) or shape:
        return value[0] if len(value) == 1 else value
    return value


def failure(error: BaseException) -> RewardResult:
    """Return the result of a call that raised `error`."""
    if isinstance(error, BadReturn):
        return RewardResult(None, error=BadReturn.__name__, traceback=str(error))
    frames = error.__traceback__
    while (
        frames is not None
        and frames.tb_next is not None
        and frames.tb_frame.f_globals.get("__name__") == CALLER
    ):
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames))
    if verl_hint(error):
        text += f"{VERL_HINT}\n"
    return RewardResult(None, error=type(error).__name__[:100], traceback=text[-TRACEBACK_LIMIT:])


def _score(value: Any, where: str) -> float:
    returned = " ".join(f"returned {value!r:.200} {where}".split())
    wrong = BadReturn(f'{returned}; expected a finite number or a dict with one under "score"')
    if value is None or isinstance(value, (str, bytes)):
        raise wrong
    try:
        score = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise wrong from error
    if not math.isfinite(score):
        raise wrong
    return score


def _part(value: Any) -> float | str:
    if isinstance(value, str):
        return value
    try:
        return float(value)
    except OverflowError:  # an integer above 1e308
        return math.inf if value > 0 else -math.inf
    except (TypeError, ValueError):
        return str(value)
