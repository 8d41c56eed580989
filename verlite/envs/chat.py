"""Observations as tool messages of a chat: the tokens between what the model sampled and what it samples next.

The conversation is never rendered again. What the template writes after an assistant's message, when a tool's follows, is found
once, from a made-up conversation, and appended with the observation in its place; the sampled ids stay as they are.
"""

from typing import Any

from verlite.envs.step import EncodeObservation, Step

_SAID, _ANSWERED = "gizmo assistant words", "gizmo tool words"  # not in any template


class TemplateError(ValueError):
    """A chat template cannot be continued by appending."""


def encode_chat(tokenizer: Any, tools: tuple[dict[str, Any], ...] = ()) -> EncodeObservation:
    """How observations become tokens for this tokenizer's chat template.

    Raises TemplateError when the template has no room for a tool's message, or writes the conversation's beginning in another way
    once a tool has answered: then a model would be trained on other contexts than it will see.
    """
    before, after = around_observation(tokenizer, tools)
    eos = tokenizer.eos_token_id
    end_of_turn = tokenizer.eos_token or ""

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    def observation(step: Step, context: list[int], limit: int) -> tuple[list[int], bool]:
        """Only `step.obs` is cut. The end of the model's turn is written where it did not write it itself."""
        ended = bool(context) and context[-1] == eos and bool(end_of_turn) and before.startswith(end_of_turn)
        head = encode(before.removeprefix(end_of_turn) if ended else before)
        tail, body = encode(after), encode(step.before + step.obs + step.after)
        room = limit - len(head) - len(tail)
        if room < 1:
            raise ValueError(
                f"data.max_obs_length={limit} has no room for a tool's answer: the chat template itself needs {len(head) + len(tail)}"
            )
        return head + body[:room] + tail, len(body) > room

    return observation


def around_observation(tokenizer: Any, tools: tuple[dict[str, Any], ...] = ()) -> tuple[str, str]:
    """What the chat template writes from the end of an assistant's words to a tool's, and from there to the next assistant's words."""
    if not tokenizer.chat_template:
        raise TemplateError(
            "the tokenizer has no chat template, so tools cannot answer in its format: model.custom_chat_template takes one"
        )

    def render(*messages: dict[str, str]) -> str:
        question = {"role": "user", "content": "gizmo user words"}
        kwargs = {"tools": list(tools)} if tools else {}
        try:
            return str(tokenizer.apply_chat_template([question, *messages], add_generation_prompt=True, tokenize=False, **kwargs))
        except Exception as error:  # templates raise what they like
            raise TemplateError(f"the chat template cannot render a tool's message: {type(error).__name__}: {error}") from error

    said, answered = {"role": "assistant", "content": _SAID}, {"role": "tool", "content": _ANSWERED}
    first, second = render(), render(said, answered)
    start, end = second.find(_SAID), second.find(_ANSWERED)
    if start < 0 or end < start:
        raise TemplateError("the chat template leaves out the assistant's or the tool's message")
    if second[:start] != first:
        raise TemplateError(
            "the chat template writes the conversation's beginning differently once a tool has answered, so turns cannot be appended:\n"
            f"  before: {first!r}\n  after:  {second[:start]!r}"
        )
    return second[start + len(_SAID) : end], second[end + len(_ANSWERED) :]
