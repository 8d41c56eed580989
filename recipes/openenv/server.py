"""An OpenEnv environment: one column addition an episode, as in the quickstart.

    python -m uvicorn server:app --app-dir recipes/openenv --port 8000

It needs the package openenv, and nothing of verlite.
"""

import random
from typing import Any

from openenv.core.env_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Work(Action):
    """The digits and carries that a pupil writes, from right to left."""

    written: str


class Task(Observation):
    """The sum."""

    text: str


class Addition(Environment):
    """reset(seed) asks, step(written) answers with the reward: 1 for right, else 0."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._a = self._b = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Task:
        rng = random.Random(seed)
        self._a, self._b = rng.randint(10, 99), rng.randint(10, 99)
        return Task(text=f"{self._a}+{self._b}=")

    def step(self, action: Work, timeout_s: float | None = None, **_: Any) -> Task:
        written, carry = "", 0
        for place in (1, 10):
            column = self._a // place % 10 + self._b // place % 10 + carry
            carry = column // 10
            written += f"{column % 10}{carry}"
        return Task(text=written, reward=float(action.written == written), done=True)

    @property
    def state(self) -> State:
        return State()


app = create_app(Addition, Work, Task, env_name="addition", max_concurrent_envs=512)
