"""An environment that pays for the letters of each turn."""

from verlite.envs.factory import EnvFactory
from verlite.envs.step import Step


class Letters(EnvFactory):
    def __init__(self, each: float) -> None:
        self.each = each

    def env(self, extra_info):
        return Turn(self.each)


class Turn:
    stop = ("</search>", "</answer>")

    def __init__(self, each: float) -> None:
        self.each = each

    async def step(self, text: str, last: bool) -> Step:
        letters = sum(letter.isalpha() for letter in text)
        return Step("more", reward=letters * self.each, info={"letters": letters})
