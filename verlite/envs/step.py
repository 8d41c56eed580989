"""What an environment is: it hears what the model wrote and answers, in text alone. No tokens, no tensors."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # a run is looked at before anything heavy is imported
    from transformers import PreTrainedTokenizerBase


class ToolError(Exception):
    """A tool could not be used: infrastructure failed, not the model. The sample says nothing about the policy."""


@dataclass(frozen=True)
class Step:
    """An environment's answer to one turn."""

    obs: str = ""
    """Text for the model; the part that may be cut when it is too long."""
    before: str = ""
    """Text in front of obs that is never cut, such as an opening tag."""
    after: str = ""
    """Text behind obs that is never cut, such as a closing tag."""
    done: bool = False
    """The trajectory ends here."""
    valid: bool = True
    """False: the model's turn was malformed."""
    info: dict[str, Any] = field(default_factory=dict)
    """For metrics and readers: `action` (what the turn was taken for), and of a tool that was used `called`, `query`, `seconds`, ..."""


class Env(Protocol):
    """The world of one trajectory; speaks text only. A new one for each sample."""

    stop: tuple[str, ...]
    """Strings that end a turn."""

    async def step(self, text: str, last: bool) -> Step:
        """Answer the model's turn. `text` ends at its first stop string. With `last` the model will not speak again, so only
        `done`, `valid` and `info` matter, and no tool is used. Raises ToolError when a tool fails; a model's mistake is a Step."""
        ...


EncodeObservation = Callable[[Step, list[int], int], tuple[list[int], bool]]
"""(step, the context's ids, most tokens) -> the observation's ids, and whether it was cut."""


def encode_text(tokenizer: "PreTrainedTokenizerBase") -> EncodeObservation:
    """Observations as plain text behind what the model wrote."""

    def encode(text: str) -> list[int]:
        # What stands in a passage is text, even where it looks like the end of a turn.
        return tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)

    def observation(step: Step, context: list[int], limit: int) -> tuple[list[int], bool]:
        """Only `step.obs` is cut, in token space, so that the tags around it stay whole."""
        ids = encode(step.before + step.obs + step.after)
        if len(ids) <= limit:
            return ids, False
        before, after = encode(step.before), encode(step.after)
        room = limit - len(before) - len(after)
        if room < 1:
            raise ValueError(
                f"data.max_obs_length={limit} has no room for an observation: its tags alone need {len(before) + len(after)}"
            )
        return before + encode(step.obs)[:room] + after, True

    return observation
