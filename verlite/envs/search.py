"""Search-R1's environment (Jin et al. 2025, arXiv:2503.09516, section 3).

The model writes searches and answers in tags; passages come back in <information>. The texts are
those of Search-R1's released code, word for word, because checkpoints were trained on them.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from verlite.envs.step import Step, ToolError

OPENING = re.compile("<(search|answer)>")
INVALID = (
    "\nMy previous action is invalid. If I want to search, I should put the query between <search> "
    "and </search>. If I want to give the final answer, I should put the answer between <answer> "
    "and </answer>. Let me try again.\n"
)
INFORMATION = ("\n\n<information>", "</information>\n\n")
NOTHING_FOUND = "No results found."
FAILED = "The search engine does not answer."


@dataclass(frozen=True)
class Found:
    """Passages for one query."""

    passages: list[str]
    """Best first. The first line of each is its title."""
    seconds: float = 0.0
    """Time from query to answer, waiting included."""
    retries: int = 0
    """Attempts that failed before."""
    cached: bool = False
    """True if the passages came from the cache or from another sample's request."""


class Search(Protocol):
    """A search engine."""

    async def search(self, query: str) -> Found: ...


class SearchEnv:
    """The environment of one sample."""

    stop: tuple[str, ...] = ("</search>", "</answer>")

    def __init__(self, engine: Search, *, observe_errors: bool = False) -> None:
        """If `observe_errors`, a failed search is an observation; otherwise it is a ToolError."""
        self._engine = engine
        self._observe_errors = observe_errors

    async def resume(self, turns: Sequence[str]) -> None:
        """Do nothing: answers depend on the turn alone."""

    async def step(self, text: str, last: bool) -> Step:
        """See `Env.step`. An empty query is an invalid action, like a turn with neither tag."""
        action, content = first_action(text)
        if action == "answer":
            return Step(done=True, info={"action": "answer"})
        if action == "none" or not content:
            return Step(INVALID, valid=False, info={"action": "invalid"})
        if last:
            return Step(info={"action": "search not executed", "query": content})
        info: dict[str, Any] = {"action": "search", "query": content}
        try:
            found = await self._engine.search(content)
        except ToolError as error:
            if not self._observe_errors:
                raise
            return Step(FAILED, *INFORMATION, info={**info, "error": str(error)})
        info |= {
            "called": True,
            "seconds": found.seconds,
            "retries": found.retries,
            "cached": found.cached,
            "hits": len(found.passages),
        }
        return Step(passages_text(found.passages) or NOTHING_FOUND, *INFORMATION, info=info)


def first_action(text: str) -> tuple[str, str]:
    """Return tag and content of the first <search>...</search> or <answer>...</answer>.

    The tag is "none" if there is neither.
    """
    # A regex would search for an end from every opening tag, which takes quadratic time.
    ends = {tag: text.rfind(f"</{tag}>") for tag in ("search", "answer")}
    for opening in OPENING.finditer(text):
        if ends[opening[1]] >= opening.end():
            end = text.index(f"</{opening[1]}>", opening.end())
            return opening[1], text[opening.end() : end].strip()
    return "none", ""


def passages_text(passages: list[str]) -> str:
    """Return lines "Doc 1(Title: ...) text". The first line of a passage is its title."""
    lines = []
    for number, passage in enumerate(passages, start=1):
        title, _, text = passage.partition("\n")
        lines.append(f"Doc {number}(Title: {title}) {text}\n")
    return "".join(lines).strip()
