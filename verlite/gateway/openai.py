"""OpenAI's chat completions and completions as JSON values: requests in, answers out.

Of vLLM's additions `return_token_ids` and `chat_template_kwargs` are read. Temperature, top_p,
top_k and seed of a request have no effect: the run decides them, because the trainer must know the
distribution that tokens were drawn from.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from verlite.envs.calculator import CALL
from verlite.files import parse_foreign_json
from verlite.gateway.conversation import Node

ROLES = ("system", "developer", "user", "assistant", "tool")
MODEL = "policy"
"""Name of the model. Requests may call it anything."""
MAX_CHOICES = 64
"""Largest `n` of a request."""

Json = dict[str, Any]


class Refused(ValueError):
    """A request that cannot be answered. The message names the field, the value and the rule."""

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
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

    @property
    def keys(self) -> list[str]:
        """Texts that are equal for equal conversations: of all that the prompt depends on beside
        the messages, then of each message. () for a prompt that is not a chat."""
        if not self.messages:
            return []
        return [_canonical([self.tools, self.template_kwargs]), *map(_canonical, self.messages)]


@dataclass(frozen=True)
class Choice:
    """One answer as the program sees it."""

    node: Node
    text: str
    """Without special tokens and stop strings."""
    tokens: list[str]
    """Text of each sampled token, if the request asks for log-probs."""
    finish_reason: str
    """stop, length or tool_calls."""
    content: str
    """The text in front of tool calls."""
    calls: list[Json]
    """Tool calls as `tool_calls` of a message."""

    @property
    def message(self) -> Json:
        """The assistant's message."""
        message: Json = {"role": "assistant", "content": self.content or None}
        return message | ({"tool_calls": self.calls} if self.calls else {"content": self.content})

    @property
    def key(self) -> str:
        """The message's entry of `Asked.keys`, once it is part of a request."""
        return _canonical(_message(self.message, "the answer"))


# Requests


def read_chat(body: Json) -> Asked:
    """Read the body of a request for chat completions. Raises Refused."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refused(f"messages={messages!r:.80} must be a list with at least one message")
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Refused(f"tools={tools!r:.80} must be a list of objects")
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise Refused(f"tool_choice={choice!r:.80} must be auto or none: the model decides freely")
    form = body.get("response_format")
    if form not in (None, {"type": "text"}):
        raise Refused(f"response_format={form!r:.80} must be text: the model writes freely")
    options = _object(body, "chat_template_kwargs")
    for name in ("chat_template", "tools"):
        if name in options:
            raise Refused(f"chat_template_kwargs.{name} is not an option of the run's template")
    return Asked(
        messages=[_message(message, f"messages[{i}]") for i, message in enumerate(messages)],
        tools=tools if choice != "none" else [],
        template_kwargs=options,
        **_common(body, "max_completion_tokens", "max_tokens"),
    )


def read_completion(body: Json) -> Asked:
    """Read the body of a request for completions. Raises Refused."""
    prompt = body.get("prompt")
    is_ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    if not prompt or not (is_ids or isinstance(prompt, str)):
        raise Refused(f"prompt={prompt!r:.80} must be one text, or one list of token ids")
    for name in ("echo", "suffix"):
        if body.get(name):
            raise Refused(f"{name}={body[name]!r:.80} is not supported")
    asked = _common({"max_tokens": 16} | body, "max_tokens")
    return Asked(messages=[], prompt=prompt, **asked)


def _common(body: Json, *limits: str) -> dict[str, Any]:
    """Return the fields that both kinds of requests have. `limits`: names of max_tokens."""
    for name in ("frequency_penalty", "presence_penalty", "logit_bias", "top_logprobs"):
        if body.get(name):
            raise Refused(f"{name}={body[name]!r:.80} is not supported; leave it out, or use 0")
    stop = body.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
        raise Refused(f"stop={stop!r:.80} must be a text, or a list of texts")
    n = _integer(body, "n") or 1
    if n > MAX_CHOICES:
        raise Refused(f"n={n} must be at most {MAX_CHOICES}")
    asked = [_integer(body, name) for name in limits]
    return {
        "max_tokens": next((value for value in asked if value is not None), None),
        "stop": tuple(stop),
        "n": n,
        "stream": bool(body.get("stream")),
        "include_usage": bool(_object(body, "stream_options").get("include_usage")),
        # Completions give a number, of which 0 asks for the sampled tokens' own log-probs.
        "logprobs": body.get("logprobs") is not None and body["logprobs"] is not False,
        "return_token_ids": bool(body.get("return_token_ids")),
    }


def _integer(body: Json, name: str) -> int | None:
    value = body.get(name)
    if value is not None and (type(value) is not int or value < 1):
        raise Refused(f"{name}={value!r:.80} must be a number of at least 1")
    return value


def _object(body: Json, name: str) -> Json:
    value = body.get(name) or {}
    if not isinstance(value, dict):
        raise Refused(f"{name}={value!r:.80} must be an object")
    return value


def _message(message: Any, where: str) -> Json:
    """Return what the chat template gets of a message, with the same entries for equal ones.

    Texts in parts are joined, and arguments of tool calls become objects.
    """
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise Refused(f"{where} must be an object whose role is one of {', '.join(ROLES)}")
    role = "system" if message["role"] == "developer" else message["role"]
    found: Json = {"role": role, "content": _text(message.get("content"), where)}
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise Refused(f"{where}.tool_calls={calls!r:.80} must be a list")
    if calls:
        found["tool_calls"] = [_call(call, where) for call in calls]
    for name in ("tool_call_id", "name"):
        if message.get(name) is not None:
            found[name] = message[name]
    return found


def _text(content: Any, where: str) -> str:
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


def choice(node: Node, text: str, tokens: list[str], finish_reason: str, has_tools: bool) -> Choice:
    """Return an answer as the program sees it.

    Tool calls are <tool_call>{"name": ..., "arguments": {...}}</tool_call>, as Qwen and Hermes
    write them. If one of them cannot be read, the whole text is the content.
    """
    content, calls = text, []
    if has_tools:
        # Text after the last closing tag is left out, so the regex takes linear time.
        end = text.rfind("</tool_call>") + len("</tool_call>")
        calls = _calls(CALL.findall(text[:end]), node.number)
        content = text.partition("<tool_call>")[0] if calls else text
    reason = "tool_calls" if calls else finish_reason
    return Choice(node, text, tokens, reason, content, calls)


def _calls(texts: Sequence[str], number: int) -> list[Json]:
    """Return tool calls in OpenAI's form; [] if one of them is malformed.

    Their ids differ between the requests of a session, so equal calls of two answers are told
    apart when they come back.
    """
    calls = []
    for i, text in enumerate(texts):
        try:
            read = parse_foreign_json(text.encode())
        except ValueError:
            return []
        if not isinstance(read, dict) or not isinstance(read.get("name"), str):
            return []
        if not isinstance(read.get("arguments", {}), dict):
            return []
        function = {"name": read["name"], "arguments": json.dumps(read.get("arguments", {}))}
        calls.append({"id": f"call_{number}_{i}", "type": "function", "function": function})
    return calls


def write(asked: Asked, choices: Sequence[Choice], created: int) -> Json:
    """Return the answer to a request that is not a stream. created: seconds since 1970."""
    kind = "chat.completion" if asked.messages else "text_completion"
    written = [_write_choice(asked, index, choice) for index, choice in enumerate(choices)]
    return _envelope(kind, choices, created) | {
        "choices": written,
        "usage": _usage(choices),
        **_prompt_ids(asked, choices),
    }


def events(asked: Asked, choices: Sequence[Choice], created: int) -> Iterator[str]:
    """Yield the events of a stream. The answer is complete: each choice is one piece."""
    kind = "chat.completion.chunk" if asked.messages else "text_completion"
    envelope = _envelope(kind, choices, created)
    for index, choice in enumerate(choices):
        whole = _write_choice(asked, index, choice)
        end = {"index": index, "finish_reason": whole.pop("finish_reason"), "logprobs": None}
        if asked.messages:
            calls = [{"index": i, **call} for i, call in enumerate(choice.calls)]
            delta = whole.pop("message") | ({"tool_calls": calls} if calls else {})
            pieces = [whole | {"delta": delta, "finish_reason": None}, end | {"delta": {}}]
        else:
            pieces = [whole | {"finish_reason": None}, end | {"text": ""}]
        for piece in pieces:
            yield _event(envelope | {"choices": [piece]} | _prompt_ids(asked, choices))
    if asked.include_usage:
        yield _event(envelope | {"choices": [], "usage": _usage(choices)})
    yield "data: [DONE]\n\n"


def _event(value: Json) -> str:
    return f"data: {json.dumps(value)}\n\n"


def _envelope(kind: str, choices: Sequence[Choice], created: int) -> Json:
    name = f"{kind.partition('.')[0]}-{choices[0].node.number}"
    return {"id": name, "object": kind, "created": created, "model": MODEL}


def _write_choice(asked: Asked, index: int, choice: Choice) -> Json:
    node = choice.node
    written: Json = {"index": index, "finish_reason": choice.finish_reason, "logprobs": None}
    if asked.messages:
        written["message"] = choice.message
        if asked.logprobs:
            written["logprobs"] = {
                "content": [
                    {"token": text, "logprob": value, "bytes": None, "top_logprobs": []}
                    for text, value in zip(choice.tokens, node.log_probs, strict=True)
                ]
            }
    else:
        written["text"] = choice.text
        if asked.logprobs:
            written["logprobs"] = {
                "tokens": choice.tokens,
                "token_logprobs": node.log_probs,
                "top_logprobs": None,
                "text_offset": [0, *accumulate(map(len, choice.tokens))][:-1],
            }
    return written | ({"token_ids": node.sampled} if asked.return_token_ids else {})


def _prompt_ids(asked: Asked, choices: Sequence[Choice]) -> Json:
    return {"prompt_token_ids": choices[0].node.prompt} if asked.return_token_ids else {}


def _usage(choices: Sequence[Choice]) -> Json:
    prompt = len(choices[0].node.prompt)
    written = sum(len(choice.node.sampled) for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
    }


def write_models(longest: int) -> Json:
    """Return the list of models. longest: tokens of a context."""
    model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "verlite"}
    return {"object": "list", "data": [model | {"max_model_len": longest}]}


def write_error(message: str, status: int, code: str | None = None) -> Mapping[str, Any]:
    """Return an error as OpenAI's clients read it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
