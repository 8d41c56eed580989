"""Anthropic's messages. Of an answer, text in front of tool calls is a block, and each call is one.

A request that ends with a message of the assistant is refused: it asks to continue a text, not to
answer.
"""

import json
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
    read_stop,
    read_text,
    read_tools,
    refuse,
    token_ids,
)

_FIELDS = (
    *("messages", "system", "tools", "tool_choice", "max_tokens", "stop_sequences", "stream"),
    *("return_token_ids", "output_config"),
)
_STOP = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_BLOCKS = {  # what is read of each
    "text": ("type", "text"),
    "tool_use": ("type", "id", "name", "input", "caller"),
    "tool_result": ("type", "tool_use_id", "content"),
}


def read(body: Json, said: Said) -> Asked:
    """Read the body of a request. Raises Refused."""
    messages: list[Json] = []
    names: list[str] = []
    if body.get("system"):
        messages.append({"role": "system", "content": read_text(body["system"], "system")})
    for i, message in enumerate(read_list(body, "messages")):
        found = _message(message, f"messages[{i}]", names)
        messages += [read_message(one, f"messages[{i}]")[0] for one in found]
    if messages[-1]["role"] == "assistant":
        raise Refused("messages ends with one of the assistant, whose text cannot be continued")
    refuse(body, ("mcp_servers", "container"))
    refuse(read_object(body, "output_config"), ("format",))
    return Asked(
        messages=messages,
        tools=[_tool(tool) for tool in read_tools(body, ("auto", "none"))],
        max_tokens=read_integer(body, "max_tokens"),
        stop=read_stop(body, "stop_sequences"),
        stream=bool(body.get("stream")),
        return_token_ids=bool(body.get("return_token_ids")),
        ignored=(*ignored(body, _FIELDS), *dict.fromkeys(names)),
    )


def _message(message: Any, where: str, names: list[str]) -> list[Json]:
    """Return a message as those of chat completions. Adds to `names` fields that are ignored."""
    roles = ("system", "user", "assistant")
    if not isinstance(message, dict) or message.get("role") not in roles:
        raise Refused(f"{where} must be an object whose role is one of {', '.join(roles)}")
    role, content = message["role"], message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list):
        raise Refused(f"{where}.content must be a text or a list of blocks")
    names += ignored(message, ("role", "content"), "messages[].")
    found: list[Json] = []
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind not in tuple(_BLOCKS) or (kind == "tool_use") > (role == "assistant"):
            raise Refused(f"{where}.content has a block of type {kind!r:.80} of {role}")
        names += ignored(block, _BLOCKS[kind], "messages[].content[].")
        if kind == "tool_result":
            text = read_text(block.get("content"), where)
            answer = {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text}
            found.append(answer)
            continue
        if not found or found[-1]["role"] != role:
            found.append({"role": role, "content": "", "tool_calls": []})
        if kind == "text":
            found[-1]["content"] += read_text([block], where)
        else:
            function = {"name": block.get("name"), "arguments": block.get("input")}
            found[-1]["tool_calls"].append({"id": block.get("id"), "function": function})
    return found or [{"role": role, "content": ""}]


def _tool(tool: Json) -> Json:
    if tool.get("type") not in (None, "custom"):
        raise Refused(f"tools has one of type {tool['type']!r:.80}, which no one here runs")
    schema = {"parameters": tool["input_schema"]} if "input_schema" in tool else {}
    texts = {name: tool[name] for name in ("name", "description") if tool.get(name)}
    return {"type": "function", "function": texts | schema}


def write(asked: Asked, choices: Sequence[Choice], created: int) -> Json:
    """Return the answer to a request that is not a stream."""
    (choice,) = choices
    blocks: list[Json] = []
    if choice.content or not choice.calls:
        blocks.append({"type": "text", "text": choice.content})
    for call in choice.calls:
        function = call["function"]
        made = {"name": function["name"], "input": json.loads(function["arguments"])}
        blocks.append({"type": "tool_use", "id": call["id"], **made})
    stopped = choice.stopped_by if choice.finish_reason == "stop" else None
    return {
        "id": f"msg_{choice.node.number}",
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": blocks,
        "stop_reason": "stop_sequence" if stopped else _STOP[choice.finish_reason],
        "stop_sequence": stopped,
        "usage": {
            "input_tokens": len(choice.node.prompt),
            "output_tokens": len(choice.node.sampled),
        },
        **token_ids(asked, choice),
    }


def events(asked: Asked, choices: Sequence[Choice], created: int) -> Iterator[str]:
    """Yield the events of a stream. The answer is complete: each block is one piece."""
    whole = write(asked, choices, created)
    end = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    begin = whole | {"content": [], "stop_reason": None, "stop_sequence": None}
    begin["usage"] = whole["usage"] | {"output_tokens": 0}
    pieces: list[Json] = [{"type": "message_start", "message": begin}]
    for index, block in enumerate(whole["content"]):
        if block["type"] == "text":
            empty: Json = block | {"text": ""}
            delta: Json = {"type": "text_delta", "text": block["text"]}
        else:
            empty = block | {"input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        place = {"index": index}
        pieces += [
            {"type": "content_block_start", **place, "content_block": empty},
            {"type": "content_block_delta", **place, "delta": delta},
            {"type": "content_block_stop", **place},
        ]
    pieces += [
        {"type": "message_delta", "delta": end, "usage": whole["usage"]},
        {"type": "message_stop"},
    ]
    for piece in pieces:
        yield event(piece, piece["type"])


def write_error(message: str, status: int, code: str | None = None) -> Json:
    """Return an error as Anthropic's clients read it."""
    kinds = {401: "authentication_error", 413: "request_too_large"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


MESSAGES = Dialect(read, write, events, write_error)
