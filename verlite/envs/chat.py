"""Observations as tool messages of a chat: the tokens between what the model sampled and what it samples next.

The conversation so far is never rendered again. What the template writes after an assistant's words, when a tool answers them, is
taken from a made-up conversation and appended; the sampled ids stay as they are.
"""

from collections.abc import Callable, Mapping
from typing import Any

from verlite.envs.step import EncodeObservation, Step

_SAID, _ANSWERED = "gizmo assistant words", "gizmo tool words"  # not in any template
_THOUGHT = f"<think>\ngizmo thoughts\n</think>\n\n{_SAID}"


class TemplateError(ValueError):
    """A chat template cannot be continued by appending."""


def encode_chat(
    tokenizer: Any,
    tools: tuple[dict[str, Any], ...] = (),
    template_kwargs: Mapping[str, Any] | None = None,
) -> EncodeObservation:
    """How observations become tokens for this tokenizer's chat template; template_kwargs is data.apply_chat_template_kwargs.

    Raises TemplateError when the template has no room for a tool's message, or writes what came before in another way once a tool has
    answered: then a model would be trained on other contexts than it will see.
    """
    rest = _rest(tokenizer, tools, template_kwargs or {})
    before, _, after = rest(_ANSWERED).partition(_ANSWERED)
    control = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    never_split = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}

    def encode(text: str, as_text: bool = False) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False, split_special_tokens=as_text)

    def observation(step: Step, context: list[int], limit: int) -> tuple[list[int], bool]:
        """Only the tool's words are cut. The end of the model's turn is written where the model did not write it itself."""
        words = step.before + step.obs + step.after
        written = rest(words)
        ids = encode(written)
        ended = context[-1:] == ids[:1] and context[-1] in never_split
        if len(ids) - ended <= limit and not any(token in words for token in control):
            return ids[ended:], False
        # As the template writes them: it may have taken white space off, or made them a JSON string. What a tool says is text, even
        # where it looks like the end of a turn.
        body = encode(written.removeprefix(before).removesuffix(after), as_text=True)
        head, tail = encode(before)[ended:], encode(after)
        room = limit - len(head) - len(tail)
        if room < 1:
            raise ValueError(
                f"data.max_obs_length={limit} has no room for a tool's answer: the chat template itself needs {len(head) + len(tail)}"
            )
        return head + body[:room] + tail, len(body) > room

    return observation


def _rest(
    tokenizer: Any, tools: tuple[dict[str, Any], ...], template_kwargs: Mapping[str, Any]
) -> Callable[[str], str]:
    """What the template writes from the end of an assistant's words through a tool's answer to where the assistant speaks again."""
    if not tokenizer.chat_template:
        raise TemplateError(
            "the tokenizer has no chat template, so tools cannot answer in its format: model.custom_chat_template takes one"
        )

    def render(*turns: tuple[str, str]) -> str:
        messages = [{"role": "user", "content": "gizmo user words"}]
        for said, answered in turns:
            messages += [
                {"role": "assistant", "content": said},
                {"role": "tool", "content": answered},
            ]
        kwargs = {**({"tools": list(tools)} if tools else {}), **template_kwargs}
        try:
            return str(
                tokenizer.apply_chat_template(
                    messages, add_generation_prompt=True, tokenize=False, **kwargs
                )
            )
        except Exception as error:  # templates raise what they like
            raise TemplateError(
                f"the chat template cannot render a tool's message: {type(error).__name__}: {error}"
            ) from error

    def rest(answer: str) -> str:
        return render((_SAID, answer)).partition(_SAID)[2]

    if _ANSWERED not in rest(_ANSWERED):
        raise TemplateError("the chat template leaves out the assistant's or the tool's message")
    for said in (_SAID, _THOUGHT):
        appended = render()
        for turns in (1, 2):
            appended += said + rest(_ANSWERED)
            written = render(*[(said, _ANSWERED)] * turns)
            if written != appended:
                raise TemplateError(
                    "the chat template writes what came before differently once a tool has answered, so turns cannot be appended:\n"
                    f"  appended:    {appended!r}\n  by template: {written!r}"
                )
    return rest
