"""Play episodes of an OpenEnv server (0.10), over its own wire: one WebSocket per sample.

    env.openenv=http://127.0.0.1:8000
    env.openenv="envs/game/bin/python -m uvicorn game.server:app --port {port}"

The first message is the row's prompt and the observation of `reset`. Each turn of the model is
turned into an action, and each observation into a message of the user. The score is the sum of the
rewards. What the server or the network does wrong ends the sample unscored, with its class; what
the model does wrong is an observation that says so.
"""

import asyncio
import importlib
import json
import math
import re
import shlex
import socket
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Self

import aiohttp

from verlite.envs.chat import Chat
from verlite.envs.factory import ContextFull, EnvFactory, Generate, Played
from verlite.envs.step import Step, ToolError
from verlite.importing import find, names_a_file
from verlite.own_process import OwnProcess, ProcessEnded

WAIT_S = 0.25
"""Between two tries to get one of the server's sessions, or to reach one that starts."""
MAX_MESSAGE = 64 << 20
"""Bytes of one message of a server."""
TOKEN_CHARACTERS = 256
"""More than a token has. Of a longer observation only the beginning is encoded."""
OURS = ("metadata",)
"""Fields of actions and observations that are not for the model."""
RESET = "reset"
"""Entry of a row's extra_info: parameters of `reset`."""
HEALTH_S = 10.0
"""How long a command's server that was late may take to answer /health. After that it hangs."""
_OPENING = re.compile(r"```(?:json)?\s*(?=\{)")
_CLOSING = re.compile(r"(?<=\})\s*```")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")

ToAction = Callable[[str, Mapping[str, Any]], Mapping[str, Any]]
"""(the model's text, JSON schema of the actions) -> action. Raises ValueError: a mistake of the
model, which it is told."""
ToText = Callable[[Mapping[str, Any]], str]
"""Observation -> text for the model."""


class EnvironmentLost(ToolError):
    """The server cannot be reached, or the connection broke."""


class EnvironmentTimeout(ToolError):
    """The server did not answer in time."""


class EnvironmentRefused(ToolError):
    """The server gave no session."""


class EnvironmentFailed(ToolError):
    """The environment raised an error, or answered what is not of OpenEnv."""


class Rejected(ValueError):
    """The server's model of actions does not fit an action."""


def action_of(text: str, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the action in a text of the model. What is before </think> does not count.

    A JSON object (alone, or in a fence) with fields of the schema is the action. Otherwise, if the
    schema has one required field, or one at all: the stripped text if it is a string, its last
    number if it is a number, the choice that it names last if the schema lists choices.

    Raises:
        ValueError: there is no action in it.
    """
    text = text.rpartition("</think>")[2].strip()
    kinds = [
        {n: f for n, f in (kind.get("properties") or {}).items() if n not in OURS}
        for kind in _options(schema, schema)
    ]
    fields = {name: field for kind in kinds for name, field in kind.items()}
    try:
        value = json.loads(_fenced(text) or text)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict) and any(not kind or set(value) <= set(kind) for kind in kinds):
        return value
    required = {name for kind in _options(schema, schema) for name in kind.get("required") or ()}
    names = [name for name in fields if name in required] or list(fields)
    if len(names) == 1 and not isinstance(value, dict):
        for option in _options(fields[names[0]], schema):
            found = _value(text, option)
            if found is not None:
                return {names[0]: found}
    raise ValueError(
        "write one JSON object with " + (", ".join(map(repr, fields)) or "the fields of an action")
    )


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _fenced(text: str) -> str:
    """Return the last JSON object in a fence, "" without. In linear time."""
    found, end = "", 0
    while (begin := _OPENING.search(text, end)) and (close := _CLOSING.search(text, begin.end())):
        found, end = text[begin.end() : close.start()], close.end()
    return found


def _options(field: Mapping[str, Any], schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the schemas that a field may have, in their order: each `$ref` is followed once, and
    each of `anyOf`, `oneOf` and `allOf` is one."""
    found: list[Mapping[str, Any]] = []
    followed: set[str] = set()
    waiting = [field]
    while waiting:
        field = waiting.pop()
        parts = [part for kind in ("anyOf", "oneOf", "allOf") for part in field.get(kind) or ()]
        if "$ref" in field:
            name = str(field["$ref"]).rpartition("/")[2]
            parts = [] if name in followed else [(schema.get("$defs") or {}).get(name) or {}]
            followed.add(name)
        elif not parts or "properties" in field:
            found.append(field)
            continue
        waiting += reversed(parts)
    return found


def _value(text: str, field: Mapping[str, Any]) -> Any:
    """Return the value of a field in a text; None if there is none."""
    if "const" in field:
        field = {"enum": [field["const"]]}
    if "enum" in field:
        choices = {str(choice): choice for choice in field["enum"]}
        longest_first = sorted(map(re.escape, choices), key=len, reverse=True)
        found = re.findall(rf"(?<!\w)(?:{'|'.join(longest_first)})(?!\w)", text)
        return choices[found[-1]] if choices and found else None
    numbers = _NUMBER.findall(text)
    match field.get("type"):
        case "string":
            return text
        case "integer" if numbers and "." not in numbers[-1]:
            return int(numbers[-1])
        case "number" if numbers:
            return float(numbers[-1])
        case "boolean" if text.lower() in ("true", "false", "yes", "no"):
            return text.lower() in ("true", "yes")
    return None


def text_of(observation: Mapping[str, Any]) -> str:
    """Return an observation as text: its only text, or its fields as JSON. Metadata is left out."""
    fields = {name: value for name, value in observation.items() if name not in OURS}
    if len(fields) == 1:
        (value,) = fields.values()
        if isinstance(value, str):
            return value
    return json.dumps(fields, ensure_ascii=False)


@dataclass(eq=False)
class OpenEnv(EnvFactory):
    """The server of a run. With a command each rollout worker starts one of its own.

    Raises:
        ValueError: a setting cannot be used. OwnCodeError: a function cannot be imported.
    """

    plays = True

    server: str
    """Its URL; or a command, in which {port} is where it must listen."""
    max_turns: int
    """Actions of an episode, at most."""
    max_obs_length: int = 512
    """Tokens of an observation, at most. Longer ones are cut at their end."""
    scores: bool = True
    """Whether the sum of rewards is the score, not a reward function's."""
    template_kwargs: Mapping[str, Any] | None = None
    """data.apply_chat_template_kwargs."""
    action: str | None = None
    """FILE.py:NAME or module:NAME in place of `action_of`."""
    observation: str | None = None
    """The same in place of `text_of`."""
    timeout_s: float = 60.0
    """Longest time of one answer of the server, in seconds."""
    session_s: float = 300.0
    """How long to wait for a session of a server that has no more, in seconds."""
    start_s: float = 120.0
    """How long a command may take to start, in seconds."""
    memory_gb: float = 16.0
    """Limit of a command's memory, in GiB."""

    def __post_init__(self) -> None:
        for name in ("timeout_s", "start_s", "memory_gb", "session_s"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ValueError(f"env.kwargs.{name}={value!r} must be a number of at least 0")
        self._base = self.server.rstrip("/") if re.match(r"(https?|wss?)://", self.server) else None
        self._base = self._base and re.sub("^ws", "http", self._base)
        try:
            self._words = [] if self._base else shlex.split(self.server)
        except ValueError as error:
            raise ValueError(f"env.openenv={self.server}: {error}") from error
        if not self._base and "{port}" not in self.server:
            raise ValueError(
                f"env.openenv={self.server} must be a URL, or a command with {{port}}, such as "
                "python -m uvicorn game.server:app --port {port}"
            )
        self._to_action: ToAction = _function(self.action) if self.action else action_of
        self._to_text: ToText = _function(self.observation) if self.observation else text_of
        self._stack = AsyncExitStack()
        self._program: OwnProcess | None = None
        self._ended: asyncio.Future[None] | None = None
        self._schema: Mapping[str, Any] | None = None

    async def __aenter__(self) -> Self:
        self._stack = AsyncExitStack()
        limits = aiohttp.ClientTimeout(total=self.timeout_s)
        connector = aiohttp.TCPConnector(limit=0)
        self._http = await self._stack.enter_async_context(
            aiohttp.ClientSession(timeout=limits, connector=connector)
        )
        self._url = str(self._base)
        if self._words:
            self._program = await self._stack.enter_async_context(
                OwnProcess(
                    self._words,
                    self._answers,
                    start_s=self.start_s,
                    memory_gb=self.memory_gb,
                    fill=self._with_port,
                )
            )
        return self

    def _with_port(self, words: Sequence[str]) -> list[str]:
        """Return the command with a free port. Another program may take it first; then the server
        does not start, and the next start has another one."""
        port = _free_port()
        self._url = f"http://127.0.0.1:{port}"
        return [word.replace("{port}", str(port)) for word in words]

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()
        self._program = self._ended = None

    async def check(self) -> str | None:
        """Read the server's schema. A command is started for it. Raises ToolError."""
        async with self:
            self._schema = None  # of a server that may be gone
            await self._ready()
        return None

    async def play(
        self, row: Mapping[str, Any], tokenizer: Any, sampling: Any, generate: Generate
    ) -> Played:
        """Play an episode; see `EnvFactory.play`. Raises ToolError, TemplateError."""
        chat = Chat(tokenizer, (), self.template_kwargs)

        def message(text: str) -> dict[str, Any]:
            text = text[: TOKEN_CHARACTERS * self.max_obs_length]
            ids = tokenizer.encode(text, add_special_tokens=False)
            if len(ids) > self.max_obs_length:
                text = tokenizer.decode(ids[: self.max_obs_length])
            return {"role": "user", "content": text}

        async with AsyncExitStack() as stack:
            episode = _Episode(self, reset_of(row["prompt"], row["extra_info"]))
            stack.push_async_callback(episode.leave)
            messages = [*row["prompt"], message(await episode.reset())]
            prompt = chat.encode_messages(chat.render, messages)
            ids, mask, rewards = list(prompt), list[int](), list[float]()
            is_done = False
            for turn in range(1, self.max_turns + 1):
                try:
                    answer = await generate(ids, None, ())
                except ContextFull:
                    if turn == 1:
                        raise
                    break
                ids, mask = [*ids, *answer.ids], [*mask, *[1] * len(answer.ids)]
                if answer.finish_reason == "length":
                    break
                text = str(tokenizer.decode(answer.ids, skip_special_tokens=True))
                step = await episode.step(text, False)
                rewards.append(step.reward)
                is_done = step.done
                if is_done or turn == self.max_turns:
                    break
                told = message(step.obs)
                after = chat.continuation(ids, messages, [told], "</think>" in text)
                ids, mask = [*ids, *after], [*mask, *[0] * len(after)]
                messages += [{"role": "assistant", "content": text}, told]
        if is_done and not episode.is_scored:
            raise EnvironmentFailed(f"{self._url} gave no reward in the whole episode")
        score = sum(rewards) + episode.reset_reward if self.scores else None
        return Played(prompt, ids[len(prompt) :], mask, score=score, turn_scores=rewards)

    def env(self, extra_info: Mapping[str, Any]) -> "_Episode":
        """Return an episode that is played turn by turn, as `verlite contract env` does."""
        return _Episode(self, reset_of([], extra_info))

    async def _ready(self) -> Mapping[str, Any]:
        """Start the command if it does not run. Return the schema of the actions."""
        if self._program is not None:
            try:
                self._ended = await self._program.running()
            except ProcessEnded as error:
                raise EnvironmentLost(f"env.openenv: {error}") from error
        if self._schema is None:
            schema = await self._get("/schema")
            if not isinstance(schema, dict) or not isinstance(schema.get("action"), dict):
                raise EnvironmentFailed(f"{self._url}/schema has no schema of actions")
            self._schema = schema["action"]
        return self._schema

    async def _answers(self, program: OwnProcess) -> None:
        while True:
            try:
                await self._get("/health")
                return
            except ToolError:
                await asyncio.sleep(WAIT_S)

    async def _get(self, path: str) -> Any:
        try:
            async with self._http.get(self._url + path) as response:
                if response.status != 200:
                    raise EnvironmentFailed(f"{self._url}{path} answers {response.status}")
                return await response.json()
        except TimeoutError as error:
            raise self.late(path) from error
        except (aiohttp.ClientError, ValueError) as error:
            raise EnvironmentLost(f"{self._url}{path}: {_words(error)}") from error

    async def end_if_it_hangs(self, ended: "asyncio.Future[None] | None") -> None:
        """End a command that was late, unless /health answers. The next sample starts it again.

        ended: of the command that was late.
        """
        if self._program is None or ended is None or ended.done():
            return
        patience = aiohttp.ClientTimeout(total=HEALTH_S)
        try:
            async with self._http.get(f"{self._url}/health", timeout=patience):
                return  # also with an error: it is busy
        except (TimeoutError, aiohttp.ClientError):
            if not ended.done():
                await self._program.end(f"it hangs: no answer to /health within {HEALTH_S:g} s")

    def late(self, what: str) -> EnvironmentTimeout:
        """Return the error for an answer that did not come."""
        return EnvironmentTimeout(
            f"{self._url} did not answer {what} within env.kwargs.timeout_s={self.timeout_s:g}"
        )


class _Episode:
    """The episode of one sample, in a session of the server until the connection ends.

    Attributes:
        is_scored: whether there was a reward, or a mistake of the model.
    """

    stop: tuple[str, ...] = ()

    def __init__(self, server: OpenEnv, reset: Mapping[str, Any]) -> None:
        self._server = server
        self._reset = reset
        self._schema: Mapping[str, Any] | None = None
        self._ended: asyncio.Future[None] | None = None
        self._socket: Any = None
        self.reset_reward = 0.0
        self.is_scored = False

    async def leave(self) -> None:
        """End the session."""
        if self._socket is not None:
            await self._socket.close()
            self._socket = None

    async def reset(self) -> str:
        """Begin. Return the first observation as text. Raises ToolError."""
        self._schema = await self._server._ready()
        self._ended = self._server._ended
        result = await self.ask(RESET, self._reset)
        self.reset_reward = self._reward(result)
        return self._server._to_text(result["observation"])

    async def step(self, text: str, last: bool) -> Step:
        """See `Env.step`. A reward of reset is added to that of the first turn."""
        if self._schema is None:
            await self.reset()
        if last:
            await self.leave()
            return Step()
        first, self.reset_reward = self.reset_reward, 0.0
        try:
            action = self._server._to_action(text, self._schema or {})
            if not isinstance(action, Mapping):
                raise TypeError(f"env.kwargs.action returned {action!r:.200}, expected a mapping")
            result = await self.ask("step", dict(action))
        except ValueError as mistake:
            self.is_scored = True
            return Step(f"Error: {mistake}", valid=False, reward=first)
        reward = first + self._reward(result)
        told = self._server._to_text(result["observation"])
        if result["done"]:
            await self.leave()
        return Step(told, done=result["done"], reward=reward, info={"called": True})

    def _reward(self, result: Mapping[str, Any]) -> float:
        reward = result["reward"]
        if reward is None:
            return 0.0
        if not isinstance(reward, int | float) or not math.isfinite(reward):
            raise EnvironmentFailed(
                f"{self._server._url} gave the reward {reward!r:.200}, expected a finite number"
            )
        self.is_scored = True
        return float(reward)

    async def ask(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a message. Return observation, reward and done. Raises ToolError, Rejected."""
        server = self._server
        limit = asyncio.get_running_loop().time() + server.session_s
        while True:
            try:
                async with asyncio.timeout(server.timeout_s):
                    answer = await self._exchange({"type": kind, "data": data})
            except TimeoutError as error:
                await server.end_if_it_hangs(self._ended)
                raise server.late(kind) from error
            except (aiohttp.ClientError, OSError, TypeError) as error:
                raise EnvironmentLost(f"{server._url}/ws: {_words(error)}") from error
            except ValueError as error:
                raise EnvironmentFailed(f"{server._url}/ws answered {kind}: {error}") from error
            told = answer.get("data") if isinstance(answer, dict) else None
            if not isinstance(told, dict):
                raise EnvironmentFailed(f"{server._url}/ws answered {kind} with {answer!r:.200}")
            if answer.get("type") != "error":
                return _checked(told, kind, server._url)
            code, message = told.get("code"), str(told.get("message"))[:500]
            if code == "VALIDATION_ERROR" and kind == "step":
                raise Rejected(f"the action is not valid: {_errors(told)}")
            if code == "EXECUTION_ERROR":
                raise EnvironmentFailed(f"{server._url}: {kind} raised {message}")
            if code != "CAPACITY_REACHED" or asyncio.get_running_loop().time() > limit:
                raise EnvironmentRefused(f"{server._url} refuses {kind}: {code}: {message}")
            await self.leave()
            await asyncio.sleep(WAIT_S)

    async def _exchange(self, message: Mapping[str, Any]) -> Any:
        if self._socket is None:
            self._socket = await self._server._http.ws_connect(
                f"{self._server._url}/ws", max_msg_size=MAX_MESSAGE
            )
        await self._socket.send_json(message)
        return await self._socket.receive_json()


def reset_of(prompt: Any, extra_info: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the parameters of `reset`: extra_info.reset, and a seed that is the same for all
    samples of a row."""
    told = json.dumps([prompt, extra_info], sort_keys=True, default=str)
    parameters = (extra_info or {}).get(RESET) or {}
    if not isinstance(parameters, Mapping):
        raise ValueError(f"extra_info.{RESET}={parameters!r:.200} must be a mapping of parameters")
    return {"seed": zlib.crc32(told.encode()) >> 1} | dict(parameters)


def _checked(told: Mapping[str, Any], kind: str, url: str) -> Mapping[str, Any]:
    """Return an answer that has an observation. Raises EnvironmentFailed."""
    if not isinstance(told.get("observation"), dict):
        raise EnvironmentFailed(f"{url}/ws answered {kind} without an observation: {told!r:.200}")
    return {"reward": None, **told, "done": bool(told.get("done"))}


def _errors(told: Mapping[str, Any]) -> str:
    errors: Sequence[Any] = told.get("errors") or ()
    words = [
        f"{'.'.join(map(str, one.get('loc') or ()))}: {one.get('msg')}"
        for one in errors
        if isinstance(one, dict)
    ]
    return "; ".join(words)[:500] or str(told.get("message"))


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:500]


def _function(place: str) -> Any:
    """Return the function FILE.py:NAME or module:NAME. Raises OwnCodeError."""
    module, _, name = place.rpartition(":")
    if not names_a_file(module):
        importlib.invalidate_caches()
    return find(module, name)
