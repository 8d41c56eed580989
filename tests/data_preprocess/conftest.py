"""Running a preprocessing script as users run it."""

import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@dataclass
class Done:
    """What a finished script leaves behind."""

    returncode: int
    stdout: str
    stderr: str


Run = Callable[..., Done]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a script in this process, which saves the second that a new one takes to import everything."""

    def run_here(script: str, *arguments: object) -> Done:
        monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
        code = 0
        try:
            runpy.run_path(str(ROOT / "data_preprocess" / script), run_name="__main__")
        except SystemExit as end:
            code = end.code
        return Done(code, *capsys.readouterr())

    return run_here
