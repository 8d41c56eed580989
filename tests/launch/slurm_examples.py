"""The scripts in recipes/cluster/slurm, written by the commands of its README.

python -m tests.launch.slurm_examples       # write them again
"""

import contextlib
import io
import os
import re
import shlex
from pathlib import Path

from verlite.cli import app

FOLDER = Path(__file__).parents[2] / "recipes/cluster/slurm"
EXAMPLE_FOLDER = "/shared/verlite"


def commands() -> dict[str, list[str]]:
    """Return {file name: arguments of `verlite`}."""
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    found = {}
    for name, block in re.findall(r"^## (\S+\.sbatch):.*?```bash\n(.*?)```", text, re.M | re.S):
        found[name] = shlex.split(block.replace("\\\n", ""))[1:]
    return found


def write(arguments: list[str]) -> str:
    """Return the script that a command writes in EXAMPLE_FOLDER."""
    head, tail = arguments[: arguments.index("--")], arguments[arguments.index("--") :]
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        code = app([*head, "--script=-", *tail], standalone_mode=False)
    assert not code, errors.getvalue()
    return output.getvalue().replace(os.getcwd(), EXAMPLE_FOLDER)


if __name__ == "__main__":
    os.environ.pop("PYTHONPATH", None)
    for name, arguments in commands().items():
        (FOLDER / name).write_text(write(arguments), encoding="utf-8")
        print(FOLDER / name)
