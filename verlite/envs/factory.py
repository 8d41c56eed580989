"""What the trajectories of one worker share, and the table of worlds to choose from with `env.name`."""

import asyncio
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from verlite.config.catalog import ENV_FACTORIES, resolve
from verlite.config.schema import Config, RetrieverConfig
from verlite.envs.calculator import Calculator
from verlite.envs.chat import encode_chat
from verlite.envs.search import INFORMATION, SearchEnv
from verlite.envs.step import EncodeObservation, Env, ToolError, encode_text

if TYPE_CHECKING:  # a run is looked at before anything heavy is imported
    from transformers import PreTrainedTokenizerBase


class EnvFactory:
    """Makes one `Env` for each sample, and holds what they share: connections, caches, limits.

    One of your own: a subclass, and `env.name=package.module:Subclass`; it is made with the entries of `env.kwargs`.
    """

    chat = False
    """True: observations are tool messages of the chat template. False: plain text behind what the model wrote."""
    tools: tuple[dict[str, Any], ...] = ()
    """JSON schemas of the tools, which the chat template shows to the model in the prompt."""
    around: tuple[str, str] = ("", "")
    """What stands before and after an observation and is never cut; an observation must have room for it and more."""

    def env(self, extra_info: Mapping[str, Any]) -> Env:
        """A new environment for one sample; `extra_info` is that of its row in the data."""
        raise NotImplementedError

    async def check(self) -> str | None:
        """Raise when the tools cannot be used now; return what is wrong though they can.

        Called outside `async with`: before a run starts, and to see whether an outage is over.
        """
        return None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass


class SearchEnvFactory(EnvFactory):
    """Search-R1's: a search engine behind tags in the text."""

    around = INFORMATION

    def __init__(self, retriever: RetrieverConfig) -> None:
        from verlite.envs.retriever import (
            RetrieverClient,
        )  # with an HTTP client, which nothing else needs

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
    """A calculator, called with JSON in the chat format."""

    chat = True
    tools = (Calculator.schema,)

    def env(self, extra_info: Mapping[str, Any]) -> Env:
        return Calculator()


def build_env_factory(config: Config) -> EnvFactory:
    """The world of `env.name`. Raises ValueError when it cannot be found or made."""
    if config.env.name == "search":
        return SearchEnvFactory(config.retriever)
    make = resolve(config.env.name, ENV_FACTORIES, "env.name")
    try:
        inspect.signature(make).bind(**config.env.kwargs)
    except TypeError as error:
        raise ValueError(f"env.kwargs do not fit env.name={config.env.name}: {error}") from error
    try:
        world = make(**config.env.kwargs)
    except Exception as error:  # a user's own class may raise anything
        raise ValueError(
            f"env.name={config.env.name} cannot be made: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(world, EnvFactory):
        raise ValueError(
            f"env.name={config.env.name} makes a {type(world).__name__}, which is no verlite.envs.factory.EnvFactory"
        )
    return world


def encoder(
    world: EnvFactory, tokenizer: "PreTrainedTokenizerBase", template_kwargs: Mapping[str, Any]
) -> EncodeObservation:
    """How this world's observations become tokens. Raises TemplateError when the chat template cannot carry them."""
    return (
        encode_chat(tokenizer, world.tools, template_kwargs)
        if world.chat
        else encode_text(tokenizer)
    )


def checked(world: EnvFactory) -> str | None:
    """`world.check()` from outside an event loop. Raises ToolError, whatever it was that the world raised."""
    try:
        return asyncio.run(world.check())
    except ToolError:
        raise
    except Exception as error:  # a user's own check may raise anything
        raise ToolError(f"the tools cannot be used: {type(error).__name__}: {error}") from error
