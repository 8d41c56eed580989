"""Environment factories: what the trajectories of a rollout worker share. See `env.name`."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from verlite.envs.calculator import Calculator
from verlite.envs.chat import encode_chat
from verlite.envs.search import INFORMATION, SearchEnv
from verlite.envs.step import EncodeObservation, Env, ToolError, encode_text
from verlite.importing import CODE_ERRORS, SignalExit
from verlite.spec.catalog import ENV_FACTORIES, resolve
from verlite.spec.roles import EnvSpec, RetrieverSpec

if TYPE_CHECKING:  # preflight checks must not import heavy libraries
    from transformers import PreTrainedTokenizerBase


class ContextFull(ValueError):
    """The context leaves no room for an answer."""


Generate = Callable[[list[int], int | None, tuple[str, ...]], Awaitable[Any]]
"""(tokens of the context, most new tokens or None for the run's limit, stop strings) -> the
engine's `Completion`. Raises ContextFull."""


@dataclass(frozen=True)
class Played:
    """A sample that a factory has played itself."""

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    response_mask: Sequence[int]
    """1 on tokens that the engine sampled and that are trained, 0 on others."""
    score: Any = None
    """As a reward function returns it. None: the reward function scores the sample."""
    turn_scores: Sequence[float] = ()
    """Rewards of the model's turns."""


class EnvFactory:
    """Creates one `Env` per sample and owns what they share: connections, caches, limits.

    To add your own, write a subclass and set `env.name=package.module:Subclass`. Its constructor
    gets the entries of `env.kwargs`.
    """

    chat = False
    """True if observations are tool messages of the chat template, False if they are plain text."""
    tools: tuple[dict[str, Any], ...] = ()
    """JSON schemas of the tools. The chat template shows them to the model in the prompt."""
    around: tuple[str, str] = ("", "")
    """Text before and after each observation. It is never truncated."""

    plays = False
    """True if `play` plays whole samples, False if `env` answers turn by turn."""

    def env(self, extra_info: Mapping[str, Any]) -> Env:
        """Create the environment of one sample from the `extra_info` of its data row."""
        raise NotImplementedError

    async def play(
        self, row: Mapping[str, Any], tokenizer: Any, sampling: Any, generate: Generate
    ) -> Played:
        """Play one sample, with a loop of your own.

        Args:
            row: `prompt` (messages), `data_source`, `ground_truth`, `extra_info` of its data row.
            tokenizer: the model's.
            sampling: the run's `Sampling`.
            generate: asks the engine.

        Raises:
            Exception: the sample fails with it: status error, excluded from the loss.
        """
        raise NotImplementedError

    async def check(self) -> str | None:
        """Check whether the tools can be used now.

        This is called outside `async with`: before a run starts, and to find out whether an outage
        is over.

        Returns:
            A warning if the tools can be used in part, else None.

        Raises:
            ToolError: the tools cannot be used.
        """
        return None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass


class SearchEnvFactory(EnvFactory):
    """Search-R1's environment: a search engine behind tags in the text."""

    around = INFORMATION

    def __init__(self, retriever: RetrieverSpec) -> None:
        # Imported here because it needs an HTTP client, which other environments do not.
        from verlite.envs.retriever import RetrieverClient

        self.client = RetrieverClient(retriever)
        self._observe_errors = retriever.on_error == "observe"

    def env(self, extra_info: Mapping[str, Any]) -> Env:
        return SearchEnv(self.client, observe_errors=self._observe_errors)

    async def check(self) -> str | None:
        return await self.client.check()

    async def __aenter__(self) -> Self:
        await self.client.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.client.__aexit__(*error)


class CalculatorEnvFactory(EnvFactory):
    """A calculator that the model calls with JSON in the chat format."""

    chat = True
    tools = (Calculator.schema,)

    def env(self, extra_info: Mapping[str, Any]) -> Env:
        return Calculator()


def build_env_factory(spec: EnvSpec) -> EnvFactory:
    """Create the environment factory that `env.name` names.

    Raises:
        ValueError: it cannot be found or created, or is not an EnvFactory.
    """
    name = spec.name
    if name == "search":
        return SearchEnvFactory(spec.retriever)
    create = resolve(name, ENV_FACTORIES, "env.name")
    try:
        inspect.signature(create).bind(**spec.kwargs)
    except TypeError as error:
        raise ValueError(f"env.kwargs do not fit env.name={name}: {error}") from error
    try:
        factory = create(**spec.kwargs)
    except SignalExit:
        raise
    except CODE_ERRORS as error:
        raise ValueError(
            f"env.name={name} cannot be created: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(factory, EnvFactory):
        raise ValueError(
            f"env.name={name} returns a {type(factory).__name__}, which is not an EnvFactory "
            "subclass. Derive it from verlite.envs.factory.EnvFactory"
        )
    return factory


def encoder(
    factory: EnvFactory, tokenizer: "PreTrainedTokenizerBase", template_kwargs: Mapping[str, Any]
) -> EncodeObservation:
    """Return the function that turns observations into tokens.

    Raises:
        TemplateError: the chat template cannot represent tool messages.
    """
    if factory.chat:
        return encode_chat(tokenizer, factory.tools, template_kwargs)
    return encode_text(tokenizer)


def check_env_factory(factory: EnvFactory) -> str | None:
    """Run `factory.check()` from outside an event loop and return its warning.

    Raises:
        ToolError: the check failed with any exception.
    """
    try:
        return asyncio.run(factory.check())
    except ToolError:
        raise
    except CODE_ERRORS as error:
        raise ToolError(f"the tools cannot be used: {type(error).__name__}: {error}") from error
