"""docs/metrics.md has every metric that the code writes, and no other.

Here the page is compared with the source: names that the source writes whole must be on the page,
and a name on the page must be one that the source writes, whole or in parts. That the page has the
keys of real runs is checked wherever a test reads a run's metrics
(`tests.trainer.runs.Launch.metrics`).
"""

import ast
import functools
import re
from pathlib import Path

from tests import metrics_page
from tests.metrics_page import PLACEHOLDER

SOURCE = Path(__file__).parents[1] / "verlite"
WRITERS = ("algorithms", "engine", "gateway", "rollout", "sft", "trainer", "workers")
READERS = {"detectors.py", "display.py", "trackers.py"}
STATISTICS = {"summarize": ("mean", "max", "min"), "quantiles": ("p10", "p50", "p90")}
"""Functions of verlite/protocol/metrics.py, and what they add to a name."""
READING = {"get", "startswith", "removeprefix"}
"""Methods whose arguments are read, not written."""
HOLE = "\0"
"""Stands for a part of a name that an f-string computes."""


class Strings(ast.NodeVisitor):
    """What the source writes, file by file.

    Attributes:
        names: strings with a slash, and f-strings, with holes.
        words: strings without a slash and names of keyword arguments, which may fill holes.
        renamed: (old, new) beginnings of names, of calls name.replace(old, new).
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.words: set[str] = set()
        self.renamed: set[tuple[str, str]] = set()

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # a docstring
            self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.visit(node.value)
        if isinstance(node.ctx, ast.Store):  # others read
            self.visit(node.slice)

    def visit_Call(self, node: ast.Call) -> None:
        arguments = node.args
        if isinstance(node.func, ast.Name) and node.func.id in STATISTICS:
            prefix, *arguments = arguments
            self.names |= {f"{text(prefix)}/{end}" for end in STATISTICS[node.func.id]}
        elif isinstance(node.func, ast.Attribute):
            self.visit(node.func)
            if node.func.attr in READING:
                arguments = []
            elif node.func.attr == "replace" and len(arguments) == 2:
                self.renamed.add((text(arguments[0]), text(arguments[1])))
                arguments = []
        self.words |= {keyword.arg for keyword in node.keywords if keyword.arg}
        for argument in (*arguments, *(keyword.value for keyword in node.keywords)):
            self.visit(argument)

    def visit_Constant(self, node: ast.Constant) -> None:
        self._add(text(node))

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        self._add(text(node))

    def _add(self, found: str) -> None:
        if re.fullmatch(rf"[\w@/{HOLE}-]+", found):
            (self.names if "/" in found or HOLE in found else self.words).add(found)


def text(node: ast.AST) -> str:
    """Return a string or an f-string with holes; a hole for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text, node.values))
    return HOLE


@functools.cache
def source() -> Strings:
    """Return what the packages write that compute metrics."""
    strings = Strings()
    for package in WRITERS:
        for path in (SOURCE / package).rglob("*.py"):
            if path.name not in READERS:
                strings.visit(ast.parse(path.read_text(encoding="utf-8")))
    return strings


@functools.cache
def pattern(name: str) -> re.Pattern[str]:
    return re.compile("(.+?)".join(map(re.escape, name.split(HOLE))))


@functools.cache
def is_written(key: str, depth: int = 0) -> bool:
    """Say whether the source writes this key of the page, or the parts that it consists of."""
    found = source()
    if key in found.names or key in found.words or PLACEHOLDER.fullmatch(key):
        return True
    if depth == 3:
        return False
    for old, new in found.renamed:
        if key.startswith(new) and "/" in new and is_written(old + key.removeprefix(new), depth):
            return True
    for name in found.names:
        match = pattern(name).fullmatch(key) if HOLE in name else None
        # Words alone fill the holes of a name that consists of holes, such as f"{role}/{name}".
        deeper = depth + 1 if re.search("[a-z]", name) else 3
        if match and all(is_written(part, deeper) for part in match.groups()):
            return True
    return False


def test_the_source_writes_every_key_of_the_page():
    assert len(metrics_page.keys()) > 250
    assert [key for key in metrics_page.keys() if not is_written(key)] == []


def test_every_name_that_the_source_writes_is_on_the_page():
    """Also those that no test's run has, such as memory of a GPU.

    A name may be the beginning of others, such as the first argument of a function.
    """
    keys = metrics_page.keys()
    sections = {key.partition("/")[0] for key in keys}
    names = [name for name in source().names if sections.intersection(name.split("/")[:-1])]
    assert len(names) > 100
    missing = [
        name
        for name in names
        if not metrics_page.is_on_page(name)
        and not any(pattern(name).fullmatch(key) or key.startswith(f"{name}_") for key in keys)
    ]
    assert missing == []
