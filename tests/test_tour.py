"""The tour names every package, with about its lines of code, and its pointers lead to code."""

import ast
import re
from pathlib import Path

import verlite

ROOT = Path(verlite.__file__).parent
TOUR = (ROOT.parent / "docs" / "tour.md").read_text()
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
    named = set()
    for cell, number in ROWS.findall(TOUR):
        names = re.findall(r"`([a-z_]+(?:/|\.py))`", cell)
        named |= set(names)
        if number:
            counted, shown = lines_in(*names), int(number.replace(",", ""))
            assert abs(counted - shown) <= max(50, shown / 10), (cell, counted)
    assert named >= {f"{file.parent.name}/" for file in ROOT.glob("*/__init__.py")}
    (nucleus,) = re.findall(r"is the nucleus: about ([\d,]+) lines", TOUR)
    stages = lines_in("trainer/stages", "trainer/ppo.py")
    counted, shown = lines_in(*NUCLEUS) + stages, int(nucleus.replace(",", ""))
    assert abs(counted - shown) <= shown / 10, counted


def pointers(text: str) -> set[tuple[str, str]]:
    """(name, file) of each "`name` in `file.py`" and "`name` (`file.py`)", and ("", file) of each
    other file or folder in code."""
    found = set()
    for name, file in re.findall(r"`([\w.]+)`\s(?:in\s|\()`([\w/]+\.py)`", text):
        found.add((name.rpartition(".")[2], file))
    return found | {("", path) for path in re.findall(r"`([\w/]+(?:/|\.py))`", text)}


def test_pointers_are_found():
    text = "`A.b` in `c/d.py`, `e` (`f.py`), `g/` and `h`"
    assert pointers(text) == {
        ("b", "c/d.py"),
        ("e", "f.py"),
        ("", "c/d.py"),
        ("", "f.py"),
        ("", "g/"),
    }


def test_pointers_of_the_tour_lead_to_code():
    verls = TOUR[TOUR.index("| in verl") : TOUR.index("## The batch")]
    here = "\n".join(row.split("|")[2] for row in verls.splitlines() if row)
    paths = {f"/{path.relative_to(ROOT.parent).as_posix()}": path for path in ROOT.rglob("*")}
    others = {
        f"/{path.relative_to(ROOT.parent)}": path for path in ROOT.parent.glob("tests/*/*.py")
    }
    checked = 0
    for name, place in pointers(TOUR.replace(verls, here)):
        homes = [p for key, p in (paths | others).items() if key.endswith(f"/{place.rstrip('/')}")]
        assert homes or (ROOT.parent / place).exists(), place
        found = [home for home in homes if name and re.search(rf"\b{name}\b", home.read_text())]
        assert not name or found, (name, place)
        checked += bool(name)
    assert checked > 15
