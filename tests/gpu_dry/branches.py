"""Where verlite's code depends on a GPU, and which test has executed the side of the GPU.

`python -m tests.gpu_dry.branches` runs the tests that the table of docs/verified.md names, with
each such place watched, and writes the table. With TESTs or files as arguments it runs these, which
add rows: those of places that they do not reach keep what they say.
"""

import ast
import builtins
import os
import re
import subprocess
import sys
import tempfile
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/verified.md"
LOG = "DRY_BRANCHES"
WORDS = re.compile(
    r"cuda|'ipc'|nvml|\bhip\b|rocm|device\.type|device_kind|placement\.kind|capability|has_own_memory"
    r"|visible_gpus|_flash_fits|\bGPU\b"
)

HEADING = "| place | condition or call | executed on the GPU's side by |\n|---|---|---|\n"


class Place(NamedTuple):
    """A condition, or a call of torch.cuda that none guards. file: below verlite/."""

    file: str
    function: str
    text: str


def gpu_side(test: ast.expr) -> bool:
    """Return the value of a condition where there is a GPU."""
    match test:
        case ast.UnaryOp(ast.Not(), operand):
            return not gpu_side(operand)
        case ast.BoolOp(_, values):
            return gpu_side(next(x for x in values if WORDS.search(ast.unparse(x))))
        case ast.Compare(_, [ast.NotIn()], _):
            return False
        case ast.Compare(_, [ast.Eq() | ast.NotEq() as op], [ast.Constant(name)]):
            return isinstance(op, ast.Eq) != (name in ("cpu", "meta"))
    return True


class Finder(ast.NodeTransformer):
    """Finds the places of one file, and makes each report its value."""

    def __init__(self, file: str) -> None:
        self.file, self.names = file, [""]
        self.guarded, self.inside = 0, False
        self.places: dict[Place, bool | None] = {}

    def _watch(self, value: ast.expr, text: str, side: bool | None) -> ast.expr:
        place = Place(self.file, self.names[-1], text.replace("|", "\\|"))
        self.places[place] = side
        arguments: list[ast.expr] = [ast.Constant(x) for x in place]
        return ast.Call(ast.Name("_dry_place", ast.Load()), [*arguments, value], [])

    def _scope(self, node: Any) -> Any:
        self.names.append(f"{self.names[-1]}.{node.name}".strip("."))
        self.generic_visit(node)
        self.names.pop()
        return node

    visit_FunctionDef = visit_ClassDef = visit_AsyncFunctionDef = _scope

    def _condition(self, node: Any) -> Any:
        """Watch an expression, whole, if it depends on a GPU."""
        nested = any(isinstance(x, ast.IfExp) for x in ast.walk(node))
        if self.inside or nested or not WORDS.search(ast.unparse(node)):
            return self.generic_visit(node)
        text, side, self.inside = ast.unparse(node), gpu_side(node), True
        self.generic_visit(node)
        self.inside = False
        return self._watch(node, text, side)

    visit_BoolOp = visit_Compare = _condition

    def _branch(self, node: Any) -> Any:
        depends = bool(WORDS.search(ast.unparse(node.test)))
        node.test = self._condition(node.test)
        self.guarded += depends
        for name in ("body", "orelse"):
            part = getattr(node, name)
            parts = [self.visit(x) for x in part] if isinstance(part, list) else self.visit(part)
            setattr(node, name, parts)
        self.guarded -= depends
        return node

    visit_If = visit_IfExp = visit_While = _branch

    def visit_comprehension(self, node: ast.comprehension) -> Any:
        node.ifs = [self._condition(x) for x in node.ifs]
        node.iter = self.visit(node.iter)
        return node

    def visit_Call(self, node: ast.Call) -> Any:
        text = ast.unparse(node)
        self.generic_visit(node)
        is_bare = ast.unparse(node.func).startswith("torch.cuda.") and not self.guarded
        return self._watch(node, text, None) if is_bare and not self.inside else node


def places() -> dict[Place, bool | None]:
    """Return all places of verlite, and each condition's value where there is a GPU."""
    found: dict[Place, bool | None] = {}
    for path in sorted(ROOT.glob("verlite/**/*.py")):
        text = path.read_text(encoding="utf-8")
        if WORDS.search(text):
            finder = Finder(str(path.relative_to(ROOT / "verlite")))
            finder.visit(ast.parse(text))
            found |= finder.places
    return found


def install() -> None:
    """Let this process report to the file that the variable LOG names."""
    seen = set()

    def report(*arguments: Any) -> Any:
        *place, value = arguments
        key = (*place, bool(value) if isinstance(value, bool | int | None) else True)
        if key not in seen:
            seen.add(key)
            test = os.environ.get("PYTEST_CURRENT_TEST", "").split(" (")[0]
            with open(os.environ[LOG], "a", encoding="utf-8") as log:
                log.write("\t".join([*place, str(key[-1]), test]).replace("\n", " ") + "\n")
        return value

    get_code = SourceFileLoader.get_code

    def watched(self: SourceFileLoader, name: str) -> Any:
        path = Path(self.path)
        if not path.is_relative_to(ROOT / "verlite"):
            return get_code(self, name)
        finder = Finder(str(path.relative_to(ROOT / "verlite")))
        tree = finder.visit(ast.parse(path.read_text(encoding="utf-8")))
        return compile(ast.fix_missing_locations(tree), self.path, "exec")

    builtins._dry_place = report  # type: ignore[attr-defined]
    SourceFileLoader.get_code = watched  # type: ignore[method-assign]


def read_page() -> dict[Place, str]:
    """Return the table's rows: the test of each place."""
    text = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\S+\.py)(?: (\S+))?` \| `(.+)` \| (.+) \|$", text, re.M)
    return {Place(file, function, text): test for file, function, text, test in rows}


def write_page(tests: dict[Place, str]) -> None:
    before, rest = PAGE.read_text(encoding="utf-8").split(HEADING)
    rows = [
        f"| `{f'{p.file} {p.function}'.strip()}` | `{p.text}` | {tests.get(p, 'never')} |\n"
        for p in places()
    ]
    page = before + HEADING + "".join(rows) + rest[rest.index("\n## ") :]
    PAGE.write_text(page, encoding="utf-8")


def executed(log: Path) -> dict[Place, str]:
    """Return the test of each place that was reached; those of this folder come first."""
    sides, found = places(), {}
    lines = sorted(set(log.read_text(encoding="utf-8").splitlines()))
    for line in sorted(lines, key=lambda line: "tests/gpu_dry" in line):
        *names, value, test = line.split("\t")
        if test and sides.get(Place(*names), "") in (None, value == "True"):
            found[Place(*names)] = f"`{test.split('[')[0].removeprefix('tests/')}`"
    return found


def main(tests: list[str]) -> None:
    from tests.test_gpu_dry import PYTHON, missing

    page = read_page()
    old = page if tests else {}
    named = {f"tests/{name.strip('`')}" for name in page.values() if name != "never"}
    tests = tests or sorted(named)
    dry = [test for test in tests if test.startswith("tests/gpu_dry")]
    if dry and (reason := missing()):
        sys.exit(f"not run: {dry}: {reason}")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        log.touch()
        env = os.environ | {LOG: str(log)}
        if cpu := [test for test in tests if test not in dry]:
            path = f"{ROOT / 'tests/gpu_dry/site'}:{ROOT}"
            pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *cpu]
            subprocess.run(pytest, cwd=ROOT, env=env | {"PYTHONPATH": path}, check=True)
        if dry:
            subprocess.run([PYTHON, "-m", "tests.gpu_dry", *dry], cwd=ROOT, env=env, check=True)
        write_page(old | executed(log))


if __name__ == "__main__":
    main(sys.argv[1:])
