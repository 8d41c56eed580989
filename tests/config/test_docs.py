"""docs/rules.md shows the messages that verlite prints."""

import ast
import importlib
import inspect
import pkgutil
import re
from contextlib import suppress
from pathlib import Path

import pytest

from verlite.config import ConfigError, Problem, rules
from verlite.config.rules import errors, models, notes

PAGE = Path(__file__).parents[2] / "docs" / "rules.md"
ROWS = re.findall(r"^\| `(.+?)` \| (.+) \|$", PAGE.read_text(), re.MULTILINE)


@pytest.mark.parametrize(("added", "message"), ROWS, ids=[added for added, _ in ROWS])
def test_rules_page_shows_the_message(material, added, message):
    folder = str(material.folder)
    try:
        messages = material.notes(*added.replace("DIR", folder).split(" "))
    except ConfigError as error:
        messages = [str(problem) for problem in error.problems]
    assert messages == [message.replace("DIR", folder)]


ELSEWHERE = (
    "(key, rollout.tensor_model_parallel_size, why",
    "{module} is not valid Python",
    "enable_chunked_prefill",
    "attention heads",
    "vLLM is not installed here",
    "debugpy is not installed here",
    "package {name} is not installed here",
    "torch is a build for CPUs",
    "vLLM {old} is installed",
    "is not writable",
    "name=auto chose",
    "Search-R1 counted",
)
"""Rules and notes of only some machines, such as those with vLLM. test_rules.py, test_machine.py,
test_ineffective.py and tests/compat test them."""


def test_every_rule_is_in_rules_page(material, monkeypatch):
    """Every call of Problem in verlite/config/rules, every row of `errors` and every note is
    reached by a row of the page."""
    reached = set()

    class Seen(Problem):
        def __init__(self, *arguments, **named):
            super().__init__(*arguments, **named)
            caller = inspect.currentframe().f_back
            reached.add((caller.f_globals["__name__"], caller.f_lineno))

    def seen(condition, text):
        return lambda c: condition(c) and (reached.add(text) or True)

    modules = [
        importlib.import_module(f"verlite.config.rules.{found.name}")
        for found in pkgutil.iter_modules(rules.__path__)
    ]
    for module in modules:
        if hasattr(module, "Problem"):
            monkeypatch.setattr(module, "Problem", Seen)
    texts = []
    for table in ("ERRORS", "OPTIMIZER", "MODEL"):
        rows = getattr(errors, table)
        for where in (errors, models):
            if hasattr(where, table):
                marked = tuple(
                    r._replace(is_violated=seen(r.is_violated, r[:1] + r[2:])) for r in rows
                )
                monkeypatch.setattr(where, table, marked)
        texts += [r[:1] + r[2:] for r in rows]
    monkeypatch.setattr(
        notes, "NOTES", tuple((seen(holds, text), text) for holds, text in notes.NOTES)
    )
    texts += [text for _, text in notes.NOTES]
    for added, _ in ROWS:
        with suppress(ConfigError):
            material.load(*added.replace("DIR", str(material.folder)).split(" "))
    missing = [
        f"{module.__name__}: {text}"
        for module in modules
        for line, text in places(module).items()
        if (module.__name__, line) not in reached
    ]
    missing += [str(text) for text in texts if text not in reached]
    assert [text for text in missing if not any(words in text for words in ELSEWHERE)] == []


def places(module) -> dict[int, str]:
    """Return the lines of a module that report a problem, with their code."""
    calls = [
        node
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Call)
    ]
    return {node.lineno: ast.unparse(node) for node in calls if ast.unparse(node.func) == "Problem"}


def test_placement_example_in_configuration_page_is_valid(material):
    text = (PAGE.parent / "configuration.md").read_text()
    (placement,) = re.findall(r"'(\+?cluster\.component_placement=.*)'", text)
    assert material.load(placement).config.cluster.component_placement == {
        "actor,critic": "0-3",
        "rollout": "4-7",
    }


def test_configuration_page_names_every_yaml_file():
    page = (PAGE.parent / "configuration.md").read_text()
    files = {file.stem for file in (PAGE.parents[1] / "conf").glob("*.yaml")}
    assert [name for name in sorted(files) if f"`{name}`" not in page] == []
