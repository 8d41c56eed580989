"""The files and commands of docs/tutorial_task.md work as they stand there."""

import re
import runpy
import shlex
from pathlib import Path

from typer.testing import CliRunner

from tests.models import tiny_model
from verlite.cli import app
from verlite.config import compose, sft

PAGE = (Path(__file__).parents[2] / "docs" / "tutorial_task.md").read_text()


def test_the_files_and_commands_of_the_task(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, code in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL):
        Path(name).write_text(code)
    runpy.run_path("words.py")
    for command in re.findall(r"^    verlite (.+)$", PAGE, re.MULTILINE):
        done = CliRunner().invoke(app, shlex.split(command))
        assert done.exit_code == 0, done.output
    reward = runpy.run_path("sort_reward.py")["compute_score"]
    assert [reward("", text, "bmny") for text in ("bmny", "mbny", "bmn", "ynmb")] == [1, 0.25, 0, 0]

    model = str(tiny_model(tmp_path / "model", "qwen2"))
    for module, text in re.findall(r"^python -m verlite\.(main_\w+)(.+?)```", PAGE, re.M | re.S):
        words = shlex.split(text.replace("\\\n", " "))
        words = [re.sub(r"(model\.path=)sort/.*", rf"\g<1>{model}", word) for word in words]
        if module == "main_sft":
            loaded = sft.compose(None, words)
        else:
            loaded = compose(words[1], words[2:])
        assert [str(note) for note in loaded.notes] == [], module
