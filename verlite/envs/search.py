"""Search-R1's environment (Jin et al. 2025, arXiv:2503.09516, section 3): searches and answers in tags, passages in <information>.

The texts are those of Search-R1's released code, word for word, because checkpoints were trained on them.
"""

import re
from typing import Any, Protocol

from verlite.envs.step import Step, ToolError

OPENING = re.compile("<(search|answer)>")
INVALID = (
    "\nMy previous action is invalid. If I want to search, I should put the query between <search> and </search>. If I want to give the "
    "final answer, I should put the answer between <answer> and </answer>. Let me try again.\n"
)
INFORMATION = ("\n\n<information>", "</information>\n\n")
NOTHING_FOUND = "No results found."
FAILED = "The search engine does not answer."


class Search(Protocol):
    """What finds passages."""

    async def search(self, query: str) -> "Found": ...


class Found:
    """Passages for one query."""

    def __init__(
        self, passages: list[str], seconds: float = 0.0, retries: int = 0, cached: bool = False
    ) -> None:
        """passages: best first; the first line of each is its title. seconds: from question to answer, waiting included."""
        self.passages, self.seconds, self.retries, self.cached = passages, seconds, retries, cached


class SearchEnv:
    """One sample's searches."""

    stop: tuple[str, ...] = ("</search>", "</answer>")

    def __init__(self, engine: Search, *, observe_errors: bool = False) -> None:
        """observe_errors: a search that fails is told to the model, and the sample is trained on; otherwise ToolError."""
        self._engine, self._observe_errors = engine, observe_errors

    async def step(self, text: str, last: bool) -> Step:
        """See `Env.step`. An empty query is the model's mistake, like a turn with neither tag."""
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
    """The first of <search>...</search> and <answer>...</answer>: its tag and what stands in it; "none" without one."""
    # A regex would search for the end of every opening tag anew, which takes quadratic time where none has one.
    ends = {tag: text.rfind(f"</{tag}>") for tag in ("search", "answer")}
    for opening in OPENING.finditer(text):
        if ends[opening[1]] >= opening.end():
            return opening[1], text[
                opening.end() : text.index(f"</{opening[1]}>", opening.end())
            ].strip()
    return "none", ""


def passages_text(passages: list[str]) -> str:
    """ "Doc 1(Title: ...) text", a passage a line; the first line of a passage is its title."""
    lines = []
    for number, passage in enumerate(passages, start=1):
        title, _, text = passage.partition("\n")
        lines.append(f"Doc {number}(Title: {title}) {text}\n")
    return "".join(lines).strip()
