"""Encode observations as tool messages of a chat template.

The conversation is never rendered again, so the sampled token ids stay as they are. The text that
the template writes between two turns of the assistant is taken from a made-up conversation and
appended.
"""

from collections.abc import Callable, Mapping
from typing import Any

from verlite.chat_template import limited
from verlite.envs.step import EncodeObservation, Step

# Markers for the made-up conversation. No template contains them.
_ASSISTANT_TEXT = "gizmo assistant words"
_TOOL_TEXT = "gizmo tool words"
_ASSISTANT_THOUGHT = f"<think>\ngizmo thoughts\n</think>\n\n{_ASSISTANT_TEXT}"


class TemplateError(ValueError):
    """A chat template cannot be continued by appending text."""


def encode_chat(
    tokenizer: Any,
    tools: tuple[dict[str, Any], ...] = (),
    template_kwargs: Mapping[str, Any] | None = None,
) -> EncodeObservation:
    """Return an encoder of observations as tool messages of the tokenizer's chat template.

    Args:
        tokenizer: a tokenizer with a chat template.
        tools: JSON schemas of the tools.
        template_kwargs: data.apply_chat_template_kwargs.

    Raises:
        TemplateError: the template leaves out tool messages, or writes earlier messages differently
            after a tool message. Then training would see other contexts than the model did.
    """
    between = _text_between_turns(tokenizer, tools, template_kwargs or {})
    before, _, after = between(_TOOL_TEXT).partition(_TOOL_TEXT)
    special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    added_ids = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}

    def encode(text: str, as_text: bool = False) -> list[int]:
        ids: list[int] = tokenizer.encode(
            text, add_special_tokens=False, split_special_tokens=as_text
        )
        return ids

    def observation(step: Step, context: list[int], limit: int) -> tuple[list[int], bool]:
        """Encode a step. Only the tool's words are truncated.

        The end of the model's turn is added if the model did not write it itself.
        """
        words = step.before + step.obs + step.after
        written = between(words)
        ids = encode(written)
        has_ended = context[-1:] == ids[:1] and context[-1] in added_ids
        if len(ids) - has_ended <= limit and not any(token in words for token in special):
            return ids[has_ended:], False
        # The body is taken as the template writes it: stripped, or as a JSON string. Special tokens
        # in it are encoded as text, even if they look like the end of a turn.
        body = encode(written.removeprefix(before).removesuffix(after), as_text=True)
        head = encode(before)[has_ended:]
        tail = encode(after)
        room = limit - len(head) - len(tail)
        if room < 1:
            raise ValueError(
                f"data.max_obs_length={limit} is too small for a tool message: "
                f"the chat template itself needs {len(head) + len(tail)} tokens"
            )
        return head + body[:room] + tail, len(body) > room

    return observation


def _text_between_turns(
    tokenizer: Any, tools: tuple[dict[str, Any], ...], template_kwargs: Mapping[str, Any]
) -> Callable[[str], str]:
    """Return a function from a tool's answer to the text between two turns of the assistant.

    The text begins after the assistant's words, contains the tool message, and ends where the next
    turn of the assistant begins.
    """
    if not tokenizer.chat_template:
        raise TemplateError(
            "the tokenizer has no chat template, which tool messages need: "
            "set model.custom_chat_template"
        )
    options = {"tools": list(tools)} if tools else {}
    options |= template_kwargs

    def render(*turns: tuple[str, str]) -> str:
        messages = [{"role": "user", "content": "gizmo user words"}]
        for assistant, tool in turns:
            messages.append({"role": "assistant", "content": assistant})
            messages.append({"role": "tool", "content": tool})
        try:
            with limited(tokenizer, memory=False):  # engines of this process use the GPU
                text = tokenizer.apply_chat_template(
                    messages, add_generation_prompt=True, tokenize=False, **options
                )
        except Exception as error:  # templates may raise anything
            raise TemplateError(
                f"the chat template cannot render a tool message: {type(error).__name__}: {error}"
            ) from error
        return str(text)

    def between(answer: str) -> str:
        return render((_ASSISTANT_TEXT, answer)).partition(_ASSISTANT_TEXT)[2]

    if _TOOL_TEXT not in between(_TOOL_TEXT):
        raise TemplateError("the chat template leaves out the assistant's or the tool's message")
    for assistant in (_ASSISTANT_TEXT, _ASSISTANT_THOUGHT):
        appended = render()
        for turns in (1, 2):
            appended += assistant + between(_TOOL_TEXT)
            written = render(*[(assistant, _TOOL_TEXT)] * turns)
            if written != appended:
                raise TemplateError(
                    "the chat template writes earlier messages differently after a tool message, "
                    "so turns cannot be appended:\n"
                    f"  appended:    {appended!r}\n  by template: {written!r}"
                )
    return between
