"""Anthropic's messages. Of an answer, text in front of tool calls is a block, and each call is one.

A request that ends with a message of the assistant is refused: it asks to continue a text, not to
answer.
"""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

from verlite.gateway import dialect
from verlite.gateway.dialect import Asked, Choice, Dialect, Json, Refused, Said

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
        messages.append({"role": "system", "content": dialect.read_text(body["system"], "system")})
    for i, message in enumerate(dialect.read_list(body, "messages")):
        found = _message(message, f"messages[{i}]", names)
        messages += [dialect.read_message(one, f"messages[{i}]")[0] for one in found]
    if messages[-1]["role"] == "assistant":
        raise Refused("messages ends with one of the assistant, whose text cannot be continued")
    dialect.refuse(body, ("mcp_servers", "container"))
    dialect.refuse(dialect.read_object(body, "output_config"), ("format",))
    return Asked(
        messages=messages,
        tools=[_tool(tool) for tool in dialect.read_tools(body)],
        max_tokens=dialect.read_integer(body, "max_tokens"),
        stop=dialect.read_stop(body, "stop_sequences"),
        stream=bool(body.get("stream")),
        return_token_ids=bool(body.get("return_token_ids")),
        ignored=(*dialect.ignored(body, _FIELDS), *dict.fromkeys(names)),
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
    names += dialect.ignored(message, ("role", "content"), "messages[].")
    found: list[Json] = []
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind not in tuple(_BLOCKS) or (kind == "tool_use") > (role == "assistant"):
            raise Refused(f"{where}.content has a block of type {kind!r:.80} of {role}")
        names += dialect.ignored(block, _BLOCKS[kind], "messages[].content[].")
        if kind == "tool_result":
            text = dialect.read_text(block.get("content"), where)
            answer = {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text}
            found.append(answer)
            continue
        if not found or found[-1]["role"] != role:
            found.append({"role": role, "content": "", "tool_calls": []})
        if kind == "text":
            found[-1]["content"] += dialect.read_text([block], where)
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
        "model": dialect.MODEL,
        "content": blocks,
        "stop_reason": "stop_sequence" if stopped else _STOP.get(choice.finish_reason),
        "stop_sequence": stopped,
        "usage": {
            "input_tokens": len(choice.node.prompt),
            "output_tokens": len(choice.ids),
        },
        **dialect.token_ids(asked, choice),
    }


async def events(
    asked: Asked, growing: AsyncIterator[tuple[int, Choice]], created: int
) -> AsyncGenerator[str]:
    """Yield the events of a stream. Text is sent as it grows; calls are sent whole, at the end."""

    def piece(kind: str, **fields: Any) -> str:
        return dialect.event({"type": kind, **fields}, kind)

    shown = ""
    is_open = False
    async for _, choice in growing:
        whole = write(asked, [choice], created)
        if not is_open:
            begin = whole | {"content": [], "stop_reason": None, "stop_sequence": None}
            begin["usage"] = whole["usage"] | {"output_tokens": 0}
            yield piece("message_start", message=begin)
            is_open = True
        if choice.content[len(shown) :]:
            if not shown:
                block = {"type": "text", "text": ""}
                yield piece("content_block_start", index=0, content_block=block)
            delta = {"type": "text_delta", "text": choice.content[len(shown) :]}
            yield piece("content_block_delta", index=0, delta=delta)
            shown = choice.content
    for index, block in enumerate(whole["content"]):
        if block["type"] == "tool_use":
            empty = block | {"input": {}}
            yield piece("content_block_start", index=index, content_block=empty)
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            yield piece("content_block_delta", index=index, delta=delta)
        elif not shown:
            yield piece("content_block_start", index=index, content_block=block)
        yield piece("content_block_stop", index=index)
    end = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    yield piece("message_delta", delta=end, usage=whole["usage"])
    yield piece("message_stop")


def write_error(message: str, status: int, code: str | None = None) -> Json:
    """Return an error as Anthropic's clients read it."""
    kinds = {401: "authentication_error", 413: "request_too_large"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


MESSAGES = Dialect(read, write, events, write_error)
