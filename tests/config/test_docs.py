"""docs/rules.md says what is really printed."""

import ast
import inspect
import re
from contextlib import suppress
from pathlib import Path

import pytest

from verlite.config import ConfigError, Problem, rules

PAGE = Path(__file__).parents[2] / "docs" / "rules.md"
ROWS = re.findall(r"^\| `(.+?)` \| (.+) \|$", PAGE.read_text(), re.MULTILINE)


@pytest.mark.parametrize(("added", "said"), ROWS, ids=[added for added, _ in ROWS])
def test_rules(material, added, said):
    folder = str(material.folder)
    try:
        messages = material.load(*added.replace("DIR", folder).split(" ")).notes
    except ConfigError as error:
        messages = [str(problem) for problem in error.problems]
    assert messages == [said.replace("DIR", folder)]


ELSEWHERE = (
    "(key, tp, why,",
    "rollout.max_num_batched_tokens",
    "attention heads",
    "vLLM is not installed here",
    "is not writable",
)
"""Rules that only a machine with vLLM, or one without it, or a user other than root can break: tests/config/test_rules.py."""


def test_every_rule_has_a_row(material, monkeypatch):
    """Each place in rules.py that reports something is reached by a row."""
    reached = set()

    class Seen(Problem):
        def __init__(self, *arguments, **named):
            super().__init__(*arguments, **named)
            reached.add(inspect.currentframe().f_back.f_lineno)

    monkeypatch.setattr(rules, "Problem", Seen)
    for added, _ in ROWS:
        with suppress(ConfigError):
            material.load(*added.replace("DIR", str(material.folder)).split(" "))
    places = [
        node for node in ast.walk(ast.parse(inspect.getsource(rules))) if isinstance(node, ast.Call)
    ]
    lines = {
        node.lineno: ast.unparse(node) for node in places if ast.unparse(node.func) == "Problem"
    }
    missing = [
        text
        for line, text in lines.items()
        if line not in reached and not any(words in text for words in ELSEWHERE)
    ]
    assert missing == []


def test_the_page_on_configuration_shows_lines_that_work(material):
    text = (PAGE.parent / "configuration.md").read_text()
    (placement,) = re.findall(r"'(\+?cluster\.component_placement=.*)'", text)
    assert material.load(placement).config.cluster.component_placement == {
        "actor,critic": "0-3",
        "rollout": "4-7",
    }
