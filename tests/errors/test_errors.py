"""Each mistake ends with the right exit code and the words that help, and docs/errors.md shows what is really printed."""

import shutil
from pathlib import Path

import pytest

from tests.errors.cases import CASES, Case, write_folder
from tests.errors.page import HEAD, PAGE, page, section
from tests.errors.running import Outcome, run, steady


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is copied for every case."""
    folder = tmp_path_factory.mktemp("errors") / "right"
    write_folder(folder)
    return folder


@pytest.mark.parametrize("case", CASES, ids=[case.wrong for case in CASES])
def test_a_mistake_is_explained(case: Case, right: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(right, tmp_path / "sums")).resolve()
    outcome = run(case, folder)
    assert outcome.code == case.code, outcome.text
    place = 0
    for words in case.says:
        found = outcome.text.find(words, place)
        assert found >= 0, f"{words!r} is missing, or comes too early, in:\n{outcome.text}"
        place = found + len(words)
    assert "Traceback" not in outcome.text or 'reward.py", line' in outcome.text
    assert section(case, outcome) in PAGE.read_text(encoding="utf-8"), (
        "docs/errors.md is out of date: python -m tests.errors.page"
    )


def test_the_page_has_every_case_and_nothing_else() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.startswith(HEAD)
    headings = [line.removeprefix("## ") for line in text.splitlines() if line.startswith("## ")]
    assert headings == [case.wrong for case in CASES]
    assert [line.partition("](")[0] for line in text.splitlines() if line.startswith("| [")] == [
        f"| [{name}" for name in headings
    ]
    assert len(set(headings)) == len(headings) >= 30


def test_the_page_is_steady() -> None:
    """What differs between two runs on two machines does not reach the page."""
    one = steady(
        "error: trainer.default_local_dir=/home/me/sums/run is in use by process 17.  \nValueError: no number in 'abc'"
    )
    assert one == steady(
        "error: trainer.default_local_dir=/home/me/sums/run is in use by process 23456.\nValueError: no number in ''\n"
    )
    outcomes = {case.wrong: Outcome(2, "error: told") for case in CASES}
    assert page(outcomes).count("`told`") == len(CASES)
