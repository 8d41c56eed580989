"""Running a case: the real entry point, and everything that it printed."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from tests.errors.cases import Case
from verlite import main_ppo
from verlite.cli import check
from verlite.config import plan

REPOSITORY = Path(__file__).parents[2]
HOME = "/home/me/sums"
"""What the docs call the folder of the command."""


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    code: int
    text: str
    """stdout and stderr as they came, with HOME for the folder."""


def run(case: Case, folder: Path) -> Outcome:
    """Run a case's command in `folder`, which is as `write_folder` left it."""
    with chdir(folder), environment(case):
        undo = case.files() if case.files else None
        try:
            code, text = _in_a_process(case) if case.whole_run else _here(case)
        finally:
            if undo:
                undo()
    return Outcome(
        code, text.replace(str(folder.resolve()), HOME).replace(str(REPOSITORY), "verlite")
    )


def _here(case: Case) -> tuple[int, str]:
    printed = StringIO()
    with redirect_stdout(printed), redirect_stderr(printed):
        try:
            code = (
                check.check(case.arguments)
                if case.program == "verlite check"
                else main_ppo.main(case.arguments)
            )
        except SystemExit as leave:
            code = leave.code
    return code or 0, printed.getvalue()


def _in_a_process(case: Case) -> tuple[int, str]:
    command = [sys.executable, "-m", "verlite.main_ppo", *case.arguments]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=280
    )
    return done.returncode, done.stdout


@contextmanager
def environment(case: Case) -> Iterator[None]:
    """A machine that shows no GPU, is part of no cluster, and lacks the package that the case says."""
    saved, modules = os.environ.copy(), sys.modules.copy()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["PYTHONPATH"] = str(REPOSITORY)
    for name in ("RAY_ADDRESS", "FORCE_COLOR", "TTY_COMPATIBLE"):
        os.environ.pop(name, None)
    if case.missing_package:
        sys.modules[case.missing_package] = None  # type: ignore[assignment]  # Python's own way to say that it cannot be imported
    plan.installed.cache_clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)
        if case.missing_package:
            sys.modules.pop(case.missing_package)
            if case.missing_package in modules:
                sys.modules[case.missing_package] = modules[case.missing_package]
        plan.installed.cache_clear()


def steady(text: str) -> str:
    """The text without what differs from run to run and from machine to machine."""
    text = re.sub(r"in use by process \d+", "in use by process 4711", text)
    text = re.sub(r"\d+\.\d+% of this step's", "100.0% of this step's", text)
    text = re.sub(r"(ValueError: no number in ).*", r"\1'Sp;{yzh4'", text)
    return "\n".join(line.rstrip() for line in text.splitlines()).strip("\n")
