"""docs/errors.md, made from the cases: `python -m tests.errors.page` runs them all and writes it."""

import re
import shlex
import shutil
import sys
import tempfile
import textwrap
from pathlib import Path

from tests.errors.cases import CASES, SUMS, Case, write_folder
from tests.errors.running import HOME, REPOSITORY, Outcome, run, steady

PAGE = REPOSITORY / "docs" / "errors.md"
WIDTH = 120
"""Characters of a line of output; longer ones are broken between words."""

HEAD = f"""\
# What goes wrong, and what is said about it

Each mistake below is a test: the command is run, and what it prints and its exit code are compared with this page, which
`python -m tests.errors.page` writes from [`tests/errors/cases.py`](../tests/errors/cases.py).

Exit codes: 2, the command line or a file is wrong and nothing was trained; 1, the run failed, with the first cause as the last thing
printed; 75, stopped on request with a checkpoint; 130, interrupted. `verlite check` finds what can be found without reading all data, and
lists all of it; [rules.md](rules.md) has its rules in one line each.

All commands are run in `{HOME}`, which holds a tiny model in `model`, 64 sums in `train.parquet`, and `sums.yaml`:

```yaml
{SUMS}```
"""


def page(outcomes: dict[str, Outcome]) -> str:
    """The whole page, from the outcome of each case by its heading."""
    rows = [
        f"| [{case.wrong}](#{anchor(case)}) | {first_words(outcomes[case.wrong])} |"
        for case in CASES
    ]
    table = "\n".join(["| what was done | what is said first |", "|---|---|", *rows])
    return "\n".join([HEAD, table, "", *(section(case, outcomes[case.wrong]) for case in CASES)])


def section(case: Case, outcome: Outcome) -> str:
    """One case: the command, the file if there is one, and the output."""
    command = shlex.join([*case.program.split(), *case.arguments])
    file = f"`reward.py`:\n\n```python\n{case.source}```\n\n" if case.source else ""
    return f"## {case.wrong}\n\n{file}```text\n$ {command}\n\n{printed(outcome)}\n\nexit code {outcome.code}\n```\n"


def printed(outcome: Outcome) -> str:
    """What a run printed; of one that had started, what it printed last."""
    text = steady(outcome.text)
    text = text[text.index("error: ") :] if "error: " in text and outcome.code == 1 else text
    return "\n".join(part for line in text.splitlines() for part in broken(line))


def broken(line: str) -> list[str]:
    """A line as a window of the page's width would break it."""
    indent = " " * (len(line) - len(line.lstrip()))
    return textwrap.wrap(
        line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    ) or [""]


def first_words(outcome: Outcome) -> str:
    """The error's first line, the first problem's key and rule, or the first note."""
    lines = steady(outcome.text).splitlines()
    told = [line for line in lines if line.startswith("error: ")]
    problem = [line.strip() for line in lines if line.startswith("  ")]
    words = (
        told[0].removeprefix("error: ") if told else ": ".join(problem[:2]) if problem else lines[0]
    )
    words = words if len(words) <= WIDTH else words[: WIDTH - 4].rsplit(" ", 1)[0] + " ..."
    return "`" + words.replace("|", "\\|") + "`"


def anchor(case: Case) -> str:
    """The id that Markdown readers give to a case's heading."""
    return re.sub(r"[^\w\- ]", "", case.wrong.lower()).replace(" ", "-")


def main() -> int:
    outcomes = {}
    with tempfile.TemporaryDirectory() as folder:
        write_folder(right := Path(folder).resolve() / "right")
        for number, case in enumerate(CASES):
            outcomes[case.wrong] = run(
                case, Path(shutil.copytree(right, right.with_name(str(number))))
            )
            print(f"{number + 1}/{len(CASES)} {case.wrong}", file=sys.stderr)
    PAGE.write_text(page(outcomes), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
