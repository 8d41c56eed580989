"""The environment interface: an environment reads the model's text and answers with text."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # preflight checks must not import heavy libraries
    from transformers import PreTrainedTokenizerBase


class ToolError(Exception):
    """A tool failed because of the infrastructure, not because of the model.

    The sample is excluded from training, since it does not say anything about the policy.
    """


@dataclass(frozen=True)
class Step:
    """The answer of an environment to one turn of the model."""

    obs: str = ""
    """Text for the model. This part is truncated if the observation is too long."""
    before: str = ""
    """Text in front of obs that is never truncated, such as an opening tag."""
    after: str = ""
    """Text behind obs that is never truncated, such as a closing tag."""
    done: bool = False
    """True if the trajectory ends here."""
    valid: bool = True
    """False if the model's turn was malformed."""
    reward: float = 0.0
    """Reward of the turn. The reward function gets those of all turns, and decides what they mean
    for the score; `verlite.rewards.environment` adds them up."""
    info: dict[str, Any] = field(default_factory=dict)
    """Entries for metrics: `action`, and if a tool was used `called`, `query`, `seconds`, ..."""


class Env(Protocol):
    """The environment of one trajectory. Each sample has its own."""

    stop: tuple[str, ...]
    """Strings that end a turn."""

    async def step(self, text: str, last: bool) -> Step:
        """Answer the model's turn.

        Args:
            text: the turn, up to and including its first stop string.
            last: True if the model will not get another turn. Then only `done`, `valid`,
                `reward` and `info` of the result matter, and no tool should be used.

        Raises:
            ToolError: a tool failed. A mistake of the model is a Step, not an exception.
        """
        ...

    # An environment may also have `async def resume(self, turns: Sequence[str]) -> None`. It brings
    # a new environment into the state of having answered these turns of the model. With
    # trainer.mode=async, a run that resumes then goes on with samples that had answers.


EncodeObservation = Callable[[Step, list[int], int], tuple[list[int], bool]]
"""(step, token ids of the context, limit) -> (token ids of the observation, whether truncated)."""


def encode_text(tokenizer: "PreTrainedTokenizerBase") -> EncodeObservation:
    """Return an encoder of observations as plain text after the model's text."""

    def encode(text: str) -> list[int]:
        # Special tokens in a retrieved passage are encoded as text.
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        return ids

    def observation(step: Step, context: list[int], limit: int) -> tuple[list[int], bool]:
        """Encode a step. Only the tokens of `step.obs` are truncated, so its tags stay whole."""
        ids = encode(step.before + step.obs + step.after)
        if len(ids) <= limit:
            return ids, False
        before = encode(step.before)
        after = encode(step.after)
        room = limit - len(before) - len(after)
        if room < 1:
            raise ValueError(
                f"data.max_obs_length={limit} is too small for an observation: "
                f"its tags alone need {len(before) + len(after)} tokens"
            )
        return before + encode(step.obs)[:room] + after, True

    return observation
