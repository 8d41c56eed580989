"""docs/rules.md shows the messages that verlite prints."""

import ast
import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.config.conftest import hide_gpus
from verlite.config import ConfigError, Problem, rules
from verlite.config.rules import errors, models, notes

PAGE = Path(__file__).parents[2] / "docs" / "rules.md"
ROWS = re.findall(r"^\| `(.+?)` \| (.+) \|$", PAGE.read_text(), re.MULTILINE)


@pytest.mark.parametrize(("added", "message"), ROWS, ids=[added for added, _ in ROWS])
def test_rules_page_shows_the_message(material, loaded_rows, added, message):
    assert loaded_rows.found[added] == [message.replace("DIR", str(material.folder))]


ELSEWHERE = (
    "(key, rollout.tensor_model_parallel_size, why",
    "{module} is not valid Python",
    "enable_chunked_prefill",
    "tensor_model_parallel_size', size, rule, remedy",
    "attention heads",
    "vLLM is not installed here",
    "debugpy is not installed here",
    "package {name} is not installed here",
    "'trainer.device', device, rule, remedy",
    "vLLM {old} is installed",
    "change its permissions",
    "name=auto chose",
    "Search-R1 counted",
)
"""Rules and notes of only some machines, such as those with vLLM. test_rules.py, test_machine.py,
test_ineffective.py and tests/compat test them."""


class LoadedRows(NamedTuple):
    """What came of loading every row of the page."""

    found: dict[str, list[str] | Exception]
    """Row -> its messages, or what was raised instead."""
    missing: list[str]
    """Rules and notes that no row has reached."""


@pytest.fixture(scope="module")
def loaded_rows(material):
    """Load each row of the page once. Every call of Problem in verlite/config/rules, every row of
    `errors` and every note that it reaches is seen."""
    with pytest.MonkeyPatch.context() as patch:
        hide_gpus(patch)
        return load_rows(material, patch)


def load_rows(material, patch):
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
            patch.setattr(module, "Problem", Seen)
    texts = []
    for table in ("ERRORS", "OPTIMIZER", "MODEL"):
        rows = getattr(errors, table)
        for where in (errors, models):
            if hasattr(where, table):
                marked = tuple(
                    r._replace(is_violated=seen(r.is_violated, r[:1] + r[2:])) for r in rows
                )
                patch.setattr(where, table, marked)
        texts += [r[:1] + r[2:] for r in rows]
    patch.setattr(notes, "NOTES", tuple((seen(holds, text), text) for holds, text in notes.NOTES))
    texts += [text for _, text in notes.NOTES]
    found = {}
    for added, _ in ROWS:
        try:
            words = re.findall(r"(?:'[^']*'|[^ '])+", added.replace("DIR", str(material.folder)))
            found[added] = material.notes(*words)
        except ConfigError as error:
            found[added] = [str(problem) for problem in error.problems]
        except Exception as error:  # the test of this row shows it
            found[added] = error
    missing = [
        f"{module.__name__}: {text}"
        for module in modules
        for line, text in places(module).items()
        if (module.__name__, line) not in reached
    ]
    missing += [str(text) for text in texts if text not in reached]
    return LoadedRows(found, missing)


def test_every_rule_is_in_rules_page(loaded_rows):
    missing = [
        text for text in loaded_rows.missing if not any(words in text for words in ELSEWHERE)
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
