"""The files and commands of the tutorials on a task and on a tool work as they stand there."""

import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.models import tiny_model
from verlite.cli import app
from verlite.config import compose
from verlite.config.commands import SFT

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return an empty folder, in which the test runs and from which it imports."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("phone_book", None)


def run_page(name: str, script: str) -> str:
    """Write the files of a page, run its script and its `verlite` commands, and load its training
    commands. Return what the commands print."""
    page = (DOCS / f"{name}.md").read_text()
    for file, code in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", page, re.DOTALL):
        Path(file).write_text(code)
    runpy.run_path(script)
    printed = ""
    for command in re.findall(r"^    verlite (.+)$", page, re.MULTILINE):
        done = CliRunner().invoke(app, shlex.split(command))
        assert done.exit_code == 0, done.output
        printed += done.output

    model = tiny_model(Path("tiny"), "qwen2")
    for module, text in re.findall(r"^python -m verlite\.(main_\w+)(.+?)```", page, re.M | re.S):
        words = shlex.split(text.replace("\\\n", " "))
        words = [re.sub(r"(model\.path=).*", rf"\g<1>{model}", word) for word in words]
        if module == "main_sft":
            loaded = compose(None, words, command=SFT)
        else:
            loaded = compose(words[1], words[2:])
        assert [str(note) for note in loaded.notes] == [], module
    return printed


def test_the_files_and_commands_of_the_task(folder):
    run_page("tutorial_task", "words.py")
    reward = runpy.run_path("sort_reward.py")["compute_score"]
    assert [reward("", text, "bmny") for text in ("bmny", "mbny", "bmn", "ynmb")] == [1, 0.25, 0, 0]


def test_the_files_and_commands_of_the_tool(folder):
    printed = run_page("tutorial_tool", "names.py")
    shown = re.search(r"```text\n('\?dml'.+\n.+\n)", (DOCS / "tutorial_tool.md").read_text())
    assert shown and shown[1] in printed
