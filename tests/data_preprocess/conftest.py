"""Run a preprocessing script as users do."""

import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@dataclass
class Done:
    """The result of a script."""

    returncode: int
    stdout: str
    stderr: str


Run = Callable[..., Done]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run scripts in this process: a new process spends a second on imports."""

    def run_script(script: str, *arguments: object) -> Done:
        monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
        code = 0
        try:
            runpy.run_path(str(ROOT / "data_preprocess" / script), run_name="__main__")
        except SystemExit as end:
            code = end.code
        return Done(code, *capsys.readouterr())

    return run_script
