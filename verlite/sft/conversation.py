"""Tokens of a conversation, and which of them the assistant wrote.

A chat template says it itself if it has {% generation %} marks. For other templates the turns are
found by prefixes: the tokens that the template writes for the messages before a turn, with its
generation prompt, are what the model reads; those of the messages up to the turn end with it.
Both must be a beginning of the whole conversation. If one of them is not, the template writes a
turn differently once others follow, and no mask of the whole conversation is right.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from verlite.chat_template import limited

Messages = Sequence[Mapping[str, Any]]
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
REMEDY = (
    "Use a chat template with {% generation %} marks around the assistant's turns "
    "(model.custom_chat_template), or write one row per assistant turn, with the messages before "
    "it as the prompt (data.prompt_key, data.response_key)"
)


def tokenize(
    tokenizer: Any,
    messages: Messages,
    tools: Sequence[Any] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[list[int], list[int]]:
    """Return the token ids of a conversation, and for each 1 if it is trained, else 0.

    Trained are the tokens between the template's generation marks. For a template without them it
    is what a model generates: the assistant's turns, each with the token that ends it, and without
    the line break that many templates write after that token.

    Raises:
        ValueError: there is no template, it refuses the messages, or it cannot be decided which
            tokens are the assistant's.
    """
    if tokenizer.chat_template is None:
        raise ValueError(
            "the tokenizer has no chat template, which conversations need. "
            "Set model.custom_chat_template"
        )
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("no message has the role assistant, so there is nothing to learn")
    options = dict(template_kwargs or {}) | {"tools": list(tools) if tools else None}
    with applying_template():
        template = tokenizer.get_chat_template(tools=options["tools"])
    if GENERATION.search(template):
        return _by_marks(tokenizer, messages, options)
    return _by_prefixes(tokenizer, messages, options)


@contextmanager
def applying_template() -> Iterator[None]:
    """Convert what a chat template raises, which may be anything, to ValueError."""
    try:
        yield
    except Exception as error:
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise ValueError(f"the chat template does not accept the messages: {text}") from error


def _by_marks(
    tokenizer: Any, messages: Messages, options: Mapping[str, Any]
) -> tuple[list[int], list[int]]:
    with applying_template(), limited(tokenizer):
        encoded = tokenizer.apply_chat_template(
            list(messages), return_dict=True, return_assistant_tokens_mask=True, **options
        )
    mask = list(encoded["assistant_masks"])
    if not any(mask):
        raise ValueError("the chat template's generation marks are around no token")
    return list(encoded["input_ids"]), mask


def _by_prefixes(
    tokenizer: Any, messages: Messages, options: Mapping[str, Any]
) -> tuple[list[int], list[int]]:
    def text_of(count: int, prompts: bool = False) -> str:
        with applying_template(), limited(tokenizer):
            text = tokenizer.apply_chat_template(
                list(messages[:count]), tokenize=False, add_generation_prompt=prompts, **options
            )
        return str(text)

    def ids_of(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    whole = text_of(len(messages))
    ids = ids_of(whole)
    special = set(tokenizer.all_special_ids)
    mask = [0] * len(ids)
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if number == 0:
            raise ValueError("the first message is the assistant's: a turn follows a prompt")
        edges = []
        for text, what in (
            (text_of(number, prompts=True), "what is before this turn"),
            (text_of(number + 1), "this turn"),
        ):
            if not whole.startswith(text):
                raise ValueError(
                    f"message {number}: the chat template writes {what} differently in the whole "
                    f"conversation, so verlite cannot tell which tokens to train. {REMEDY}"
                )
            part = ids_of(text)
            if ids[: len(part)] != part:
                content = str(message.get("content", ""))
                raise ValueError(
                    f"message {number}: a token goes over the edge of this turn. "
                    + (
                        "Remove the white space at the beginning and the end of its content"
                        if content != content.strip()
                        else f"The chat template puts white space there. {REMEDY}"
                    )
                )
            edges.append(len(part))
        first, end = edges
        ends = [i + 1 for i in range(first, end) if ids[i] in special]
        if ends and not tokenizer.decode(ids[ends[-1] : end]).strip():
            end = ends[-1]
        mask[first:end] = [1] * (end - first)
    if not any(mask):
        raise ValueError("the chat template writes nothing for the assistant's turns")
    return ids, mask
