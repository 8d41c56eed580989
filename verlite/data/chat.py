"""Chat messages from the columns of other data sets."""

import json
import re
from collections.abc import Iterator
from typing import Any

ROLES = ("system", "user", "assistant", "tool", "developer")
CHATML = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>|\Z)", re.DOTALL)

Message = dict[str, str]


def messages(value: Any, template: str | None = None) -> list[Message]:
    """Return the messages in a column's value.

    Args:
        value: a list of messages {role, content}, the same as JSON text, chatml text, or plain
            text, which becomes a user's message.
        template: format of plain text, with {} for the text.

    Raises:
        ValueError: the value is none of these, or empty.
    """
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            decoded = json.loads(value)
        except (json.JSONDecodeError, RecursionError):
            decoded = None  # text that begins with a bracket
        # A list of something else is text, such as [1, 2].
        if isinstance(decoded, list) and any(isinstance(entry, dict) for entry in decoded):
            value = decoded
    if isinstance(value, str):
        chatml = [{"role": role, "content": text} for role, text in CHATML.findall(value)]
        if chatml:
            return [message for message in chatml if message["content"]]
        if not value.strip():
            raise ValueError("the prompt is empty")
        return [{"role": "user", "content": template.replace("{}", value) if template else value}]
    if not isinstance(value, list) or not value:
        raise ValueError(f"the prompt must be messages or text, not {type(value).__name__}")
    return list(_checked(value))


def _checked(value: list[Any]) -> Iterator[Message]:
    for number, message in enumerate(value):
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise ValueError(f"message {number} is not {{role, content}}: {str(message)[:80]}")
        if message["role"] not in ROLES or not isinstance(message["content"], str):
            raise ValueError(f"message {number} has role {message['role']!r}: {str(message)[:80]}")
        yield {"role": message["role"], "content": message["content"]}
