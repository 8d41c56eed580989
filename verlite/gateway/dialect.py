"""What all dialects of the gateway share: a request as `Asked`, an answer as `Choice`.

A dialect is a file with functions that read a request's body and write its answer, whole and as a
stream. Each reads into the messages and tools of OpenAI's chat completions, which chat templates
take. So a conversation has the same tokens in every dialect, and may change it between requests.

Temperature, top_p, top_k and seed of a request have no effect: the run decides them, because the
trainer must know the distribution that tokens were drawn from.
"""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import HTTPException

from verlite.envs.calculator import CALL
from verlite.files import parse_foreign_json
from verlite.gateway.conversation import Node
from verlite.rollout.types import Completion

ROLES = ("system", "developer", "user", "assistant", "tool")
MODEL = "policy"
"""Name of the model. Requests may call it anything."""
_TAG = "<tool_call>"
MAX_CHOICES = 64
"""Largest `n` of a request."""
NO_EFFECT = (
    *("model", "temperature", "top_p", "top_k", "min_p", "seed"),
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    *("parallel_tool_calls", "cache_control", "cache_salt", "priority"),
)
"""Fields of requests that change nothing, in any dialect."""

Json = dict[str, Any]
Said = Mapping[int, list[Json]]
"""Messages up to each answer that requests can name, and its own, by its node's number."""


class Refused(HTTPException):
    """A request that cannot be answered. The message names the field, the value and the rule."""

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(400, message)
        self.code = code
        """OpenAI's name of the error, where it has one."""


@dataclass(frozen=True)
class Asked:
    """What a request asks for."""

    messages: list[Json]
    """As the chat template gets them. []: the prompt is given as text or tokens."""
    prompt: str | list[int] = ""
    tools: list[Json] = field(default_factory=list)
    template_kwargs: Json = field(default_factory=dict)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    """A stream ends with the number of tokens."""
    logprobs: bool = False
    return_token_ids: bool = False
    continues: int | None = None
    """Number of the node that it continues, if it names one."""
    instructions: int = 0
    """How many of the first messages are only for this answer."""
    store: bool = False
    """Later requests can name its answer."""
    ignored: tuple[str, ...] = ()
    """Its fields that have a value and no effect, beside NO_EFFECT."""

    @property
    def keys(self) -> list[str]:
        """Texts that are equal for equal conversations: of all that the prompt depends on beside
        the messages, then of each message. () for a prompt that is not a chat."""
        if not self.messages:
            return []
        return [_canonical([self.tools, self.template_kwargs]), *map(_canonical, self.messages)]


@dataclass(frozen=True)
class Choice:
    """One answer as the program sees it, or the beginning of it."""

    node: Node
    ids: list[int]
    """Sampled tokens."""
    log_probs: list[float]
    """Of each of them."""
    text: str
    """Without special tokens and stop strings."""
    tokens: list[str]
    """Text of each sampled token, if the request asks for log-probs."""
    finish_reason: str
    """stop, length or tool_calls; "": it is not complete."""
    stopped_by: str | None
    """The stop string that ended it."""
    content: str
    """The text in front of tool calls."""
    calls: list[Json]
    """Tool calls as `tool_calls` of a message."""

    def after(self, before: "Choice | None") -> "Choice":
        """Return what is new in it since it was `before`."""
        if before is None:
            return self
        count = len(before.ids)
        return replace(
            self,
            ids=self.ids[count:],
            log_probs=self.log_probs[count:],
            tokens=self.tokens[count:],
            text=self.text[len(before.text) :],
            content=self.content[len(before.content) :],
        )

    @property
    def message(self) -> Json:
        """The assistant's message."""
        message: Json = {"role": "assistant", "content": self.content or None}
        return message | ({"tool_calls": self.calls} if self.calls else {"content": self.content})

    @property
    def as_read(self) -> Json:
        """The message, once it is part of a request."""
        return read_message(self.message, "the answer")[0]

    @property
    def key(self) -> str:
        """The message's entry of `Asked.keys`."""
        return _canonical(self.as_read)


@dataclass(frozen=True)
class Dialect:
    """A kind of request.

    read: the body, and what earlier answers can be named. Raises Refused.
    write: the answer to a request that is not a stream. The last argument: seconds since 1970.
    events: of a stream, given each choice as it grows, with its number. At the end all are whole.
    error: a message, the HTTP status and OpenAI's code, as the dialect's clients read it.
    """

    read: Callable[[Json, Said], Asked]
    write: Callable[[Asked, Sequence[Choice], int], Json]
    events: Callable[[Asked, AsyncIterator[tuple[int, Choice]], int], AsyncGenerator[str]]
    error: Callable[[str, int, str | None], Json]


# Requests


def ignored(body: Json, fields: Sequence[str], where: str = "") -> tuple[str, ...]:
    """Return the names of fields with a value that are neither read nor in NO_EFFECT."""
    known = {*fields, *NO_EFFECT}
    return tuple(where + name for name in body if name not in known and body[name])


def refuse(body: Json, names: Sequence[str]) -> None:
    """Raise Refused if a field has a value that cannot be honored."""
    for name in names:
        if body.get(name):
            raise Refused(f"{name}={body[name]!r:.80} is not supported; leave it out")


def read_tools(body: Json) -> list[Json]:
    """Return `tools`, [] if the model may not call them (`tool_choice`). Raises Refused."""
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Refused(f"tools={tools!r:.80} must be a list of objects")
    choice = body.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind not in (None, "auto", "none"):
        raise Refused(f"tool_choice={choice!r:.80} must be auto or none: the model decides freely")
    return tools if kind != "none" else []


def read_stop(body: Json, name: str) -> tuple[str, ...]:
    """Return stop strings, given as one or as a list. Raises Refused."""
    stop = body.get(name) or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
        raise Refused(f"{name}={stop!r:.80} must be a text, or a list of texts")
    return tuple(stop)


def read_integer(body: Json, name: str) -> int | None:
    """Return a number of at least 1, or None. Raises Refused."""
    value = body.get(name)
    if value is not None and (type(value) is not int or value < 1):
        raise Refused(f"{name}={value!r:.80} must be a number of at least 1")
    return value


def read_object(body: Json, name: str) -> Json:
    """Return an object, {} if it is left out. Raises Refused."""
    value = body.get(name) or {}
    if not isinstance(value, dict):
        raise Refused(f"{name}={value!r:.80} must be an object")
    return value


def read_list(body: Json, name: str) -> list[Any]:
    """Return a list with at least one value. Raises Refused."""
    value = body.get(name)
    if not isinstance(value, list) or not value:
        raise Refused(f"{name}={value!r:.80} must be a list with at least one message")
    return value


def read_message(message: Any, where: str) -> tuple[Json, tuple[str, ...]]:
    """Return what the chat template gets of a message, with the same entries for equal ones, and
    the fields that it does not get. Raises Refused.

    Texts in parts are joined, and arguments of tool calls become objects.
    """
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise Refused(f"{where} must be an object whose role is one of {', '.join(ROLES)}")
    role = "system" if message["role"] == "developer" else message["role"]
    found: Json = {"role": role, "content": read_text(message.get("content"), where)}
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise Refused(f"{where}.tool_calls={calls!r:.80} must be a list")
    if calls:
        found["tool_calls"] = [_call(call, where) for call in calls]
    passed = ("tool_call_id", "name", "reasoning_content")
    found |= {name: message[name] for name in passed if message.get(name) is not None}
    return found, ignored(message, ("role", "content", "tool_calls", *passed), "messages[].")


def read_text(content: Any, where: str) -> str:
    """Return a text, given as one or in parts with the field `text`. Raises Refused."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise Refused(f"{where}.content must be a text, or a list of parts with the type text")
    return "".join(map(str, texts))


def _call(call: Any, where: str) -> Json:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refused(f"{where}.tool_calls must be objects with a function, which has a name")
    arguments = function.get("arguments")
    try:  # chat templates expect an object
        read = arguments
        if isinstance(arguments, str):
            read = parse_foreign_json(arguments.encode())
    except ValueError:
        read = arguments
    return {
        "id": call.get("id"),
        "type": "function",
        "function": {"name": function["name"], "arguments": read},
    }


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


# Answers


class GrowingText:
    """The text of an answer while it grows. Only the newest tokens are decoded each time."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._text = ""  # of the first `_end` tokens: whole characters
        self._begin = self._end = 0

    def of(self, ids: Sequence[int]) -> str:
        """Return the text of all tokens so far. ids: those of the last call, and new ones."""
        if len(ids) == self._end:
            return self._text
        # Decoded after those before them: some tokenizers leave out the space in front of the
        # first one.
        known, text = self._decode(ids[self._begin : self._end]), self._decode(ids[self._begin :])
        whole = self._text + text[len(known) :]
        if len(text) > len(known) and not text.endswith("\ufffd"):
            self._text, self._begin, self._end = whole, self._end, len(ids)
        return whole


def choice(
    asked: Asked,
    node: Node,
    completion: Completion,
    text: str,
    tokens: list[str],
    stop: Sequence[str],
) -> Choice:
    """Return an answer, or its beginning, as the program sees it.

    Tool calls are <tool_call>{"name": ..., "arguments": {...}}</tool_call>, as Qwen and Hermes
    write them. If one of them cannot be read, the whole text is the content.

    Args:
        text: of its tokens, without special ones.
        tokens: text of each token, if the request asks for log-probs.
        stop: the request's stop strings, and the run's.
    """
    places = [(text.index(string), string) for string in stop if string in text]
    end, stopped_by = min(places, default=(None, None))
    text, reason, calls = text[:end], completion.finish_reason, []
    if not reason:
        text = _settled(text, (*stop, *([_TAG] if asked.tools else ())))
    elif asked.tools:
        # Text after the last closing tag is left out, so the regex takes linear time.
        closed = text.rfind("</tool_call>") + len("</tool_call>")
        calls = _calls(CALL.findall(text[:closed]), node.number)
    return Choice(
        node=node,
        ids=completion.ids,
        log_probs=completion.log_probs,
        text=text,
        tokens=tokens,
        finish_reason="tool_calls" if calls else reason,
        stopped_by=stopped_by if stopped_by in asked.stop else None,
        content=text.partition(_TAG)[0] if calls else text,
        calls=calls,
    )


def _settled(text: str, ends: Sequence[str]) -> str:
    """Return the beginning of an unfinished text that stays as it is, whatever follows: without the
    bytes of a character that is not complete, and without what may be the beginning of one of
    `ends`."""
    text = text.rstrip("\ufffd")
    for end in ends:
        text, is_whole, _ = text.partition(end)
        if not is_whole:
            begun = (n for n in range(1, len(end)) if text.endswith(end[:n]))
            text = text[: len(text) - max(begun, default=0)]
    return text


def _calls(texts: Sequence[str], number: int) -> list[Json]:
    """Return tool calls in OpenAI's form; [] if one of them is malformed.

    Their ids differ between the requests of a session, so equal calls of two answers are told
    apart when they come back.
    """
    calls = []
    for i, text in enumerate(texts):
        try:
            read = parse_foreign_json(text.encode())
            # NaN, and lone surrogates: clients cannot send them back.
            json.dumps(read, allow_nan=False, ensure_ascii=False).encode()
        except ValueError:
            return []
        if not isinstance(read, dict) or not isinstance(read.get("name"), str):
            return []
        if not isinstance(read.get("arguments", {}), dict):
            return []
        function = {"name": read["name"], "arguments": json.dumps(read.get("arguments", {}))}
        calls.append({"id": f"call_{number}_{i}", "type": "function", "function": function})
    return calls


def token_ids(asked: Asked, choice: Choice) -> Json:
    """Return the tokens of a request and its answer, if it asks for them."""
    if not asked.return_token_ids:
        return {}
    return {"prompt_token_ids": choice.node.prompt, "token_ids": choice.ids}


def event(value: Json, name: str = "") -> str:
    """Return an event of a stream."""
    return (f"event: {name}\n" if name else "") + f"data: {json.dumps(value)}\n\n"
