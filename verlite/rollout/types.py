"""What generation takes and gives: token ids in, token ids and their log-probs out.

Shapes: everything here is one sequence as Python lists, equal in length where they describe the same tokens. Text exists
only in an environment's view (`envs.step.Env`); no token id is ever made from text that the model wrote.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal, Protocol

from torch import Tensor
from transformers import PreTrainedTokenizerBase


class EngineError(RuntimeError):
    """The engine cannot generate: it died, hangs, was closed, or holds no verified weights. No sample is to blame."""


class WeightSyncError(EngineError):
    """New weights did not arrive whole. The engine keeps its version and refuses to generate until a good sync."""


@dataclass(frozen=True)
class Sampling:
    """How to continue one prompt.

    The sampled distribution is softmax(logits / temperature), cut to the `top_k` most likely tokens, then to the smallest
    set with probability `top_p`, then renormalised. Ties with the last kept token are kept.
    """

    temperature: float = 1.0
    """0: greedy; log-probs are then those at temperature 1."""
    top_p: float = 1.0
    top_k: int = -1
    """-1: all tokens."""
    max_tokens: int = 16
    """New tokens at most."""
    stop: tuple[str, ...] = ()
    """Stop once the new text contains one of these. The tokens that completed it stay."""
    seed: int | None = None
    """Equal seed, prompt and weights give equal tokens. None: a new random seed."""
    ignore_eos: bool = False
    """Go on after end-of-sequence tokens."""

    def __post_init__(self) -> None:
        legal = {
            "temperature >= 0": self.temperature >= 0,
            "0 < top_p <= 1": 0 < self.top_p <= 1,
            "top_k = -1 or >= 1": self.top_k == -1 or self.top_k >= 1,
            "max_tokens >= 1": self.max_tokens >= 1,
            "no empty stop string": all(self.stop),
        }
        if broken := [rule for rule, holds in legal.items() if not holds]:
            raise ValueError(f"sampling needs {' and '.join(broken)}, not {self}")

    @property
    def greedy(self) -> bool:
        """Always the most likely token."""
        return self.temperature == 0


@dataclass(frozen=True)
class Completion:
    """One answer of an engine."""

    ids: list[int]
    """Sampled tokens; an end-of-sequence token or the tokens of a stop string are their last."""
    log_probs: list[float]
    """Of each sampled token, under the distribution it was sampled from."""
    finish_reason: str
    """stop (end of sequence or stop string), length (max_tokens reached) or abort (the engine gave up)."""
    weight_version: int
    """Version of the weights that sampled all of it."""


class Status(StrEnum):
    """How a trajectory ended."""

    DONE = "done"
    """The model or the environment ended it."""
    MAX_TURNS = "max_turns"
    """The environment would have gone on, but no turn was left."""
    LENGTH = "length"
    """No token was left."""
    ERROR = "error"
    """Infrastructure failed: the sample says nothing about the policy and has no vote anywhere."""


@dataclass
class Trajectory:
    """One sample: a prompt and everything after it. Lists only grow, through the two append methods, so they stay aligned."""

    prompt_ids: list[int]
    response_ids: list[int] = field(default_factory=list)
    """Sampled tokens and observations in the order the model saw them."""
    response_mask: list[int] = field(default_factory=list)
    """1 on sampled tokens, 0 on observations; all 0 after `fail`."""
    log_probs: list[float] = field(default_factory=list)
    """Of sampled tokens under the sampling distribution; 0 on observations."""
    status: Status = Status.DONE
    error: str | None = None
    """With status ERROR: exception class and message."""
    weight_versions: list[int] = field(default_factory=list)
    """Of each generation call."""
    turns: int = 0
    """Generation calls that were answered."""
    invalid_turns: int = 0
    """Of these, how many the environment called malformed."""
    truncated_observations: int = 0
    gen_seconds: float = 0.0
    """Time spent waiting for the engine."""
    tool_seconds: float = 0.0
    """Time spent waiting for the environment."""
    infos: list[dict[str, Any]] = field(default_factory=list)
    """What the environment reported for each turn."""
    segments: list[tuple[Literal["model", "tool"], int]] = field(default_factory=list)
    """Who wrote the response, piece by piece, and how many tokens each; unlike the mask it outlives `fail`."""

    def append_sampled(self, completion: Completion) -> None:
        """Add what the model sampled."""
        if len(completion.ids) != len(completion.log_probs):
            raise EngineError(
                f"the engine returned {len(completion.ids)} tokens but {len(completion.log_probs)} log-probs"
            )
        self.response_ids += completion.ids
        self.response_mask += [1] * len(completion.ids)
        self.log_probs += completion.log_probs
        self.segments.append(("model", len(completion.ids)))
        self.weight_versions.append(completion.weight_version)
        self.turns += 1

    def append_observation(self, ids: Sequence[int]) -> None:
        """Add what the environment answered."""
        self.response_ids += ids
        self.response_mask += [0] * len(ids)
        self.log_probs += [0.0] * len(ids)
        self.segments.append(("tool", len(ids)))

    def fail(self, error: BaseException | str) -> None:
        """Mark as an infrastructure failure: no token of it is trained."""
        self.status = Status.ERROR
        self.error = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        self.response_mask = [0] * len(self.response_ids)


class Engine(Protocol):
    """Generates with a known version of the weights. One object per model copy; safe to call from any thread."""

    version: int
    """Version of the weights; -1 before the first sync."""
    tokenizer: PreTrainedTokenizerBase

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Continue a prompt. Raises ValueError for a prompt that does not fit, EngineError when the engine cannot generate."""
        ...

    def load_weights(
        self, named: Iterable[tuple[str, Tensor]], version: int, expected_fingerprint: int
    ) -> None:
        """Replace all weights, reset caches, compare the checksum of what the engine then holds, and only then take `version`.

        `named` are Hugging Face names with full tensors, tied weights once. All or nothing: after any failure the version is
        unchanged and `generate` refuses. Raises WeightSyncError.
        """
        ...

    def fingerprint(self) -> int:
        """`protocol.weights.fingerprint` of the weights that the engine really computes with (how vLLM's can be seen: `rollout.vllm`)."""
        ...

    def sleep(self) -> None:
        """Free device memory. Weights are gone until the next `load_weights`, unless the engine has nothing to free."""
        ...

    def wake(self, tag: str) -> None:
        """Take the memory back: "weights" before `load_weights`, "kv_cache" after it."""
        ...

    def close(self) -> None:
        """Stop; running requests raise EngineError."""
        ...


def with_seed(sampling: Sampling, turn: int) -> Sampling:
    """`sampling` for a later turn of the same trajectory: another seed, or every turn would draw the same random numbers."""
    if sampling.seed is None or turn == 0:
        return sampling
    return replace(sampling, seed=(sampling.seed + turn * 0x9E3779B97F4A7C15) % (1 << 63))
