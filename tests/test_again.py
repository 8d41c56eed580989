"""The second try of failed tests that start processes: which get one, and what it decides."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import again

pytestmark = pytest.mark.process

TESTS = """
import pathlib, pytest
def ran(name):
    file = pathlib.Path("ran", name)
    file.write_text(file.read_text() + "1" if file.exists() else "1")
    return len(file.read_text())
def test_fine():
    ran("fine")
{mark}
@pytest.mark.parametrize("number", range({failing}))
def test_unstable(number):
    assert ran(f"unstable_{{number}}") > {failures}
"""
"""`failing` tests of which each fails the first `failures` times. Each notes its runs in ran/."""


@pytest.fixture
def tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, list[int]]]:
    """Run tests, let `again` do what follows, and return the status and how often each test ran,
    the one that never fails first."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    Path("pytest.ini").write_text("[pytest]\nmarkers =\n    process\n")
    Path("ran").mkdir()

    def run(failing: int, failures: int, mark: str = "@pytest.mark.process"):
        text = TESTS.format(failing=failing, failures=failures, mark=mark)
        Path("test_some.py").write_text(text)
        command = [sys.executable, "-m", "pytest", "-q"]
        first = subprocess.run(command, capture_output=True, text=True, check=False)
        assert first.returncode == pytest.ExitCode.TESTS_FAILED, first.stdout
        status = again.main(first.returncode)
        return status, [len(file.read_text()) for file in sorted(Path("ran").iterdir())]

    return run


def test_tests_that_pass_the_second_time_are_named(tried, capfd):
    assert tried(failing=3, failures=1) == (0, [1, 2, 2, 2])
    names = ", ".join(f"test_some.py::test_unstable[{number}]" for number in range(3))
    assert (
        f"UNSTABLE: failed beside other tests and passed alone: {names}" in capfd.readouterr().out
    )


def test_a_test_that_fails_again_keeps_the_status(tried, capfd):
    assert tried(failing=1, failures=2) == (1, [1, 2])
    assert "UNSTABLE" not in capfd.readouterr().out


def test_more_than_three_get_no_second_try(tried, capfd):
    assert tried(failing=4, failures=1) == (1, [1, 1, 1, 1, 1])
    assert "No second try: 4 tests failed, not 1 to 3." in capfd.readouterr().out


def test_a_test_without_the_mark_gets_no_second_try(tried, capfd):
    assert tried(failing=1, failures=1, mark="") == (1, [1, 1])
    assert "No second try: a failed test starts no process" in capfd.readouterr().out


def test_another_error_keeps_its_status(capfd):
    assert again.main(pytest.ExitCode.INTERRUPTED) == pytest.ExitCode.INTERRUPTED
    assert capfd.readouterr().out == ""
