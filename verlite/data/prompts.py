"""From chat messages to prompt tokens: the one function that builds prompts, and therefore the one that measures them."""

from collections.abc import Mapping, Sequence
from typing import Any

TRUNCATIONS = ("error", "left", "right", "middle")


class PromptTooLong(ValueError):
    """A prompt has more tokens than are allowed, and truncation is `error`."""

    def __init__(self, length: int, limit: int) -> None:
        super().__init__(f"the prompt has {length} tokens, {limit} are allowed")
        self.length, self.limit = length, limit


def build_prompt(
    tokenizer: Any,
    messages: Sequence[Mapping[str, str]],
    *,
    max_length: int | None = None,
    truncation: str = "error",
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids that a model is prompted with, at most `max_length` of them (None: no limit).

    With a chat template: the template with its generation prompt; the template writes every special token itself.
    Without one (base models): the messages' contents joined by newlines, encoded with the special tokens that the
    tokenizer puts around any text.

    Raises PromptTooLong when there are too many tokens and truncation is `error`. The other modes are in `truncate`.
    """
    if tokenizer.chat_template is not None:
        ids = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, return_dict=False, **(template_kwargs or {})
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
    """`build_prompt` of many conversations, which a fast tokenizer encodes on all cores."""
    if not conversations:
        return []
    if tokenizer.chat_template is None:
        return tokenizer(
            ["\n".join(message["content"] for message in messages) for messages in conversations]
        )["input_ids"]
    options = {"add_generation_prompt": True, "return_dict": False} | dict(template_kwargs or {})
    return tokenizer.apply_chat_template([list(messages) for messages in conversations], **options)


def truncate(ids: list[int], max_length: int, truncation: str) -> list[int]:
    """At most `max_length` of the ids: `left` keeps the end, `right` the start, `middle` both ends, `error` raises PromptTooLong.

    `middle` keeps max_length // 2 ids of the start and the rest of the end, as verl does.
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
