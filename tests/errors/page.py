"""Generate docs/errors.md: `python -m tests.errors.page` runs all cases and writes the page."""

import re
import shlex
import shutil
import sys
import tempfile
import textwrap
from pathlib import Path

from tests.errors.cases import CASES, SUMS, Case, write_folder
from tests.errors.running import HOME, REPOSITORY, Outcome, normalize, run

PAGE = REPOSITORY / "docs" / "errors.md"
WIDTH = 120
"""Maximum characters per line of output. Longer lines are wrapped between words."""

HEAD = f"""\
# Errors and their messages

Each section shows one mistake, the command, and its complete output. Tests run every command and
compare the output and exit code with this page. `python -m tests.errors.page` generates it from
[`tests/errors/cases.py`](../tests/errors/cases.py).

[failures.md](failures.md) explains the exit codes.

`verlite check` finds all problems that can be found without reading all data.
[rules.md](rules.md) lists its rules.

The commands run in `{HOME}`. It contains a tiny model in `model`, 64 sums in `train.parquet`, and
`sums.yaml`:

```yaml
{SUMS}```
"""


def page(outcomes: dict[str, Outcome]) -> str:
    """Return the whole page. `outcomes` has the result of each case by its heading."""
    lines = [HEAD, "| mistake | start of the message |", "|---|---|"]
    for case in CASES:
        summary = first_words(outcomes[case.mistake])
        lines.append(f"| [{case.mistake}](#{anchor(case)}) | {summary} |")
    lines.append("")
    lines += [section(case, outcomes[case.mistake]) for case in CASES]
    return "\n".join(lines)


def section(case: Case, outcome: Outcome) -> str:
    """Return the section of one case: its file, if any, its command, and the output."""
    command = shlex.join([*case.program.split(), *case.arguments])
    file = f"`reward.py`:\n\n```python\n{case.source}```\n\n" if case.source else ""
    output = f"$ {command}\n\n{shown_output(outcome)}\n\nexit code {outcome.code}"
    return f"## {case.mistake}\n\n{file}```text\n{output}\n```\n"


def shown_output(outcome: Outcome) -> str:
    """Return the output; for a run that failed after its start, only the final error."""
    text = normalize(outcome.text)
    if outcome.code == 1 and "error: " in text:
        text = text[text.index("error: ") :]
    return "\n".join(part for line in text.splitlines() for part in wrap(line))


def wrap(line: str) -> list[str]:
    """Wrap a line at the page's width and keep its indentation."""
    indent = " " * (len(line) - len(line.lstrip()))
    parts = textwrap.wrap(
        line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return parts or [""]


def first_words(outcome: Outcome) -> str:
    """Return the first line of the error, the first problem's key and rule, or the first note."""
    lines = normalize(outcome.text).splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    problem = [line.strip() for line in lines if line.startswith("  ")]
    if errors:
        words = errors[0].removeprefix("error: ")
    elif problem:
        words = ": ".join(problem[:2])
    else:
        words = lines[0]
    if len(words) > WIDTH:
        words = words[: WIDTH - 4].rsplit(" ", 1)[0] + " ..."
    return "`" + words.replace("|", "\\|") + "`"


def anchor(case: Case) -> str:
    """Return the id that Markdown renderers give to a case's heading."""
    return re.sub(r"[^\w\- ]", "", case.mistake.lower()).replace(" ", "-")


def main() -> int:
    outcomes = {}
    with tempfile.TemporaryDirectory() as folder:
        valid = Path(folder).resolve() / "valid"
        write_folder(valid)
        for number, case in enumerate(CASES):
            copy = Path(shutil.copytree(valid, valid.with_name(str(number))))
            outcomes[case.mistake] = run(case, copy)
            print(f"{number + 1}/{len(CASES)} {case.mistake}", file=sys.stderr)
    PAGE.write_text(page(outcomes), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
