"""An engine that says given texts, and a client for sessions of a gateway."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx

from verlite.gateway.conversation import Session
from verlite.gateway.server import Gateway, OpenSession
from verlite.rollout.types import Completion, Sampling


class Speaker:
    """Answers with given texts in order, and ends each turn unless max_tokens or a stop string
    does."""

    version = 4
    last_step = 0.0

    def __init__(self, tokenizer, *turns: str | Exception, cut: Sequence[int] = ()):
        self.tokenizer = tokenizer
        self.turns = list(turns)
        self.calls: list[tuple[list[int], Sampling]] = []
        self.cancelled = 0
        self.spoken: dict[Any, list[int]] = {}
        self.so_far = 0
        """How many tokens of running requests `running` returns."""
        self.began = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def generate(self, prompt_ids, sampling, so_far=None, name=None):
        said = self.turns.pop(0)
        self.calls.append((list(prompt_ids), sampling))
        self.began.set()
        if isinstance(said, Exception):
            raise said
        ids = self.tokenizer.encode(said, add_special_tokens=False)
        self.spoken[name] = ids
        try:
            await self.may_answer.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.spoken.pop(name, None)
        if not any(stop in said for stop in sampling.stop):
            ids.append(self.tokenizer.eos_token_id)
        reason = "stop" if len(ids) <= sampling.max_tokens else "length"
        ids = ids[: sampling.max_tokens]
        number = len(self.calls)
        return self._completion(ids, number, reason)

    def _completion(self, ids, number, reason):
        log_probs = [-number - i / 100 for i in range(len(ids))]
        return Completion(ids, log_probs, reason, [(self.version, len(ids))])

    def running(self):
        number = len(self.calls)
        return {
            name: self._completion(ids[: self.so_far], number, "")
            for name, ids in list(self.spoken.items())
            if name is not None
        }


class Client:
    """Sends JSON to a session."""

    def __init__(self, session: OpenSession, http: httpx.AsyncClient):
        self.session = session
        self.http = http
        self.headers = {"Authorization": f"Bearer {session.token}"}

    async def post(self, path: str, **body: Any) -> httpx.Response:
        url = f"{self.session.base_url}/{path}"
        return await self.http.post(url, json=body, headers=self.headers)

    async def chat(self, messages, **body: Any) -> dict[str, Any]:
        """Return the answer to a conversation."""
        response = await self.post("chat/completions", messages=messages, **body)
        assert response.status_code == 200, response.text
        return response.json()

    async def say(self, messages, **body: Any) -> list[dict[str, Any]]:
        """Return the conversation with its answer."""
        answer = await self.chat(messages, **body)
        return [*messages, answer["choices"][0]["message"]]


@asynccontextmanager
async def session_of(
    engine, longest: int = 2000, sampling: Sampling | None = None, **options: Any
) -> AsyncIterator[Client]:
    """Open a session of a gateway in front of an engine."""
    async with Gateway(engine, longest, options) as gateway:
        session = gateway.open(sampling or Sampling(max_tokens=200, seed=5))
        async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
            client = Client(session, http)
            client.gateway = gateway  # type: ignore[attr-defined]
            yield client


async def mixed_session(client: Client, seed: int, requests: int = 8) -> Session:
    """Talk at random: turns, retries, several answers, sub-agents, edited histories, streams,
    requests in parallel, and clients that disconnect. Returns the record."""
    rng = random.Random(seed)
    histories: list[list[dict[str, Any]]] = [[user("hi")]]

    async def one() -> None:
        history = [*rng.choice(histories)]
        move = rng.random()
        if move < 0.2:
            history = [user(rng.choice("abc"))]  # a sub-agent
        elif move < 0.3 and len(history) > 2:
            history[1] = {"role": "assistant", "content": "edited"}
        ask = client.post(
            "chat/completions", messages=history, n=rng.randrange(1, 3), stream=move > 0.8
        )
        if rng.random() < 0.2:
            task = asyncio.create_task(ask)
            await asyncio.sleep(rng.random() / 20)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return
        response = await ask
        if response.status_code == 200 and move <= 0.8:
            for choice in response.json()["choices"]:
                tail = user(rng.choice(["more", "why", "é\n"]))
                histories.append([*history, choice["message"], tail])

    for _ in range(requests // 2):
        await asyncio.gather(one(), one())
    client.gateway.close(client.session)  # type: ignore[attr-defined]
    return client.session.record


def streamed(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the events of a stream, whose end is checked."""
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def tool(call: dict[str, Any], text: str) -> dict[str, str]:
    """Return the answer of a tool to a call."""
    return {"role": "tool", "tool_call_id": call["id"], "content": text}
