"""Environment factories: built-in and custom ones, and their settings."""

import asyncio

import pytest

from tests.envs.retriever import Retriever
from verlite.envs.calculator import Calculator
from verlite.envs.factory import (
    CalculatorEnvFactory,
    EnvFactory,
    SearchEnvFactory,
    build_env_factory,
)
from verlite.envs.search import SearchEnv
from verlite.envs.step import Step, ToolError
from verlite.spec.roles import EnvSpec, RetrieverSpec

HERE = "tests.envs.test_factory"


class Guessing(EnvFactory):
    """A custom factory: the model guesses the number in extra_info."""

    def __init__(self, lowest: int, highest: int = 10) -> None:
        self.lowest = lowest
        self.highest = highest
        self.entered = 0

    def env(self, extra_info):
        return Guess(extra_info["secret"], self.lowest)

    async def __aenter__(self):
        self.entered += 1
        return self


class Guess:
    stop = ("!",)

    def __init__(self, secret, lowest):
        self.secret = secret
        self.lowest = lowest

    async def step(self, text: str, last: bool) -> Step:
        return Step(f"not {text}, at least {self.lowest}", done=str(self.secret) in text)


class Picky(EnvFactory):
    def __init__(self, size: int) -> None:
        raise TypeError("size must be even")


def not_a_factory():
    return 7


def test_built_in_factories():
    search = build_env_factory(EnvSpec("search"))
    assert isinstance(search, SearchEnvFactory)
    assert not search.chat
    assert search.tools == ()
    assert isinstance(search.env({}), SearchEnv)
    assert search.env({}).stop == ("</search>", "</answer>")
    assert search.env({}) is not search.env({}), "each sample has its own"
    calculator = build_env_factory(EnvSpec("calculator"))
    assert isinstance(calculator, CalculatorEnvFactory)
    assert calculator.chat
    assert calculator.tools[0]["function"]["name"] == "calculator"
    assert isinstance(calculator.env({}), Calculator)
    asyncio.run(calculator.check())


@pytest.mark.parametrize("on_error", ["mask", "observe"])
def test_search_settings_reach_the_samples(on_error):
    with Retriever() as server:
        settings = RetrieverSpec(url=(server.url,), topk=1, on_error=on_error, deadline_s=0.4)
        factory = build_env_factory(EnvSpec("search", retriever=settings))
        asyncio.run(factory.check())

        async def search(text):
            async with factory:
                return await factory.env({}).step(f"<search>{text}</search>", False)

        assert asyncio.run(search("capital of France")).info["hits"] == 1
        assert asyncio.run(search("capital of France")).info["cached"], (
            "samples and steps share the cache"
        )
        server.answer = lambda body: (500, b"")
        if on_error == "observe":
            assert "does not answer" in asyncio.run(search("Everest")).obs
        else:
            with pytest.raises(ToolError, match="HTTP 500"):
                asyncio.run(search("Everest"))
        with pytest.raises(ToolError, match="does not answer"):
            asyncio.run(factory.check())


def test_custom_factory():
    factory = build_env_factory(EnvSpec(f"{HERE}:Guessing", {"lowest": 3}))
    assert (factory.lowest, factory.highest, factory.chat) == (3, 10, False)
    env = factory.env({"secret": 7})

    async def play():
        async with factory:
            return [await env.step(text, False) for text in ("4!", "7!")]

    first, second = asyncio.run(play())
    assert (first.obs, first.done) == ("not 4!, at least 3", False)
    assert second.done
    assert factory.entered == 1
    asyncio.run(factory.check())


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("serach", {}, r"env.name.*search"),
        (f"{HERE}:Nothing", {}, "Nothing"),
        ("no_such_package.here:EnvFactory", {}, "no_such_package"),
        (f"{HERE}:Guessing", {}, f"env.kwargs do not fit env.name={HERE}:Guessing: .*lowest"),
        (f"{HERE}:Guessing", {"lowest": 1, "low": 2}, "env.kwargs do not fit .*'low'"),
        (f"{HERE}:Picky", {"size": 3}, "size must be even"),
        (f"{HERE}:not_a_factory", {}, "returns a int, which is not an EnvFactory subclass"),
    ],
)
def test_unusable_factory_is_an_error(name, kwargs, message):
    with pytest.raises(ValueError, match=message):
        build_env_factory(EnvSpec(name, kwargs))
