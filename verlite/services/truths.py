"""Ground truths of a data set by question, and the parts of a prompt that is already text."""

import json
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verlite.files import kind_of
from verlite.http.server import ServiceError
from verlite.tables import TableError, located_rows


@dataclass(frozen=True)
class Template:
    """How a chat template marks turns."""

    user: str
    """Text in front of a user turn."""
    end: str
    """Text behind it."""
    assistant: str
    """Text in front of a response."""

    def user_turns(self, text: str) -> Iterator[str]:
        """Yield the user turns of a text, in linear time."""
        place = 0
        while (mark := text.find(self.user, place)) >= 0:
            begin = mark + len(self.user)
            end = text.find(self.end, begin)
            if end < 0:
                return
            yield text[begin:end]
            place = end + len(self.end)


TEMPLATES = {
    "chatml": Template("<|im_start|>user\n", "<|im_end|>", "<|im_start|>assistant\n"),
    "qwen1": Template("<｜User｜>", "<｜Assistant｜>", "<｜Assistant｜>"),
    "base": Template("User: ", "\n\nAssistant:", "Assistant:"),
}
"""By the names of OpenRLHF's math_verifier."""
_LONGEST_MARK = 48
_MARK = re.compile(
    r"(?:<\|[^<>|]{1,40}\|>|<｜[^<>｜]{1,40}｜>|</?s>|<(?:pad|eos|bos|end_of_turn)>)\Z"
)
"""A special token at the end of a text."""


class Truths:
    """Ground truths by question. The question is the last user turn of a prompt."""

    def __init__(self, by_question: Mapping[str, str]) -> None:
        self._by_question = by_question

    def __len__(self) -> int:
        return len(self._by_question)

    def of(self, question: str) -> str | None:
        """Return the ground truth of a question; None if it is not in the data set.

        White space does not count. A similar question does not count: it has another answer.
        """
        return self._by_question.get(_key(question))


def read_truths(
    files: Sequence[str], input_key: str, answer_key: str | None, template: Template
) -> Truths:
    """Read data sets: .json (a list of objects), .jsonl, .csv or .parquet.

    Args:
        files: the files.
        input_key: column of the prompt: text, chat messages, or these as JSON text.
        answer_key: column of the ground truth, with dots for nested ones. None: `answer`, else
            `reward_model.ground_truth`.
        template: finds the question in a prompt that is text.

    Raises:
        ServiceError: a file cannot be read, a row has no prompt or ground truth, or a question
            has two different ones.
    """
    found: dict[str, str] = {}
    for file in files:
        for place, row in _rows(file):
            where = f"{file} {place}"
            if input_key not in row:
                raise ServiceError(
                    f"{where} has no column {input_key!r} (--input_key); "
                    f"its columns are {', '.join(map(str, row))}"
                )
            truth = _truth(row, answer_key)
            if truth is None or not str(truth).strip():
                raise ServiceError(
                    f"{where} has no ground truth in "
                    f"{answer_key or 'answer or reward_model.ground_truth'}; "
                    "name its column with --answer_key"
                )
            if isinstance(truth, bool) or not isinstance(truth, str | int | float):
                raise ServiceError(
                    f"{where}: the ground truth is {kind_of(truth)}, expected text or a "
                    "number; name another column with --answer_key"
                )
            key, text = _key(question(row[input_key], template)), str(truth).strip()
            if found.setdefault(key, text) != text:
                raise ServiceError(
                    f"{where}: its question occurs twice, with the answers {found[key]!r:.60} and "
                    f"{text!r:.60}; keep one"
                )
    if not found:
        raise ServiceError(f"{', '.join(files)}: has no rows")
    return Truths(found)


def question(prompt: Any, template: Template) -> str:
    """Return the last user turn of a prompt.

    The prompt is a list of messages, the same as JSON text, or text of the template. A text without
    the template's marks is the question itself.
    """
    messages = _messages(prompt)
    if messages is not None:
        users = [message for message in messages if message.get("role") == "user"]
        return str((users or messages)[-1].get("content", ""))
    text = str(prompt)
    last = deque(template.user_turns(text), maxlen=1)
    return last[0] if last else text


def first_question(query: str, template: Template) -> str:
    """Return the first user turn of a query without a prompt.

    A later one may be the model's, which must not choose the question that it is graded on.
    """
    return next(template.user_turns(query), query)


def response(query: str, prompt: Any, template: Template) -> str:
    """Return what the model wrote: the query without its prompt and without end tokens.

    The prompt is cut off if the query begins with it. Otherwise the response begins after the
    first mark of an assistant's turn behind the question, so a mark that the model writes itself
    does not count.
    """
    if isinstance(prompt, str) and prompt and query.startswith(prompt):
        text = query[len(prompt) :]
    else:
        asked = question(prompt, template) if prompt else first_question(query, template)
        _, mark, after = query[max(0, query.find(asked.strip())) :].partition(template.assistant)
        text = after if mark else query
    return _without_end(text).lstrip()


def _without_end(text: str) -> str:
    """Return the text without white space and special tokens at its end."""
    while True:
        text = text.rstrip()
        mark = _MARK.search(text[-_LONGEST_MARK:])  # the whole text would take quadratic time
        if mark is None:
            return text
        text = text[: len(text) - len(mark[0])]


def _messages(prompt: Any) -> list[dict[str, Any]] | None:
    if isinstance(prompt, str) and prompt.lstrip().startswith("["):
        with suppress(ValueError, RecursionError):
            prompt = json.loads(prompt)
    if hasattr(prompt, "tolist"):
        prompt = prompt.tolist()
    if isinstance(prompt, list) and prompt and all(isinstance(item, dict) for item in prompt):
        return prompt
    return None


def _key(text: str) -> str:
    return " ".join(text.split())


def _truth(row: Mapping[str, Any], answer_key: str | None) -> Any:
    for name in [answer_key] if answer_key else ["answer", "reward_model.ground_truth"]:
        value: Any = row
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None:
            return value
    return None


def _rows(file: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        yield from located_rows(Path(file).expanduser())
    except TableError as error:
        raise ServiceError(f"{file} {error}") from None
