"""docs/migration: key maps as generated, and every command in them, without training."""

import re
import shlex
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tests.convert import pages
from tests.convert.conftest import SAMPLES, Files
from tests.data_preprocess.conftest import run  # noqa: F401  (a fixture)
from verlite.cli import app
from verlite.cli.before_run import check
from verlite.config import plan

PAGES = sorted(pages.PAGES.glob("*.md"))


def commands(page: Path) -> list[list[str]]:
    """Return the commands of a page's shell blocks, as a shell splits them."""
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if line.strip()]


@pytest.mark.parametrize("name", ["openrlhf", "rlinf", "trl"])
def test_key_maps_are_up_to_date(name):
    page = (pages.PAGES / f"{name}.md").read_text(encoding="utf-8")
    assert pages.filled(page, pages.tables()[name]) == page, "python -m tests.convert.pages"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_have_the_same_parts(page):
    titles = re.findall(r"^## (.*)", page.read_text(encoding="utf-8"), re.MULTILINE)
    common = ["Example", "What differs in numbers", "What is missing", "Key map"]
    assert [title for title in titles if title != "Your own code"] == common
    assert commands(page)


@pytest.fixture
def place(tmp_path, monkeypatch, files: Files) -> Path:
    """A folder with the files that the pages name."""
    monkeypatch.chdir(tmp_path)
    known = plan.installed  # the tracker of rlinf.yaml need not be installed
    monkeypatch.setattr(plan, "installed", lambda name: name == "swanlab" or known(name))
    chat = (SAMPLES / "chat/chatml.json").read_text()
    (tmp_path / "data.json").write_text(chat)
    (tmp_path / "boba.jsonl").write_text('{"prompt": "1+1", "solutions": ["\\\\boxed{2}"]}\n')
    (tmp_path / "train.py").write_text((SAMPLES / "convert/trl_grpo.py").read_text())
    (tmp_path / "rlinf.yaml").write_text((SAMPLES / "convert/rlinf.yaml").read_text())
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_of_a_page(page, place, files, run):  # noqa: F811
    for words in commands(page):
        match words:
            case ["verlite", "convert", *rest]:
                done = CliRunner().invoke(app, ["convert", *rest])
                assert done.exit_code == 0, done.output
            case ["verlite", "check", *rest] | ["python", "-m", "verlite.main_ppo", *rest]:
                check([*rest, *files.paths(rest)])
            case ["python", script, *rest]:
                done = run(script.removeprefix("data_preprocess/"), *rest)
                assert done.returncode == 0, done.stderr
            case ["export", "VERLITE_VERL_COMPAT=1"]:
                pass  # tests/compat tries what it switches on
            case ["verlite", "serve", *rest]:
                parse(["serve", *rest])
            case _:
                raise AssertionError(f"a command that no test runs: {words}")


def parse(words: list[str]) -> None:
    """Parse a command, and run nothing."""
    node = typer.main.get_command(app)
    context = None
    while hasattr(node, "commands"):
        name = words.pop(0)
        context = node.context_class(node, parent=context, **node.context_settings)
        node = node.commands[name]
    node.make_context(node.name, words, parent=context)


def test_the_reward_function_of_the_page_of_trl(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_rewards.py").write_text(
        "def accuracy_reward(completions, solution, **kwargs):\n"
        "    pairs = zip(completions, solution, strict=True)\n"
        "    return [float(c[0]['content'] == s) for c, s in pairs]\n"
    )
    page = (pages.PAGES / "trl.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    space: dict = {}
    exec(code, space)
    scores = [space["compute_score"]("math", text, "4") for text in ("4", "5")]
    assert scores == [1.0, 0.0]
