"""OpenAI's chat completions and completions, and vLLM's generate with token ids.

Of vLLM's additions `return_token_ids` and `chat_template_kwargs` are read.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from itertools import accumulate
from typing import Any

from verlite.gateway import dialect
from verlite.gateway.dialect import Asked, Choice, Dialect, Json, Refused, Said

# Requests


def read_chat(body: Json, said: Said) -> Asked:
    """Read the body of a request for chat completions. Raises Refused."""
    messages = [
        dialect.read_message(message, f"messages[{i}]")
        for i, message in enumerate(dialect.read_list(body, "messages"))
    ]
    form = body.get("response_format")
    if form not in (None, {"type": "text"}):
        raise Refused(f"response_format={form!r:.80} must be text: the model writes freely")
    dialect.refuse(body, ("functions", "continue_final_message", "documents", "modalities"))
    options = dialect.read_object(body, "chat_template_kwargs")
    for name in ("chat_template", "tools"):
        if name in options:
            raise Refused(f"chat_template_kwargs.{name} is not an option of the run's template")
    limits = ("max_completion_tokens", "max_tokens")
    read = ("messages", "tools", "tool_choice", "response_format", "chat_template_kwargs")
    return Asked(
        messages=[message for message, _ in messages],
        tools=dialect.read_tools(body),
        template_kwargs=options,
        **_common(body, *limits),
        ignored=(
            *dialect.ignored(body, (*read, *limits, *_COMMON)),
            *dict.fromkeys(name for _, names in messages for name in names),
        ),
    )


def read_completion(body: Json, said: Said) -> Asked:
    """Read the body of a request for completions. Raises Refused."""
    prompt = body.get("prompt")
    if not (isinstance(prompt, str) and prompt):
        prompt = _tokens(prompt, "prompt={!r:.80} must be one text, or one list of token ids")
    dialect.refuse(body, ("echo", "suffix"))
    asked = _common({"max_tokens": 16} | body, "max_tokens")
    names = dialect.ignored(body, ("prompt", "max_tokens", *_COMMON))
    return Asked(messages=[], prompt=prompt, **asked, ignored=names)


def read_generate(body: Json, said: Said) -> Asked:
    """Read the body of a request for vLLM's generate: token ids in, token ids out. `verifiers`
    trains with it. Raises Refused."""
    prompt = _tokens(body.get("token_ids"), "token_ids={!r:.80} must be a list of token ids")
    dialect.refuse(body, ("features", "content_parts", "stream"))
    sampling = dialect.read_object(body, "sampling_params")
    dialect.refuse(sampling, ("ignore_eos", "min_tokens", "bad_words", "structured_outputs"))
    own = ("stop_token_ids", "skip_special_tokens", "max_tokens", "routed_experts_prompt_start")
    unused = dict.fromkeys(("logprobs", "stream", "include_usage", "return_token_ids"), False)
    return Asked(
        messages=[],
        prompt=prompt,
        **_common({"max_tokens": 16} | sampling, "max_tokens") | unused,
        ignored=(
            *dialect.ignored(body, ("token_ids", "sampling_params", "return_token_ids")),
            *dialect.ignored(sampling, (*own, "stop", "n", "logprobs"), "sampling_params."),
        ),
    )


def _tokens(value: Any, rule: str) -> list[int]:
    """Return token ids. Raises Refused."""
    if not value or not isinstance(value, list) or any(type(token) is not int for token in value):
        raise Refused(rule.format(value))
    return value


_COMMON = ("stop", "n", "stream", "stream_options", "logprobs", "return_token_ids")


def _common(body: Json, *limits: str) -> dict[str, Any]:
    """Return the fields that all kinds of requests have. `limits`: names of max_tokens."""
    for name in ("frequency_penalty", "presence_penalty", "logit_bias", "top_logprobs"):
        if body.get(name):
            raise Refused(f"{name}={body[name]!r:.80} is not supported; leave it out, or use 0")
    n = dialect.read_integer(body, "n") or 1
    if n > dialect.MAX_CHOICES:
        raise Refused(f"n={n} must be at most {dialect.MAX_CHOICES}")
    asked = [dialect.read_integer(body, name) for name in limits]
    return {
        "max_tokens": next((value for value in asked if value is not None), None),
        "stop": dialect.read_stop(body, "stop"),
        "n": n,
        "stream": bool(body.get("stream")),
        "include_usage": bool(dialect.read_object(body, "stream_options").get("include_usage")),
        # Completions give a number, of which 0 asks for the sampled tokens' own log-probs.
        "logprobs": body.get("logprobs") is not None and body["logprobs"] is not False,
        "return_token_ids": bool(body.get("return_token_ids")),
    }


# Answers


def write_generate(asked: Asked, choices: Sequence[Choice], created: int) -> Json:
    """Return the answer to a request for generate."""
    written = [
        {
            "index": index,
            "token_ids": choice.ids,
            "finish_reason": choice.finish_reason,
            "logprobs": {
                "content": [
                    # `token` for verifiers 0.4, `token_id` for clients of vLLM 0.32
                    {"token": f"token_id:{token}", "token_id": token, "logprob": value}
                    for token, value in zip(choice.ids, choice.log_probs, strict=True)
                ]
            },
        }
        for index, choice in enumerate(choices)
    ]
    return {
        "request_id": f"generate-{choices[0].node.number}",
        "choices": written,
        "prompt_token_ids": choices[0].node.prompt,
        "usage": _usage(choices),
    }


def write(asked: Asked, choices: Sequence[Choice], created: int) -> Json:
    """Return the answer to a request that is not a stream. created: seconds since 1970."""
    kind = "chat.completion" if asked.messages else "text_completion"
    written = [_write_choice(asked, index, choice) for index, choice in enumerate(choices)]
    return _envelope(kind, choices, created) | {
        "choices": written,
        "usage": _usage(choices),
        **_prompt_ids(asked, choices),
    }


async def events(
    asked: Asked, growing: AsyncIterator[tuple[int, Choice]], created: int
) -> AsyncGenerator[str]:
    """Yield the events of a stream. Text is sent as it grows; calls are sent whole, at the end."""
    kind = "chat.completion.chunk" if asked.messages else "text_completion"
    before: dict[int, Choice] = {}
    async for index, choice in growing:
        envelope = _envelope(kind, [choice], created)
        new = choice.after(before.get(index))
        piece = _write_choice(asked, index, new) | {"finish_reason": None}
        end: Json = {"index": index, "finish_reason": choice.finish_reason, "logprobs": None}
        if asked.messages:
            calls = [{"index": i, **call} for i, call in enumerate(choice.calls)]
            piece["delta"] = piece.pop("message") | ({"tool_calls": calls} if calls else {})
            end["delta"] = {}
        else:
            end["text"] = ""
        if index in before:
            piece.get("delta", {}).pop("role", None)
        else:
            envelope |= _prompt_ids(asked, [choice])
        before[index] = choice
        for one in (piece, end) if choice.finish_reason else (piece,):
            yield dialect.event(envelope | {"choices": [one]})
    if asked.include_usage:
        yield dialect.event(envelope | {"choices": [], "usage": _usage([*before.values()])})
    yield "data: [DONE]\n\n"


def _envelope(kind: str, choices: Sequence[Choice], created: int) -> Json:
    name = f"{kind.partition('.')[0]}-{choices[0].node.number}"
    return {"id": name, "object": kind, "created": created, "model": dialect.MODEL}


def _write_choice(asked: Asked, index: int, choice: Choice) -> Json:
    written: Json = {"index": index, "finish_reason": choice.finish_reason, "logprobs": None}
    if asked.messages:
        written["message"] = choice.message
        if asked.logprobs:
            written["logprobs"] = {
                "content": [
                    {"token": text, "logprob": value, "bytes": None, "top_logprobs": []}
                    for text, value in zip(choice.tokens, choice.log_probs, strict=True)
                ]
            }
    else:
        written["text"] = choice.text
        if asked.logprobs:
            written["logprobs"] = {
                "tokens": choice.tokens,
                "token_logprobs": choice.log_probs,
                "top_logprobs": None,
                "text_offset": [0, *accumulate(map(len, choice.tokens))][:-1],
            }
    return written | ({"token_ids": choice.ids} if asked.return_token_ids else {})


def _prompt_ids(asked: Asked, choices: Sequence[Choice]) -> Json:
    return {"prompt_token_ids": choices[0].node.prompt} if asked.return_token_ids else {}


def _usage(choices: Sequence[Choice]) -> Json:
    prompt = len(choices[0].node.prompt)
    written = sum(len(choice.ids) for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
    }


def write_models(longest: int) -> Json:
    """Return the list of models. longest: tokens of a context."""
    model = {"id": dialect.MODEL, "object": "model", "created": 0, "owned_by": "verlite"}
    return {"object": "list", "data": [model | {"max_model_len": longest}]}


def write_error(message: str, status: int, code: str | None = None) -> Json:
    """Return an error as OpenAI's clients read it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


CHAT = Dialect(read_chat, write, events, write_error)
COMPLETIONS = Dialect(read_completion, write, events, write_error)
GENERATE = Dialect(read_generate, write_generate, events, write_error)
