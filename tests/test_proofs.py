"""Check that the tests named in docs/proofs.md and docs/weights.md exist, and docs/evidence.md."""

import re
from pathlib import Path

from tests.algorithms.differential import BATCHES, COMPARISONS
from verlite.algorithms.aggregation import AGGREGATION_MODES

TOP = Path(__file__).parents[1]
ROW = re.compile(r"^\| (T\d+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)


def test_every_trap_has_tests_that_exist() -> None:
    rows = ROW.findall((TOP / "docs" / "proofs.md").read_text(encoding="utf-8"))
    assert [trap for trap, _, _ in rows] == [f"T{i}" for i in range(1, 33)]
    for trap, _, cell in rows:
        named = re.findall(r"`(tests/[^`]*?\.py)::(\w+)`", cell)
        assert named and len(named) == cell.count("::"), f"{trap}: {cell}"
        for path, function in named:
            assert f"def {function}(" in (TOP / path).read_text(encoding="utf-8"), (
                f"{trap}: {path}::{function}"
            )


def test_every_planted_fault_has_tests_that_exist() -> None:
    text = (TOP / "docs" / "weights.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[^`]*?\.py)::(\w+)`", text)
    assert len(named) == text.count("::") > 10
    for path, function in named:
        assert f"def {function}(" in (TOP / path).read_text(encoding="utf-8"), function


def test_evidence_lists_every_comparison_and_its_tolerance() -> None:
    text = (TOP / "docs" / "evidence.md").read_text(encoding="utf-8")
    for section, comparisons in COMPARISONS.items():
        _, _, rest = text.partition(f"### {section}\n")
        rows = re.findall(
            r"^\| `([^`]+)` \| (\d+) \|.* \| ([^ ]+) \|$", rest.partition("\n### ")[0], re.MULTILINE
        )
        assert rows == [
            (name, str(BATCHES), f"{one.tolerance:g}") for name, one in comparisons.items()
        ], f"{section} is outdated: run make evidence"
    assert all(f"| {mode} | " in text for mode in AGGREGATION_MODES)
