"""Continue a conversation in the format of a chat template, without rendering it again.

The sampled token ids stay as they are. The text that the template writes between two turns of the
assistant is taken from a conversation with made-up words of the assistant, and appended.
"""

import math
import re
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verlite.chat_template import limited
from verlite.envs.step import EncodeObservation, Step

Messages = Sequence[Mapping[str, Any]]

# Markers for the made-up words. No template contains them.
_ASSISTANT_TEXT = "gizmo assistant words"
_TOOL_TEXT = "gizmo tool words"
_ASSISTANT_THOUGHT = f"<think>\ngizmo thoughts\n</think>\n\n{_ASSISTANT_TEXT}"
_ENCODES = threading.Lock()


class TemplateError(ValueError):
    """A chat template cannot render a conversation, or not continue it by appending text."""


class TextTooLong(ValueError):
    """A text has more characters than are encoded."""


class Chat:
    """A tokenizer's chat template, with the tools and options of one kind of conversation."""

    def __init__(
        self,
        tokenizer: Any,
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] | None = None,
        longest: float = math.inf,
    ) -> None:
        """Prepare; nothing is rendered yet.

        Args:
            tokenizer: a tokenizer with a chat template.
            tools: JSON schemas of the tools.
            template_kwargs: data.apply_chat_template_kwargs.
            longest: characters that `encode_messages` encodes, at most.

        Raises:
            TemplateError: the tokenizer has no chat template.
        """
        if not tokenizer.chat_template:
            raise TemplateError(
                "the tokenizer has no chat template, which tool messages need: "
                "set model.custom_chat_template"
            )
        self._tokenizer = tokenizer
        self._longest = longest
        self._options = ({"tools": list(tools)} if tools else {}) | dict(template_kwargs or {})
        added = tokenizer.added_tokens_decoder.values()
        self._special = [str(token) for token in added if token.special]
        self._added_ids = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}

    def render(self, messages: Messages) -> str:
        """Return the text of a prompt with these messages, up to where the assistant begins.

        Raises TemplateError.
        """
        try:
            with limited(self._tokenizer, memory=False):  # engines of this process use the GPU
                text = self._tokenizer.apply_chat_template(
                    list(messages), add_generation_prompt=True, tokenize=False, **self._options
                )
        except Exception as error:  # templates may raise anything
            last = messages[-1].get("role") if messages else "user"
            raise TemplateError(
                f"the chat template cannot render a {last} message: {type(error).__name__}: {error}"
            ) from error
        return str(text)

    def between(self, before: Messages, after: Messages, words: str = _ASSISTANT_TEXT) -> str:
        """Return the text between two turns of the assistant: from the end of its words to where
        its next turn begins.

        Args:
            before: the messages that its words answer.
            after: those that follow.
            words: that stand for the assistant's.

        Raises:
            TemplateError: the template writes the assistant's words or what was before them
                differently because of the messages that follow. Then training would see another
                context than the model did.
        """
        start = self.render(before) + words
        said = [{"role": "assistant", "content": words}]
        written = self.render([*before, *said, *after])
        if not written.startswith(start):
            raise TemplateError(
                f"the chat template writes earlier messages differently after a "
                f"{(after or before)[-1].get('role')} message, so turns cannot be appended:\n"
                f"  appended:    {start!r}\n  by template: {written!r}"
            )
        return written.removeprefix(start)

    def encode(self, text: str, as_text: bool = False) -> list[int]:
        """Return the tokens of a rendered text; with `as_text` special tokens are plain text."""
        options = {"add_special_tokens": False, "split_special_tokens": as_text}
        return encode(self._tokenizer, text, **options)

    def encode_messages(self, write: Callable[[Messages], str], messages: Messages) -> list[int]:
        """Return the tokens of `write(messages)`, a rendered text. Special tokens in the messages
        are plain text, even if they look like the end of a turn.

        Raises:
            TemplateError: the template does not write texts with special tokens as they are.
            TextTooLong: the text is longer than `longest`.
        """
        text = write(messages)
        if len(text) > self._longest:
            raise TextTooLong(len(text))
        mark = secrets.token_hex(8)  # which no message can know
        begin, end = f"begin {mark}", f"end {mark}"
        marked = self._marked([*messages], begin, end)
        if marked == [*messages]:
            return self.encode(text)
        parts = re.split(f"{begin}(.*?){end}", write(marked), flags=re.DOTALL)
        if "".join(parts) != text:
            raise TemplateError(
                "a message has special tokens in its text, and the chat template does not write "
                "it as it is"
            )
        encoded = [self.encode(part, as_text=bool(i % 2)) for i, part in enumerate(parts)]
        return [token for ids in encoded for token in ids]

    def _marked(self, value: Any, begin: str, end: str) -> Any:
        """Return messages with marks around the texts in them that have special tokens."""
        if isinstance(value, str) and self.has_special(value):
            words = value.strip()  # as templates do
            return value.replace(words, begin + words + end, 1)
        if isinstance(value, Mapping):
            return {
                self._marked(k, begin, end): self._marked(v, begin, end) for k, v in value.items()
            }
        return (
            [self._marked(item, begin, end) for item in value] if isinstance(value, list) else value
        )

    def has_special(self, words: str) -> bool:
        """Return whether a text contains a special token of the tokenizer."""
        return any(token in words for token in self._special)

    def has_ended(self, context: Sequence[int], ids: Sequence[int]) -> bool:
        """Return whether a context ends with the end of a turn with which `ids` begin: the model
        wrote it itself."""
        return list(context[-1:]) == list(ids[:1]) and context[-1] in self._added_ids

    def continuation(
        self, context: Sequence[int], before: Messages, after: Messages, has_thoughts: bool
    ) -> list[int]:
        """Return the tokens between the assistant's turn at the end of a context and its next one.

        Args:
            context: tokens up to the end of its turn, as sampled.
            before: the messages that it answered.
            after: those that follow.
            has_thoughts: the turn has a part before </think>, which templates may remove later.

        Raises:
            TemplateError: as `between`.
        """
        words = _ASSISTANT_THOUGHT if has_thoughts else _ASSISTANT_TEXT
        ids = self.encode_messages(lambda after: self.between(before, after, words), after)
        return ids[self.has_ended(context, ids) :]


def encode(tokenizer: Any, text: str, **options: bool) -> list[int]:
    """Return `tokenizer.encode`, of one thread at a time: `split_special_tokens` is a state of the
    tokenizer meanwhile. With trainer.mode=async a validation encodes beside other samples.

    A lone surrogate, which JSON can write and UTF-8 cannot, becomes "?".
    """
    with _ENCODES:
        ids: list[int] = tokenizer.encode(text.encode(errors="replace").decode(), **options)
    return ids


def encode_chat(
    tokenizer: Any,
    tools: tuple[dict[str, Any], ...] = (),
    template_kwargs: Mapping[str, Any] | None = None,
) -> EncodeObservation:
    """Return an encoder of observations as tool messages of the tokenizer's chat template.

    Args: as of `Chat`.

    Raises:
        TemplateError: the template leaves out tool messages, or writes earlier messages differently
            after a tool message. Then training would see other contexts than the model did.
    """
    chat = Chat(tokenizer, tools, template_kwargs)
    question = {"role": "user", "content": "gizmo user words"}

    def between(answer: str) -> str:
        said = {"role": "assistant", "content": _ASSISTANT_TEXT}
        text = chat.render([question, said, {"role": "tool", "content": answer}])
        return text.partition(_ASSISTANT_TEXT)[2]

    before, found, after = between(_TOOL_TEXT).partition(_TOOL_TEXT)
    if not found:
        raise TemplateError("the chat template leaves out the assistant's or the tool's message")
    _check_turns(chat, question, before + found + after)

    def observation(step: Step, context: list[int], limit: int) -> tuple[list[int], bool]:
        """Encode a step. Only the tool's words are truncated.

        The end of the model's turn is added if the model did not write it itself.
        """
        words = step.before + step.obs + step.after
        written = between(words)
        ids = chat.encode(written)
        has_ended = chat.has_ended(context, ids)
        if len(ids) - has_ended <= limit and not chat.has_special(words):
            return ids[has_ended:], False
        # The body is taken as the template writes it: stripped, or as a JSON string. Special tokens
        # in it are encoded as text, even if they look like the end of a turn.
        body = chat.encode(written.removeprefix(before).removesuffix(after), as_text=True)
        head = chat.encode(before)[has_ended:]
        tail = chat.encode(after)
        room = limit - len(head) - len(tail)
        if room < 1:
            raise ValueError(
                f"data.max_obs_length={limit} is too small for a tool message: "
                f"the chat template itself needs {len(head) + len(tail)} tokens"
            )
        return head + body[:room] + tail, len(body) > room

    return observation


def _check_turns(chat: Chat, question: Mapping[str, Any], between: str) -> None:
    """Check that the template writes two turns with a tool message as appending does.

    Raises TemplateError.
    """
    for words in (_ASSISTANT_TEXT, _ASSISTANT_THOUGHT):
        turn = [
            {"role": "assistant", "content": words},
            {"role": "tool", "content": _TOOL_TEXT},
        ]
        appended = chat.render([question])
        for turns in (1, 2):
            appended += words + between
            written = chat.render([question, *turn * turns])
            if written != appended:
                raise TemplateError(
                    "the chat template writes earlier messages differently after a tool message, "
                    "so turns cannot be appended:\n"
                    f"  appended:    {appended!r}\n  by template: {written!r}"
                )
