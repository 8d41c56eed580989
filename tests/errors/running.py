"""Run the command of a case and capture everything it prints."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import typer
from typer.testing import CliRunner

from tests.errors.cases import SFT, Case
from verlite import hub, main_ppo, main_sft
from verlite.cli import app
from verlite.cli.before_run import check
from verlite.config import plan

REPOSITORY = Path(__file__).parents[2]
HOME = "/home/me/sums"
"""The name of the command's folder in the docs."""


@dataclass(frozen=True)
class Outcome:
    """The result of a command."""

    code: int
    text: str
    """stdout and stderr in order, with HOME for the folder."""


def run(case: Case, folder: Path) -> Outcome:
    """Run a case's command in `folder`, which contains the files of `write_folder`."""
    with chdir(folder), environment(case):
        undo = case.files() if case.files else None
        try:
            code, text = _run_in_new_process(case) if case.whole_run else _run_here(case)
        finally:
            if undo:
                undo()
    text = text.replace(str(folder.resolve()), HOME).replace(str(REPOSITORY), "verlite")
    return Outcome(code, text)


def _run_here(case: Case) -> tuple[int, str]:
    if case.program.startswith("verlite convert"):
        done = CliRunner().invoke(app, [*case.program.split()[1:], *case.arguments])
        return done.exit_code, done.output
    commands = {"verlite check": check, SFT: main_sft.main}
    command = commands.get(case.program, main_ppo.main)
    printed = StringIO()
    offline = patch.object(hub, "unreachable", lambda: "no network")
    with redirect_stdout(printed), redirect_stderr(printed), offline:
        try:
            code = command(case.arguments) or 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        except typer.Exit as stop:
            code = stop.exit_code
    return code, printed.getvalue()


def _run_in_new_process(case: Case) -> tuple[int, str]:
    command = [sys.executable, "-m", "verlite.main_ppo", *case.arguments]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=280
    )
    return done.returncode, done.stdout


@contextmanager
def environment(case: Case) -> Iterator[None]:
    """Simulate a machine without GPUs and Ray cluster, and without the case's missing package."""
    saved = os.environ.copy()
    modules = sys.modules.copy()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["PYTHONPATH"] = str(REPOSITORY)
    for name in ("RAY_ADDRESS", "FORCE_COLOR", "TTY_COMPATIBLE"):
        os.environ.pop(name, None)
    missing = case.missing_package
    if missing:
        sys.modules[missing] = None  # type: ignore[assignment]  # None: the import fails
    plan.installed.cache_clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)
        if missing:
            sys.modules.pop(missing)
            if missing in modules:
                sys.modules[missing] = modules[missing]
        plan.installed.cache_clear()


def normalize(text: str) -> str:
    """Replace the parts of an output that differ between runs and machines."""
    # A phase that lasts a second is shown, with the time.
    text = re.sub(r"(?m)^\d\d-\d\d \d\d:\d\d:\d\d (checking|starting|reading|still) .*\n", "", text)
    text = re.sub(r"(?m)^\d\d-\d\d \d\d:\d\d:\d\d ", "", text)
    text = re.sub(r"'[0-9a-f]{12}'", "'0123456789ab'", text)  # hashes of Parquet files
    text = re.sub(r"in use by process \d+", "in use by process 4711", text)
    text = re.sub(r"\d+\.\d+% of this step's", "100.0% of this step's", text)
    text = re.sub(r"(ValueError: no number in ).*", r"\1'Sp;{yzh4'", text)
    text = re.sub(r"(?m)^(  response: ).*", r"\1Sp;{yzh4", text)
    return "\n".join(line.rstrip() for line in text.splitlines()).strip("\n")
