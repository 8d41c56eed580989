"""Inputs and outputs of generation: token ids in, token ids and their log-probs out.

Every list describes one sequence. Lists that describe the same tokens have equal length. Text
exists only in the environment's view of a turn (`envs.step.Env`); text written by the model is
never tokenized again.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verlite.rewards.result import RewardResult
from verlite.spec.roles import GenerationSpec, ModelSpec
from verlite.weights.probe import Gap, Probe

Spans = list[tuple[int, int]]
"""(weight version, number of tokens that it sampled) of consecutive tokens, oldest first."""

_SEED_STEP = 0x9E3779B97F4A7C15  # the increment of SplitMix64
_TOKEN_STEP = 0xBF58476D1CE4E5B9  # another odd number
_SEED_LIMIT = 1 << 63


class EngineError(RuntimeError):
    """The engine cannot generate: it died, hangs, was closed, or has no verified weights. Every
    request is affected."""


class EngineDied(EngineError):
    """A generation step failed, and the engine ended; or no step ends, and the engine hangs. It can
    be replaced by a new engine in a new process."""


class WeightSyncError(EngineError):
    """A weight sync failed. The engine keeps its version and refuses to generate until a sync
    succeeds."""


@dataclass(frozen=True)
class EngineOptions:
    """Constructor argument of every engine's `Core` (see batched.py)."""

    model: ModelSpec
    rollout: GenerationSpec
    dtype: torch.dtype
    """Dtype of the engine's weights."""
    device: torch.device
    max_model_len: int
    """Maximum number of prompt and response tokens of one sequence."""
    seed: int
    """Seed of requests that have none of their own."""
    pretrained: bool
    """True: start with the checkpoint's weights. False: weights arrive by `load`."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of one request.

    Tokens are drawn from softmax(logits / temperature), restricted to the `top_k` most likely
    tokens, then to the smallest set of tokens with total probability `top_p`, then renormalized.
    Tokens tied with the last kept token are kept.
    """

    temperature: float = 1.0
    """0 means greedy; the reported log-probs are then those at temperature 1."""
    top_p: float = 1.0
    top_k: int = -1
    """-1 means all tokens."""
    max_tokens: int = 16
    """Maximum number of new tokens."""
    stop: tuple[str, ...] = ()
    """Stop strings: generation ends when the new text contains one. The tokens that completed it
    are kept."""
    seed: int | None = None
    """Equal seed, prompt and weights give equal tokens. None draws a random seed."""
    ignore_eos: bool = False
    """Continue after end-of-sequence tokens."""

    def __post_init__(self) -> None:
        rules = {
            "temperature >= 0": self.temperature >= 0,
            "0 < top_p <= 1": 0 < self.top_p <= 1,
            "top_k = -1 or >= 1": self.top_k == -1 or self.top_k >= 1,
            "max_tokens >= 1": self.max_tokens >= 1,
            "no empty stop string": all(self.stop),
        }
        broken = [rule for rule, is_satisfied in rules.items() if not is_satisfied]
        if broken:
            raise ValueError(f"sampling needs {' and '.join(broken)}, got {self}")

    @property
    def greedy(self) -> bool:
        """True if the most likely token is always chosen."""
        return self.temperature == 0


@dataclass(frozen=True)
class Task:
    """A sample of an agent program, or of an environment that plays it itself.

    row: what it gets, as JSON values.
    prompt_ids: the row's prompt, for a sample in which the model was never asked.
    sampling: of each answer.
    """

    row: Mapping[str, Any]
    prompt_ids: list[int]
    sampling: Sampling


@dataclass(frozen=True)
class Completion:
    """The engine's answer to one request."""

    ids: list[int]
    """Sampled tokens. An end-of-sequence token, or the tokens of a stop string, come last and are
    included."""
    log_probs: list[float]
    """Log-prob of each sampled token under the distribution it was drawn from."""
    finish_reason: str
    """"stop" (end of sequence or stop string), "length" (max_tokens reached) or "abort" (the engine
    gave up). "" if it is not finished."""
    weight_versions: Spans
    """Versions of the weights that sampled its tokens. Several if weights were loaded meanwhile."""


@dataclass(frozen=True)
class Load:
    """What an engine has done since it was started."""

    at: float
    """When, by a clock in seconds of its process."""
    busy_s: float = 0.0
    """Seconds in generation steps."""
    sample_seconds: float = 0.0
    """Their sum over the samples that each step generated."""

    def since(self, earlier: "Load") -> "Load":
        """Return what was done after an earlier one, and the time that it took."""
        return Load(
            self.at - earlier.at,
            self.busy_s - earlier.busy_s,
            self.sample_seconds - earlier.sample_seconds,
        )


class Status(StrEnum):
    """How a trajectory ended."""

    DONE = "done"
    """The model or the environment ended it."""
    MAX_TURNS = "max_turns"
    """The turn limit was reached before the environment was done."""
    LENGTH = "length"
    """The token limit was reached."""
    ERROR = "error"
    """Infrastructure failed. The sample is excluded from the loss and from all statistics."""


@dataclass
class Trajectory:
    """One sample: a prompt and everything generated or observed after it.

    The lists only grow, and only through `append_sampled` and `append_observation`, so they stay
    aligned.
    """

    prompt_ids: list[int]
    response_ids: list[int] = field(default_factory=list)
    """Sampled tokens and observations in the order in which the model saw them."""
    response_mask: list[int] = field(default_factory=list)
    """1 on sampled tokens, 0 on observations; all 0 after `fail`."""
    log_probs: list[float] = field(default_factory=list)
    """Log-probs of sampled tokens under the sampling distribution; 0 on observations."""
    status: Status = Status.DONE
    error: str | None = None
    """With status ERROR: exception class and message."""
    weight_versions: Spans = field(default_factory=list)
    """Versions of the weights that sampled its tokens, observations not counted."""
    turns: int = 0
    """Number of completed generation calls."""
    invalid_turns: int = 0
    """Number of turns that the environment marked as malformed."""
    truncated_observations: int = 0
    """Number of observations shortened to the observation limit."""
    gen_seconds: float = 0.0
    """Seconds spent waiting for the engine."""
    tool_seconds: float = 0.0
    """Seconds spent waiting for the environment."""
    infos: list[dict[str, Any]] = field(default_factory=list)
    """What the environment reported for each turn."""
    turn_scores: list[float] = field(default_factory=list)
    """The environment's reward of each turn that it read."""
    segments: list[tuple[Literal["model", "tool"], int]] = field(default_factory=list)
    """(author, token count) of each piece of the response. Unlike the mask, it is kept after
    `fail`."""
    score: RewardResult | None = None
    """The score that an agent program gave itself."""
    branches: list[tuple[int, int]] = field(default_factory=list)
    """Of an agent program's sample, (tokens of the context, tokens that follow) of each of its
    sequences. They are one after the other in prompt_ids and response_ids. []: there is one."""
    requests: list[dict[str, Any]] = field(default_factory=list)
    """Of each turn of an agent program: its number in the session and that of its parent, why it
    has none, its branch, the tokens of its context, given after its parent, and sampled, and the
    factor of the sample's advantage (`credit`)."""
    log: str = ""
    """The end of what the program printed."""
    session: dict[str, int] = field(default_factory=dict)
    """What became of an agent program's requests (`gateway.conversation.Session.ledger`)."""

    @property
    def num_turns(self) -> int:
        """Messages, as verl counts them: the prompt, the model's turns and the answers of tools."""
        return 1 + len(self.segments)

    def append_sampled(self, completion: Completion) -> None:
        """Append the tokens of one generation call."""
        versioned = sum(count for _, count in completion.weight_versions)
        if not len(completion.ids) == len(completion.log_probs) == versioned:
            raise EngineError(
                f"the engine returned {len(completion.ids)} tokens but "
                f"{len(completion.log_probs)} log-probs and the weight versions of {versioned}"
            )
        self.response_ids += completion.ids
        self.response_mask += [1] * len(completion.ids)
        self.log_probs += completion.log_probs
        self.segments.append(("model", len(completion.ids)))
        for version, count in completion.weight_versions:
            extend_spans(self.weight_versions, version, count)
        self.turns += 1

    def append_observation(self, ids: Sequence[int]) -> None:
        """Append the tokens of one observation."""
        self.response_ids += ids
        self.response_mask += [0] * len(ids)
        self.log_probs += [0.0] * len(ids)
        self.segments.append(("tool", len(ids)))

    def fail(self, error: BaseException | str) -> None:
        """Mark the trajectory as an infrastructure failure: none of its tokens is trained on."""
        self.status = Status.ERROR
        self.error = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        self.response_mask = [0] * len(self.response_ids)


class Engine(Protocol):
    """A thread-safe generation engine with a known weight version, one object per model copy."""

    version: int
    """Version of the weights; -1 before the first sync."""
    tokenizer: PreTrainedTokenizerBase
    last_step: float
    """When it completed its last generation step or weight load, by time.monotonic()."""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        so_far: Completion | None = None,
        name: Any = None,
    ) -> Completion:
        """Generate a continuation of `prompt_ids`.

        Args:
            so_far: the first tokens of the answer, which `running` of this or of another engine has
                returned. It goes on after them, and they count as its own.
            name: under which `running` returns the request.

        Raises:
            ValueError: the prompt is invalid or too long. Only this request fails.
            EngineError: the engine cannot generate.
        """
        ...

    def running(self) -> dict[Any, Completion]:
        """Return what the requests with a name that are not finished have so far."""
        ...

    def load_weights(
        self,
        named: Iterable[tuple[str, Tensor]],
        version: int,
        expected_fingerprint: int,
        is_probed: bool = False,
    ) -> None:
        """Replace all weights, reset caches, verify the fingerprint, and only then adopt `version`.

        Running requests keep their tokens and go on with the new weights. Until a sync has
        succeeded, they wait.

        Args:
            named: (Hugging Face name, full tensor) of each weight; tied weights once.
            version: the version to adopt on success.
            expected_fingerprint: the trainer's `weights.fingerprint.fingerprint` in this engine's
                dtype.
            is_probed: requests wait until `check_log_probs` has succeeded, too.

        Raises:
            WeightSyncError: the sync failed, or requests run and the engine was not built for that
                (`GenerationSpec.kv_at_update`). The version is unchanged, and after a failure
                `generate` refuses until a sync succeeds.
        """
        ...

    def fingerprint(self) -> int:
        """Return `weights.fingerprint.fingerprint` of the weights in use, measured now."""
        ...

    def check_log_probs(self, probe: Probe) -> Gap:
        """Compare log-probs with the trainer's, after `load_weights` and `wake`.

        Raises:
            WeightSyncError: they differ by more than probe.limit. The version is that from before
                `load_weights`, and `generate` refuses until a sync succeeds.
        """
        ...

    def sleep(self) -> None:
        """Free device memory. If weights were freed, `load_weights` must run before the next
        `generate`."""
        ...

    def wake(self, tag: str) -> None:
        """Reallocate memory: "weights" before `load_weights`, "kv_cache" after it."""
        ...

    def close(self) -> None:
        """Stop the engine. Running requests raise EngineError."""
        ...


def extend_spans(spans: Spans, version: int, count: int) -> None:
    """Append `count` tokens that `version` sampled."""
    if count < 0:
        raise ValueError(f"{-count} tokens disappeared that {spans} had sampled")
    if spans and spans[-1][0] == version:
        count += spans.pop()[1]
    if count:
        spans.append((version, count))


def with_seed(sampling: Sampling, turn: int) -> Sampling:
    """Return `sampling` with a different seed for each turn, so that turns do not repeat random
    numbers."""
    if sampling.seed is None or turn == 0:
        return sampling
    return replace(sampling, seed=(sampling.seed + turn * _SEED_STEP) % _SEED_LIMIT)


def after_tokens(sampling: Sampling, count: int) -> Sampling:
    """Return what is left of `sampling` after the first `count` tokens, for an engine that takes
    them for a part of the prompt: fewer tokens, and another seed, because the random numbers of the
    first tokens must not be used again."""
    seed = sampling.seed
    if seed is not None:
        seed = (seed + count * _TOKEN_STEP) % _SEED_LIMIT
    return replace(sampling, max_tokens=sampling.max_tokens - count, seed=seed)
