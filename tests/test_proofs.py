"""docs/proofs.md names tests that exist, for every trap."""

import re
from pathlib import Path

TOP = Path(__file__).parents[1]
ROW = re.compile(r"^\| (T\d+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)


def test_every_trap_has_tests_that_exist() -> None:
    rows = ROW.findall((TOP / "docs" / "proofs.md").read_text(encoding="utf-8"))
    assert [trap for trap, _, _ in rows] == [f"T{i}" for i in range(1, 31)]
    for trap, _, cell in rows:
        named = re.findall(r"`(tests/[^`]*?\.py)::(\w+)`", cell)
        assert named and len(named) == cell.count("::"), f"{trap}: {cell}"
        for path, function in named:
            assert f"def {function}(" in (TOP / path).read_text(encoding="utf-8"), f"{trap}: {path}::{function}"
