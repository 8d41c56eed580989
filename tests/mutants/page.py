"""docs/mutants.md: the table of all mutants, with the result of the last campaign."""

import re

from tests.mutants import PACKAGES, mutants
from tests.mutants.plant import TOP

PAGE = TOP / "docs" / "mutants.md"
CAUGHT = ("caught", "hangs")
INTRODUCTION = """# Mutants

A mutant is a known bug, planted on purpose to see whether a test notices it. Each row names the
bug, the function that is patched, the test that must fail, and the result of the last campaign:
`caught` (the test fails), `hangs` (the test runs out of time), or **missed**.

`make mutants` plants all of them and rewrites this page; it fails if one is missed. With a package
and `--new`, `python -m tests.mutants` plants only those of the package that have no good result
here yet.

To add one, add an entry to `tests/mutants/PACKAGE.py`, if no other mutant of that mechanism plants
the same kind of fault: a sign, an order or a comparison; a normalization; a mask, a position or an
off-by-one; a factor, a term or a limit that is dropped; an error that is no longer raised; state
that is lost, doubled or left behind; an outsider's input or a secret that passes. What only changes
the words of a message, a note or a page does not count. A state machine whose rules a simulation
checks has one for each rule.
"""
_ROW = re.compile(r"^\| ([^|]+) \| `[^|]+` \| [^|]+ \| ([^|]+) \|$")


def read_page() -> dict[str, dict[str, str]]:
    """Results of the last campaign: package -> bug -> outcome."""
    results: dict[str, dict[str, str]] = {package: {} for package in PACKAGES}
    package = ""
    for line in PAGE.read_text(encoding="utf-8").splitlines() if PAGE.exists() else []:
        if line.startswith("## "):
            package = line.removeprefix("## ")
        elif package in results and (row := _ROW.match(line)):
            results[package][row[1]] = row[2]
    return results


def page_text(results: dict[str, dict[str, str]]) -> str:
    """The page for these results."""
    listed = {package: mutants(package) for package in PACKAGES}
    total = sum(len(rows) for rows in listed.values())
    caught = sum(
        results[package].get(m.bug) in CAUGHT for package, rows in listed.items() for m in rows
    )
    lines = [INTRODUCTION, f"{caught} of {total} mutants are caught.", ""]
    for package, rows in listed.items():
        lines += [f"## {package}", "", "| bug | patched | test | result |", "|---|---|---|---|"]
        for mutant in rows:
            tests = "<br>".join(f"`{test.removeprefix('tests/')}`" for test in mutant.tests)
            target = mutant.target.removeprefix("verlite.")
            outcome = results[package].get(mutant.bug, "not run")
            lines.append(f"| {mutant.bug} | `{target}` | {tests} | {outcome} |")
        lines.append("")
    return "\n".join(lines)


def write_page(results: dict[str, dict[str, str]]) -> None:
    """Write the page."""
    PAGE.write_text(page_text(results), encoding="utf-8")
