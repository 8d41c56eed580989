"""Which world env.name means, and one's own with its settings."""

import asyncio

import pytest

from tests.envs.retriever import Retriever
from verlite.config.schema import Config, EnvConfig, RetrieverConfig
from verlite.envs.calculator import Calculator
from verlite.envs.factory import (
    CalculatorEnvFactory,
    EnvFactory,
    SearchEnvFactory,
    build_env_factory,
)
from verlite.envs.search import SearchEnv
from verlite.envs.step import Step, ToolError

HERE = "tests.envs.test_factory"


class Guessing(EnvFactory):
    """One's own: the model guesses the number in extra_info."""

    def __init__(self, lowest: int, highest: int = 10) -> None:
        self.lowest, self.highest, self.entered = lowest, highest, 0

    def env(self, extra_info):
        return Guess(extra_info["secret"], self.lowest)

    async def __aenter__(self):
        self.entered += 1
        return self


class Guess:
    stop = ("!",)

    def __init__(self, secret, lowest):
        self.secret, self.lowest = secret, lowest

    async def step(self, text: str, last: bool) -> Step:
        return Step(f"not {text}, at least {self.lowest}", done=str(self.secret) in text)


class Picky(EnvFactory):
    def __init__(self, size: int) -> None:
        raise TypeError("size must be even")


def no_world():
    return 7


def config(name, **kwargs) -> Config:
    return Config(env=EnvConfig(name, kwargs))


def test_the_worlds_with_a_name_of_their_own():
    search, calculator = (
        build_env_factory(config("search")),
        build_env_factory(config("calculator")),
    )
    assert isinstance(search, SearchEnvFactory) and not search.chat and search.tools == ()
    assert isinstance(search.env({}), SearchEnv) and search.env({}).stop == (
        "</search>",
        "</answer>",
    )
    assert isinstance(calculator, CalculatorEnvFactory) and calculator.chat
    assert calculator.tools[0]["function"]["name"] == "calculator" and isinstance(
        calculator.env({}), Calculator
    )
    assert search.env({}) is not search.env({}), "one for each sample"
    asyncio.run(calculator.check())


@pytest.mark.parametrize("on_error", ["mask", "observe"])
def test_the_search_worlds_settings_reach_its_samples(on_error):
    with Retriever() as server:
        made = Config(
            retriever=RetrieverConfig(url=server.url, topk=1, on_error=on_error, deadline_s=0.4)
        )
        world = build_env_factory(made)
        asyncio.run(world.check())

        async def search(text):
            async with world:
                return await world.env({}).step(f"<search>{text}</search>", False)

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
            asyncio.run(world.check())


def test_a_world_of_ones_own():
    world = build_env_factory(config(f"{HERE}:Guessing", lowest=3))
    assert (world.lowest, world.highest, world.chat) == (3, 10, False)
    env = world.env({"secret": 7})

    async def play():
        async with world:
            return [await env.step(text, False) for text in ("4!", "7!")]

    first, second = asyncio.run(play())
    assert (first.obs, first.done, second.done) == (
        "not 4!, at least 3",
        False,
        True,
    ) and world.entered == 1
    asyncio.run(world.check())


@pytest.mark.parametrize(
    ("name", "kwargs", "said"),
    [
        ("serach", {}, r"env.name.*search"),
        (f"{HERE}:Nothing", {}, "Nothing"),
        ("no_such_package.here:EnvFactory", {}, "no_such_package"),
        (f"{HERE}:Guessing", {}, f"env.kwargs do not fit env.name={HERE}:Guessing: .*lowest"),
        (f"{HERE}:Guessing", {"lowest": 1, "low": 2}, "env.kwargs do not fit .*'low'"),
        (f"{HERE}:Picky", {"size": 3}, "size must be even"),
        (f"{HERE}:no_world", {}, "makes a int, which is no verlite.envs.factory.EnvFactory"),
    ],
)
def test_what_is_wrong_with_a_world_is_said(name, kwargs, said):
    with pytest.raises(ValueError, match=said):
        build_env_factory(config(name, **kwargs))
