"""The files and commands of docs/tutorial_data.md work as they stand there."""

import csv
import re
import runpy
from pathlib import Path

from typer.testing import CliRunner

from tests.models import tiny_model
from verlite.cli import app
from verlite.config import compose

PAGE = (Path(__file__).parents[2] / "docs" / "tutorial_data.md").read_text()
MODEL = "actor_rollout_ref.model.path="


def test_the_files_and_commands_of_the_tutorial(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, code in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL):
        Path(name).write_text(code)
    runpy.run_path("problems.py")
    with open("problems.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 200

    for command in re.findall(r"^    verlite (.+)$", PAGE, re.MULTILINE):
        done = CliRunner().invoke(app, command.split())
        # `contract` has one remark, which the page explains.
        assert done.exit_code == (command.startswith("contract")), done.output

    (check,) = re.findall(
        r"^verlite check --config-name (\w+) \\\n((?:    .+\n)+)", PAGE, re.MULTILINE
    )
    name, words = check[0], check[1].replace("\\\n", " ").split()
    model = tiny_model(tmp_path / "model", "qwen2")
    loaded = compose(name, [w if not w.startswith(MODEL) else f"{MODEL}{model}" for w in words])
    assert [str(note) for note in loaded.notes] == []

    reward = runpy.run_path("my_reward.py")["compute_score"]
    assert [reward("", text, "173") for text in ("3171", "3170", "2171", "317", "3x71")] == [
        1.0,
        0.5,
        0.0,
        0.0,
        0.0,
    ]
