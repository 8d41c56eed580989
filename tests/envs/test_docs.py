"""The example environment of docs/agents.md works."""

import asyncio
import re
import shlex
from pathlib import Path

from typer.testing import CliRunner

from verlite.cli import app

PAGE = Path(__file__).parents[2] / "docs" / "agents.md"


def test_example_of_the_page_works():
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict = {}
    exec(code, names)
    factory = names["Game"](bonus=0.5)
    asyncio.run(factory.check())
    env = factory.env({"secret": 7})
    answers = [asyncio.run(env.step(text, last=False)) for text in ("5\n", "9", "x", "7")]
    assert [(step.obs, step.valid, step.done, step.reward) for step in answers] == [
        ("higher\n", True, False, 0.5),
        ("lower\n", True, False, 0.5),
        ("a number, please\n", False, False, 0.0),
        ("", True, True, 1.0),
    ]


def test_the_contract_command_of_the_page_passes(tmp_path, monkeypatch):
    page = PAGE.read_text()
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (row,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    (command,) = re.findall(r"    verlite (contract env .*?)\n\n", page, re.DOTALL)
    (tmp_path / "my_game.py").write_text(code)
    (tmp_path / "rows.jsonl").write_text(row.replace("\n", " ") + "\n")
    result = CliRunner().invoke(app, shlex.split(command.replace("\n    ", "\n")))
    assert result.exit_code == 0, result.output
    assert ", 1 row: " in result.output and "keeps the contract" in result.output
