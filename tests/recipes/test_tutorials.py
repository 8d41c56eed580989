"""The commands of the tutorials have options and keys that exist."""

import re
import shlex
from pathlib import Path

import pytest
import typer

from verlite.cli import app
from verlite.config.commands import PPO, SFT
from verlite.config.load import compose, parse_argv

ROOT = Path(__file__).parents[2]
PAGES = ("tutorial_agent", "tutorial_sft_rl", "tutorial_debug", "tutorial_nodes")
RL, FINE_TUNING = "python -m verlite.main_ppo", "python -m verlite.main_sft"


def commands(page: str) -> list[str]:
    """Return the commands in the code blocks of a page, without comments."""
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8").replace("\\\n", " ")
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    rest = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    lines = "\n".join(blocks).splitlines() + re.findall(r"^    (.+)$", rest, re.MULTILINE)
    return [shlex.join(shlex.split(line, comments=True)) for line in lines if line.strip()]


def check_training(words: list[str], is_sft: bool = False) -> None:
    """Raise ConfigError for keys and values that do not exist. Files are not looked at."""
    name, folder, overrides, _ = parse_argv(words)
    loaded = compose(name, overrides, folder, check=False, command=SFT if is_sft else PPO)
    assert not loaded.notes


def check_command(words: list[str]) -> None:
    """Parse a command line of `verlite` without running it."""
    command = typer.main.get_command(app)
    context = command.make_context("verlite", list(words))
    while hasattr(command, "resolve_command"):
        name, command, words = command.resolve_command(context, words)
        context = command.make_context(name, list(words), parent=context)


@pytest.mark.parametrize("page", PAGES)
def test_every_command_can_be_typed(page):
    found = commands(page)
    assert len(found) > 3
    for line in found:
        words = shlex.split(line)
        if line.startswith("verlite supervise -- "):
            line = line.removeprefix("verlite supervise -- ")
            words = shlex.split(line)
        if line.startswith((RL, FINE_TUNING)):
            check_training(words[3:], line.startswith(FINE_TUNING))
        elif words[:2] == ["verlite", "check"]:
            check_training(words[2:])
        elif "verlite" in words[:2]:
            check_command(words[words.index("verlite") + 1 :])
        elif words[0] == "python" and words[1:3] != ["-m", "venv"]:
            assert (ROOT / words[1]).is_file(), line
        else:
            assert words[0] in ("agent_env/bin/pip", "cp", "make", "python", "source"), line


def test_a_wrong_command_is_found():
    with pytest.raises(Exception, match="No such option"):
        check_command(["show", "run", "--wurst", "3"])
    with pytest.raises(Exception, match="No such command"):
        check_command(["lst"])
    with pytest.raises(Exception, match="trainer.total_steps"):
        check_training(["--config-name", "quickstart", "trainer.total_steps=3"])


def test_the_rewards_of_the_debugging_tutorial():
    text = (ROOT / "docs" / "tutorial_debug.md").read_text(encoding="utf-8")
    scores = []
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        names: dict = {}
        exec(code, names)
        reward = names["compute_score"]
        scores.append([reward("", answer, "3171") for answer in ("3171", "\\boxed{3171}", "3170")])
    assert scores == [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]
