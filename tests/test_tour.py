"""The tour names every package, and its numbers of lines are about right."""

import ast
import re
from pathlib import Path

import verlite

ROOT = Path(verlite.__file__).parent
ROWS = re.compile(r"^\| (.+?) \| .+ \| ([\d,]*) ?\|$", re.MULTILINE)
NUCLEUS = ("control", "spec", "protocol", "algorithms", "weights", "rollout", "engine", "workers")


def lines_of_code(file: Path) -> int:
    """Lines that are neither blank nor a comment nor of a docstring."""
    source = file.read_text()
    docstrings = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docstrings |= set(range(node.lineno, (node.end_lineno or 0) + 1))
    lines = enumerate(map(str.strip, source.splitlines()), start=1)
    return sum(
        bool(line) and not line.startswith("#") and number not in docstrings
        for number, line in lines
    )


def lines_in(*names: str) -> int:
    files = [file for name in names for file in sorted(ROOT.joinpath(name).rglob("*.py"))]
    return sum(map(lines_of_code, [*files, *(ROOT / n for n in names if n.endswith(".py"))]))


def test_code_is_counted(tmp_path):
    file = tmp_path / "a.py"
    function = 'def f():\n    """Doc.\n\n    More.\n    """\n    return 1  # one\n'
    file.write_text('"""Doc."""\n\n# Why.\nX = """\na\n"""\n"""About X."""\n\n\n' + function)
    assert lines_of_code(file) == 3 + 2


def test_lines_of_the_tour():
    text = (ROOT.parent / "docs" / "tour.md").read_text()
    named = set()
    for cell, number in ROWS.findall(text):
        names = re.findall(r"`([a-z_]+(?:/|\.py))`", cell)
        named |= set(names)
        if number:
            counted, shown = lines_in(*names), int(number.replace(",", ""))
            assert abs(counted - shown) <= max(150, shown / 4), (cell, counted)
    assert named >= {f"{file.parent.name}/" for file in ROOT.glob("*/__init__.py")}
    (nucleus,) = re.findall(r"is the nucleus: about ([\d,]+) lines", text)
    stages = lines_in("trainer/stages", "trainer/ppo.py")
    counted, shown = lines_in(*NUCLEUS) + stages, int(nucleus.replace(",", ""))
    assert abs(counted - shown) <= shown / 10, counted
