"""OpenAI's responses. Of an answer, text in front of tool calls is an item, and each call is one.

`previous_response_id` names an answer of the same session, whose request was not sent with
store=false. The new request continues it, also where another one has the same text. As OpenAI
says, `instructions` are only for one answer.
"""

import itertools
import re
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

from verlite.gateway import dialect
from verlite.gateway.dialect import Asked, Choice, Dialect, Json, Refused, Said
from verlite.gateway.openai import write_error

_FIELDS = (
    *("input", "instructions", "previous_response_id", "tools", "tool_choice"),
    *("max_output_tokens", "stream", "text", "return_token_ids"),
)
_TEXT, _ARGUMENTS = "response.output_text", "response.function_call_arguments"
_ITEMS = {  # what is read of each
    "message": ("type", "role", "content", "id", "status"),
    "function_call": ("type", "id", "status", "call_id", "name", "arguments"),
    "function_call_output": ("type", "id", "status", "call_id", "output"),
}


def read(body: Json, said: Said) -> Asked:
    """Read the body of a request. Raises Refused."""
    names: list[str] = []
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else None
    new = _messages(items or dialect.read_list(body, "input"), names)
    named = body.get("previous_response_id")
    continues = next((number for number in said if _id(number) == named), None)
    if named is not None and continues is None:
        raise Refused(
            f"previous_response_id={named!r:.80} must be the id of a response of this session, "
            "whose request has not store=false"
        )
    before = said[continues] if continues is not None else []
    first = []
    if body.get("instructions"):
        text = dialect.read_text(body["instructions"], "instructions")
        first.append({"role": "system", "content": text})
    dialect.refuse(body, ("background", "conversation", "prompt", "top_logprobs"))
    form = dialect.read_object(dialect.read_object(body, "text"), "format")
    if form.get("type", "text") != "text":
        raise Refused(f"text.format={form!r:.80} must be text: the model writes freely")
    return Asked(
        messages=[*first, *before, *new],
        tools=[_tool(tool) for tool in dialect.read_tools(body)],
        max_tokens=dialect.read_integer(body, "max_output_tokens"),
        stream=bool(body.get("stream")),
        return_token_ids=bool(body.get("return_token_ids")),
        continues=continues,
        instructions=len(first),
        store=body.get("store") is not False,
        ignored=(*dialect.ignored(body, _FIELDS), *dict.fromkeys(names)),
    )


def _messages(items: Sequence[Any], names: list[str]) -> list[Json]:
    """Return items as messages of chat completions. Adds to `names` fields that are ignored.

    A call belongs to the assistant's message in front of it, unless their ids say that they are of
    different answers.
    """
    found: list[Json] = []
    last: str | None = None  # answer that the assistant's message is of
    for i, item in enumerate(items):
        where = f"input[{i}]"
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind not in tuple(_ITEMS):
            raise Refused(f"{where} must be an object of type {', '.join(_ITEMS)}")
        names += dialect.ignored(item, _ITEMS[kind], "input[].")
        if kind == "message":
            found.append({"role": item.get("role"), "content": item.get("content")})
            last = _answer_of(item.get("id"))
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            own = _answer_of(item.get("call_id"))
            is_other = last is not None and own != last
            if not found or found[-1]["role"] != "assistant" or is_other:
                found.append({"role": "assistant", "content": ""})
            last = own
            calls = found[-1].setdefault("tool_calls", [])
            calls.append({"id": item.get("call_id"), "function": function})
        else:
            text = dialect.read_text(item.get("output"), where)
            answer = {"role": "tool", "tool_call_id": item.get("call_id"), "content": text}
            found.append(answer)
    return [dialect.read_message(message, "input")[0] for message in found]


def _answer_of(name: Any) -> str | None:
    """Return the number of the answer that an item's id or a call's id names, if it is ours."""
    found = re.fullmatch(r"(?:msg|call)_(\d+)(?:_\d+)?", str(name))
    return found and found[1]


def _id(number: int) -> str:
    return f"resp_{number}"


def _tool(tool: Json) -> Json:
    if tool.get("type") != "function":
        raise Refused(f"tools has one of type {tool.get('type')!r:.80}, which no one here runs")
    names = ("name", "description", "parameters")
    function = {name: tool[name] for name in names if tool.get(name)}
    return {"type": "function", "function": function}


def write(asked: Asked, choices: Sequence[Choice], created: int) -> Json:
    """Return the answer to a request that is not a stream."""
    (choice,) = choices
    number = choice.node.number
    is_whole = choice.finish_reason != "length"
    status = "completed" if is_whole else "incomplete"
    output: list[Json] = []
    if choice.content or not choice.calls:
        text = {"type": "output_text", "text": choice.content, "annotations": [], "logprobs": []}
        message = {"id": f"msg_{number}", "type": "message", "role": "assistant"}
        output.append(message | {"status": status, "content": [text]})
    for call in choice.calls:
        item = {"id": f"fc{call['id']}", "type": "function_call", "call_id": call["id"]}
        output.append(item | {"status": "completed", **call["function"]})
    prompt, sampled = len(choice.node.prompt), len(choice.ids)
    return {
        "id": _id(number),
        "object": "response",
        "created_at": created,
        "model": dialect.MODEL,
        "status": status,
        "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
        "error": None,
        "instructions": None,
        "metadata": {},
        "output": output,
        "parallel_tool_calls": True,
        "previous_response_id": None if asked.continues is None else _id(asked.continues),
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + sampled,
        },
        **dialect.token_ids(asked, choice),
    }


async def events(
    asked: Asked, growing: AsyncIterator[tuple[int, Choice]], created: int
) -> AsyncGenerator[str]:
    """Yield the events of a stream. Text is sent as it grows; calls are sent whole, at the end."""
    numbers = itertools.count()

    def piece(kind: str, **fields: Any) -> str:
        return dialect.event({"type": kind, **fields, "sequence_number": next(numbers)}, kind)

    def opened(item: Json) -> list[str]:
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        empty = item | {"status": "in_progress", "content": []}
        return [
            piece("response.output_item.added", output_index=0, item=empty),
            piece("response.content_part.added", **_text_at(item), part=part),
        ]

    shown, is_open = "", False
    async for _, choice in growing:
        whole = write(asked, [choice], created)
        if not is_open:
            begin = whole | {"status": "in_progress", "output": [], "usage": None}
            begin["incomplete_details"] = None
            yield piece("response.created", response=begin)
            yield piece("response.in_progress", response=begin)
            is_open = True
        if choice.content[len(shown) :]:
            item = whole["output"][0]
            for one in opened(item) if not shown else ():
                yield one
            delta = choice.content[len(shown) :]
            yield piece(f"{_TEXT}.delta", **_text_at(item), delta=delta, logprobs=[])
            shown = choice.content
    for index, item in enumerate(whole["output"]):
        if item["type"] == "message":
            for one in opened(item) if not shown else ():
                yield one
            (part,) = item["content"]
            yield piece(f"{_TEXT}.done", **_text_at(item), text=part["text"], logprobs=[])
            yield piece("response.content_part.done", **_text_at(item), part=part)
        else:
            empty = item | {"status": "in_progress", "arguments": ""}
            yield piece("response.output_item.added", output_index=index, item=empty)
            at = {"item_id": item["id"], "output_index": index}
            yield piece(f"{_ARGUMENTS}.delta", **at, delta=item["arguments"])
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield piece(f"{_ARGUMENTS}.done", **at, **done)
        yield piece("response.output_item.done", output_index=index, item=item)
    yield piece(f"response.{whole['status']}", response=whole)


def _text_at(item: Json) -> Json:
    """Return the place of the text of a message, which is the first item."""
    return {"item_id": item["id"], "output_index": 0, "content_index": 0}


RESPONSES = Dialect(read, write, events, write_error)
