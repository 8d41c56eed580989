"""Each mistake gives the right exit code and message, and docs/errors.md shows the real output."""

import shutil
from pathlib import Path

import pytest

from tests.errors.cases import CASES, Case, write_folder
from tests.errors.page import HEAD, PAGE, page, section
from tests.errors.running import Outcome, normalize, run

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with valid files. It is copied for every case."""
    folder = tmp_path_factory.mktemp("errors") / "valid"
    write_folder(folder)
    return folder


@pytest.mark.parametrize("case", CASES, ids=[case.mistake for case in CASES])
def test_mistake_is_explained(case: Case, valid: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(valid, tmp_path / "sums")).resolve()
    outcome = run(case, folder)
    assert outcome.code == case.code, outcome.text
    assert "Traceback" not in outcome.text or 'reward.py", line' in outcome.text
    page_text = PAGE.read_text(encoding="utf-8")
    assert section(case, outcome) in page_text, (
        "docs/errors.md is out of date: python -m tests.errors.page"
    )


def test_page_has_all_cases_and_nothing_else() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.startswith(HEAD)
    lines = text.splitlines()
    headings = [line.removeprefix("## ") for line in lines if line.startswith("## ")]
    assert headings == [case.mistake for case in CASES]
    rows = [line.partition("](")[0] for line in lines if line.startswith("| [")]
    assert rows == [f"| [{heading}" for heading in headings]
    assert len(set(headings)) == len(headings) >= 30


def test_normalize_removes_what_differs_between_machines() -> None:
    key = "trainer.default_local_dir=/home/me/sums/run"
    one = f"error: {key} is in use by process 17.  \nValueError: no number in 'abc'"
    other = f"error: {key} is in use by process 23456.\nValueError: no number in ''\n"
    assert normalize(one) == normalize(other)
    outcomes = {case.mistake: Outcome(2, "error: message") for case in CASES}
    assert page(outcomes).count("`message`") == len(CASES)
