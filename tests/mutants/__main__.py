"""Plant each bug in a copy of the project, run its test, and write docs/mutants.md: a bug that no test sees is a failing result.

python -m tests.mutants [ROOM ...]      ROOM: algorithms, config, data, engine, rollout, ...; none: all of them
"""

import importlib
import pkgutil
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rich.progress import track

import tests.mutants

TOP = Path(__file__).parents[2]
PAGE = TOP / "docs" / "mutants.md"

Mutant = tuple[str, str, str, str, str]
"""name, file, old text (once in the file), new text, test"""


def rooms() -> list[str]:
    return sorted(m.name for m in pkgutil.iter_modules(tests.mutants.__path__) if not m.name.startswith("_"))


def mutants(room: str) -> list[Mutant]:
    return importlib.import_module(f"tests.mutants.{room}").MUTANTS


def seen(copy: Path, mutant: Mutant) -> bool:
    """Whether the mutant's test fails when the bug is in the copy. The file is put back afterwards."""
    _, name, old, new, test = mutant
    file = copy / name
    text = file.read_text()
    file.write_text(text.replace(old, new))
    try:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *test.split()]
        # 1: a test failed. 2 is an import that broke, and 5 no test: neither is a proof, but a broken import cannot go unseen.
        return subprocess.run(command, cwd=copy, env=_environment(copy), capture_output=True, timeout=900).returncode in (1, 2)
    except subprocess.TimeoutExpired:
        return True  # a bug that hangs its test is seen
    finally:
        file.write_text(text)


def _environment(copy: Path) -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}


def page(results: dict[str, list[tuple[Mutant, bool]]]) -> Iterator[str]:
    total = sum(map(len, results.values()))
    caught = sum(ok for rows in results.values() for _, ok in rows)
    yield "# Planted bugs\n"
    yield f"Each line is a bug that `make mutants` plants in a copy of the project, and the test that sees it. {caught} of {total} are seen.\n"
    for room, rows in results.items():
        yield f"\n## {room}\n\n| bug | file | test | seen |\n|---|---|---|---|"
        for (name, file, _, _, test), ok in rows:
            yield f"| {name} | {file} | {test.rsplit('/', 1)[-1]} | {'yes' if ok else '**no**'} |"


def main(chosen: list[str]) -> int:
    results: dict[str, list[tuple[Mutant, bool]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(TOP, copy, ignore=shutil.ignore_patterns(".git", ".venv", "build", "checkpoints", "__pycache__", ".*_cache"))
        for room in chosen or rooms():
            rows = mutants(room)
            results[room] = [(mutant, seen(copy, mutant)) for mutant in track(rows, description=room)]
            for mutant, ok in results[room]:
                if not ok:
                    print(f"NOT SEEN  {room}: {mutant[0]} ({mutant[1]}) by {mutant[4]}")
    if not chosen:
        PAGE.write_text("\n".join(page(results)) + "\n")
    failed = sum(not ok for rows in results.values() for _, ok in rows)
    print(f"{sum(map(len, results.values())) - failed} planted bugs seen, {failed} not")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
