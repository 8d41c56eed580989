"""OpenAI's responses. Of an answer, text in front of tool calls is an item, and each call is one.

`previous_response_id` names an answer of the same session, whose request was not sent with
store=false. The new request continues it, also where another one has the same text. As OpenAI
says, `instructions` are only for one answer.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from verlite.gateway.dialect import (
    MODEL,
    Asked,
    Choice,
    Dialect,
    Json,
    Refused,
    Said,
    event,
    ignored,
    read_integer,
    read_list,
    read_message,
    read_object,
    read_text,
    read_tools,
    refuse,
    token_ids,
)
from verlite.gateway.openai import write_error

_FIELDS = (
    *("input", "instructions", "previous_response_id", "tools", "tool_choice"),
    *("max_output_tokens", "stream", "text", "return_token_ids"),
)
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
    new = _messages(items or read_list(body, "input"), names)
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
        text = read_text(body["instructions"], "instructions")
        first.append({"role": "system", "content": text})
    refuse(body, ("background", "conversation", "prompt", "top_logprobs"))
    form = read_object(read_object(body, "text"), "format")
    if form.get("type", "text") != "text":
        raise Refused(f"text.format={form!r:.80} must be text: the model writes freely")
    return Asked(
        messages=[*first, *before, *new],
        tools=[_tool(tool) for tool in read_tools(body, ("auto", "none"))],
        max_tokens=read_integer(body, "max_output_tokens"),
        stream=bool(body.get("stream")),
        return_token_ids=bool(body.get("return_token_ids")),
        continues=continues,
        instructions=len(first),
        store=body.get("store") is not False,
        ignored=(*ignored(body, _FIELDS), *dict.fromkeys(names)),
    )


def _messages(items: Sequence[Any], names: list[str]) -> list[Json]:
    """Return items as messages of chat completions. Adds to `names` fields that are ignored.

    Calls belong to the assistant's message in front of them.
    """
    found: list[Json] = []
    for i, item in enumerate(items):
        where = f"input[{i}]"
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind not in tuple(_ITEMS):
            raise Refused(f"{where} must be an object of type {', '.join(_ITEMS)}")
        names += ignored(item, _ITEMS[kind], "input[].")
        if kind == "message":
            found.append({"role": item.get("role"), "content": item.get("content")})
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            if not found or found[-1]["role"] != "assistant":
                found.append({"role": "assistant", "content": ""})
            calls = found[-1].setdefault("tool_calls", [])
            calls.append({"id": item.get("call_id"), "function": function})
        else:
            text = read_text(item.get("output"), where)
            answer = {"role": "tool", "tool_call_id": item.get("call_id"), "content": text}
            found.append(answer)
    return [read_message(message, "input")[0] for message in found]


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
    prompt, sampled = len(choice.node.prompt), len(choice.node.sampled)
    return {
        "id": _id(number),
        "object": "response",
        "created_at": created,
        "model": MODEL,
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
        **token_ids(asked, choice),
    }


def events(asked: Asked, choices: Sequence[Choice], created: int) -> Iterator[str]:
    """Yield the events of a stream. The answer is complete: each item is one piece."""
    whole = write(asked, choices, created)
    begin = whole | {"status": "in_progress", "output": [], "usage": None}
    begin["incomplete_details"] = None
    pieces: list[Json] = [
        {"type": "response.created", "response": begin},
        {"type": "response.in_progress", "response": begin},
    ]
    for index, item in enumerate(whole["output"]):
        place = {"item_id": item["id"], "output_index": index}
        if item["type"] == "message":
            empty = item | {"status": "in_progress", "content": []}
            (part,) = item["content"]
            place |= {"content_index": 0}
            text: Json = {"logprobs": []}
            inner = [
                {"type": "response.content_part.added", **place, "part": part | {"text": ""}},
                {"type": "response.output_text.delta", **place, "delta": part["text"], **text},
                {"type": "response.output_text.done", **place, "text": part["text"], **text},
                {"type": "response.content_part.done", **place, "part": part},
            ]
        else:
            empty = item | {"status": "in_progress", "arguments": ""}
            written = item["arguments"]
            kind = "response.function_call_arguments"
            done = {"name": item["name"], "arguments": written}
            inner = [
                {"type": f"{kind}.delta", **place, "delta": written},
                {"type": f"{kind}.done", **place, **done},
            ]
        at = {"output_index": index}
        pieces += [
            {"type": "response.output_item.added", **at, "item": empty},
            *inner,
            {"type": "response.output_item.done", **at, "item": item},
        ]
    pieces.append({"type": f"response.{whole['status']}", "response": whole})
    for number, piece in enumerate(pieces):
        yield event(piece | {"sequence_number": number}, piece["type"])


RESPONSES = Dialect(read, write, events, write_error)
