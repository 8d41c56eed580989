"""docs/rules.md says what is really printed."""

import ast
import importlib
import inspect
import pkgutil
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
    "(key, rollout.tensor_model_parallel_size, why",
    "{module} is not valid Python",
    "max_num_batched_tokens",
    "attention heads",
    "vLLM is not installed here",
    "is not writable",
)
"""Rules that only some machines can break (vLLM installed or missing, a user other than root):
test_rules.py.
"""


def test_every_rule_has_a_row(material, monkeypatch):
    """Each place in verlite/config/rules that reports a problem is reached by a row."""
    reached = set()

    class Seen(Problem):
        def __init__(self, *arguments, **named):
            super().__init__(*arguments, **named)
            caller = inspect.currentframe().f_back
            reached.add((caller.f_globals["__name__"], caller.f_lineno))

    modules = [
        importlib.import_module(f"verlite.config.rules.{found.name}")
        for found in pkgutil.iter_modules(rules.__path__)
    ]
    for module in modules:
        if hasattr(module, "Problem"):
            monkeypatch.setattr(module, "Problem", Seen)
    for added, _ in ROWS:
        with suppress(ConfigError):
            material.load(*added.replace("DIR", str(material.folder)).split(" "))
    missing = [
        f"{module.__name__}: {text}"
        for module in modules
        for line, text in places(module).items()
        if (module.__name__, line) not in reached and not any(words in text for words in ELSEWHERE)
    ]
    assert missing == []


def places(module) -> dict[int, str]:
    """Return the lines of a module that report a problem, with their code."""
    calls = [
        node
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Call)
    ]
    return {node.lineno: ast.unparse(node) for node in calls if ast.unparse(node.func) == "Problem"}


def test_the_page_on_configuration_shows_lines_that_work(material):
    text = (PAGE.parent / "configuration.md").read_text()
    (placement,) = re.findall(r"'(\+?cluster\.component_placement=.*)'", text)
    assert material.load(placement).config.cluster.component_placement == {
        "actor,critic": "0-3",
        "rollout": "4-7",
    }


def test_the_page_on_configuration_names_every_file_of_conf():
    page = (PAGE.parent / "configuration.md").read_text()
    files = {file.stem for file in (PAGE.parents[1] / "conf").glob("*.yaml")}
    assert [name for name in sorted(files) if f"`{name}`" not in page] == []
