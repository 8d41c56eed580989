"""Convert chat messages to prompt tokens. Prompts are built, and measured, only here."""

from collections.abc import Mapping, Sequence
from typing import Any

from verlite.chat_template import limited

TRUNCATIONS = ("error", "left", "right", "middle")


class PromptTooLong(ValueError):
    """A prompt has more tokens than are allowed, and truncation is `error`."""

    def __init__(self, length: int, limit: int) -> None:
        super().__init__(f"the prompt has {length} tokens, {limit} are allowed")
        self.length = length
        self.limit = limit


def build_prompt(
    tokenizer: Any,
    messages: Sequence[Mapping[str, str]],
    *,
    max_length: int | None = None,
    truncation: str = "error",
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Return the token ids of a prompt, at most `max_length` of them (None: no limit).

    With a chat template, the prompt is the template with its generation prompt, and the template
    writes all special tokens. Without one (base models), it is the contents of the messages joined
    by newlines, with the special tokens that the tokenizer adds to any text.

    Raises:
        PromptTooLong: there are too many tokens and truncation is `error`. See `truncate` for the
            other modes.
        TemplateLimit: the chat template takes too much time or memory. It may raise anything else.
    """
    if tokenizer.chat_template is not None:
        with limited(tokenizer):
            ids = tokenizer.apply_chat_template(
                list(messages),
                add_generation_prompt=True,
                return_dict=False,
                **(template_kwargs or {}),
            )
    else:
        ids = tokenizer.encode("\n".join(message["content"] for message in messages))
    return ids if max_length is None else truncate(ids, max_length, truncation)


def build_prompts(
    tokenizer: Any,
    conversations: Sequence[Sequence[Mapping[str, str]]],
    *,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[list[int]]:
    """Run `build_prompt` on many conversations. A fast tokenizer encodes them on all cores."""
    if not conversations:
        return []
    if tokenizer.chat_template is None:
        return tokenizer(
            ["\n".join(message["content"] for message in messages) for messages in conversations]
        )["input_ids"]
    options = {"add_generation_prompt": True, "tokenize": False} | dict(template_kwargs or {})
    texts = []
    for messages in conversations:
        with limited(tokenizer):
            texts.append(tokenizer.apply_chat_template(list(messages), **options))
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


def truncate(ids: list[int], max_length: int, truncation: str) -> list[int]:
    """Return at most `max_length` of the ids.

    `left` keeps the end and `right` keeps the start. `middle` keeps max_length // 2 ids of the
    start and the rest from the end, as verl does. `error` raises PromptTooLong.
    """
    if truncation not in TRUNCATIONS:
        raise ValueError(f"data.truncation={truncation!r} is not one of {', '.join(TRUNCATIONS)}")
    if len(ids) <= max_length:
        return ids
    if truncation == "left":
        return ids[-max_length:]
    if truncation == "right":
        return ids[:max_length]
    if truncation == "middle":
        start = max_length // 2
        return ids[:start] + ids[start - max_length :]
    raise PromptTooLong(len(ids), max_length)
