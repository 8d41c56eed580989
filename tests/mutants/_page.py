"""docs/mutants.md: what is seen, room by room. The page is also the campaign's memory, so it is read back line by line."""

import re
from pathlib import Path

from tests.mutants import Mutant, mark, mutants, rooms
from tests.mutants._classic import CLASSIC

TOP = Path(__file__).parents[2]
PAGE = TOP / "docs" / "mutants.md"
ROW = re.compile(r"\| (?P<name>[^|]+) \| [^|]+ \| [^|]+ \| (?P<seen>[^|]+) \| (?P<mark>[0-9a-f]{6}) \|")
SEEN = ("yes", "hangs")
NONE = "**not planted**"

Results = dict[str, str]
"""mark -> yes (a test fails), hangs (a test ran out of time), **no**"""

INTRO = """# Planted bugs

`make mutants` plants each of these bugs, one at a time, in a copy of the project and runs the test named beside it, which must fail.
A bug that nothing sees is a failing result. {seen} of {total} are seen.

`python -m tests.mutants ROOM ...` plants one room's bugs and rewrites its part of this page; `--new` plants only those that have no good
result here yet; `--jobs N` plants N at a time. "yes": the test fails; "hangs": it runs out of time. The mark changes with the bug's text, file
or test. Before a room's bugs are planted its tests must pass without any.
"""


def read() -> Results:
    text = PAGE.read_text() if PAGE.exists() else ""
    return {row["mark"]: row["seen"] for row in ROW.finditer(text)}


def write(results: Results) -> None:
    PAGE.write_text(page(results))


def page(results: Results) -> str:
    """The page of these results; a bug of the lists without a result is shown as not planted."""
    lists = {room: mutants(room) for room in rooms()}
    shown = {(room, row[0]): results.get(mark(row), NONE) for room, rows in lists.items() for row in rows}
    lines = [INTRO.format(seen=sum(seen in SEEN for seen in shown.values()), total=len(shown))]
    lines += ["## The classic twenty\n", "| bug | planted as | seen |", "|---|---|---|"]
    for bug, planted in CLASSIC.items():
        names = "; ".join(f"{name} ({room})" for room, name in planted)
        lines.append(f"| {bug} | {names} | {', '.join(dict.fromkeys(shown.get(one, NONE) for one in planted))} |")
    for room, rows in lists.items():
        lines += [f"\n## {room}\n", "| bug | file | test | seen | mark |", "|---|---|---|---|---|"]
        lines += [_row(mutant, shown[room, mutant[0]]) for mutant in rows]
    return "\n".join(lines) + "\n"


def _row(mutant: Mutant, seen: str) -> str:
    name, file, _, _, test = mutant
    nodes = ", ".join(f"`{node.rsplit('/', 1)[-1]}`" for node in test.split())
    return f"| {name} | {file} | {nodes} | {seen} | {mark(mutant)} |"
