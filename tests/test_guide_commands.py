"""The commands of guides that OpenRLHF, verl, Search-R1 and RLinf users follow, in
tests/samples/guides.

Each stands in docs/guides.md with what to type here. Training commands are checked in
tests/config/test_guides.py.
"""

import re
import shlex
import warnings
from pathlib import Path

import click
import pytest

with warnings.catch_warnings():  # Ray's own
    warnings.simplefilter("ignore")
    from ray.dashboard.modules.job.cli import job_cli_group
    from ray.scripts.scripts import cli as ray_cli
    from ray.scripts.scripts import start as ray_start

ROOT = Path(__file__).parents[1]
SAMPLES = ROOT / "tests" / "samples" / "guides"
GUIDES = sorted(file.stem for file in SAMPLES.glob("*.sh"))
PAGE = (ROOT / "docs" / "guides.md").read_text()
CLUSTER_PAGE = (ROOT / "docs" / "cluster.md").read_text()


def commands(guide: str) -> list[str]:
    """Return the commands of a guide, continuation lines joined."""
    text = (SAMPLES / f"{guide}.sh").read_text().replace("\\\n", " ")
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def rows(page: str, title: str) -> list[list[str]]:
    """Return the cells of the table below a heading."""
    section = re.split(r"\n##+ ", re.split(rf"\n##+ {title}\n", page)[1])[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    start = max(i for i, line in enumerate(lines) if set(line) <= set("|- ")) + 1
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[start:]]


def typed(cell: str) -> list[str]:
    """Return the commands in a cell."""
    return [text.replace("\\|", "|") for text in re.findall(r"`([^`]+)`", cell)]


ROWS = {guide: rows(PAGE, f"Guide {guide}") for guide in GUIDES}
CASES = [(guide, command) for guide in GUIDES for command in commands(guide)]


def matches(there: str, command: str) -> bool:
    """Return whether a row is about a command. "..." in it stands for any text."""
    pattern = ".*".join(re.escape(part.strip()) for part in there.split("..."))
    return bool(re.fullmatch(pattern.replace(r"\ ", " *"), command))


@pytest.mark.parametrize(("guide", "command"), CASES, ids=[f"{g} {c[:50]}" for g, c in CASES])
def test_every_command_has_a_row(guide, command):
    found = [row for row in ROWS[guide] if any(matches(there, command) for there in typed(row[0]))]
    assert found, f"docs/guides.md has no row for {command!r}"


@pytest.mark.parametrize("guide", GUIDES)
def test_every_row_is_about_a_command_and_is_whole(guide):
    for there, here, result, seconds in ROWS[guide]:
        assert here and result and seconds
        for text in typed(there):
            assert any(matches(text, command) for command in commands(guide)), text


def here_commands(words: str) -> list[str]:
    """Return the commands of the right-hand columns that contain `words`."""
    cells = [row[1] for guide in GUIDES for row in ROWS[guide]]
    return [text for cell in cells for text in typed(cell) if words in text]


def parse_ray(command: str) -> None:
    """Parse a `ray ...` command with Ray's own parser. Raises click.ClickException."""
    command = re.split(r"\s&$|\s2>&1|;$", command)[0]
    command = re.sub(r"<[^>]*>", "raysubmit_1", command).replace("$port", "6379")
    command = re.sub(r"\$\{?SLURM_\w+\}?", "8", command)
    words = shlex.split(re.sub(r"^\w+=\S+ ", "", command))
    node: click.Command = ray_cli
    while isinstance(node, click.Group):
        words = words[1:] if words[0] == "ray" else words
        node = node.commands[words.pop(0)]
    node.make_context(node.name, words)  # parses, and runs nothing


RAY_COMMANDS = [
    *(re.sub(r"^.*?(?=ray )", "", c) for _, c in CASES if re.search(r"(^| )ray (start|job|st)", c)),
    *(re.sub(r"^.*?(?=\bray )", "", c) for c in here_commands("ray ") if "ray_" not in c),
]


GONE = ("--storage",)
"""Options that Ray has no longer."""


@pytest.mark.parametrize("command", sorted(set(RAY_COMMANDS)))
def test_ray_knows_the_options(command):
    command = re.sub(r"\$RAY_\w+", "8100", command)
    if any(option in command for option in GONE):
        with pytest.raises(click.NoSuchOption, match="--storage"):
            parse_ray(command)
        command = re.sub(rf"({'|'.join(GONE)})=\S+", "", command)
    parse_ray(command)


def test_the_parser_refuses_what_ray_does_not_know():
    with pytest.raises(click.NoSuchOption):
        parse_ray("ray start --head --storage=/tmp")


@pytest.mark.parametrize("guide", GUIDES)
def test_scripts_exist(guide):
    """Each script of the right-hand columns exists here."""
    scripts = [
        script
        for _, here, _, _ in ROWS[guide]
        for text in typed(here)
        for script in re.findall(
            r"(?:bash|python3?) (?:\$?\w+/)*?((?:[\w.-]+/)*[\w.-]+\.(?:sh|py))\b", text
        )
    ]
    missing = [script for script in scripts if not (ROOT / script).is_file()]
    assert missing == []


# Guide 000's options of `ray start`


def test_the_table_of_options_is_true_for_the_installed_ray():
    table = rows(CLUSTER_PAGE, "Options of `ray start` in guide 000")
    options = {name for parameter in ray_start.params for name in parameter.opts}
    hidden = {name for p in ray_start.params if getattr(p, "hidden", False) for name in p.opts}
    said = {typed(option)[0]: state for option, state, _ in table}
    assert len(said) >= 10
    for option, state in said.items():
        if option not in options:
            assert state == "gone", option
        else:
            assert state == ("hidden" if option in hidden else "yes"), option


def test_job_commands_exist():
    assert {"submit", "list", "status", "logs", "stop"} <= set(job_cli_group.commands)
