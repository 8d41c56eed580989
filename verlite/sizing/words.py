"""Numbers and tables as `verlite plan` prints them."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

GIB = 2**30


def size(number: float) -> str:
    """Return bytes in words: 14.2 GiB, 35 MiB, 256 bytes, 0."""
    if abs(number) >= 0.95 * GIB:
        return f"{number / GIB:,.1f} GiB"
    if abs(number) >= 0.95 * 2**20:
        return f"{number / 2**20:,.0f} MiB"
    if abs(number) >= 0.95 * 2**10:
        return f"{number / 2**10:,.0f} KiB"
    return f"{number:,.0f} bytes" if number else "0"


def amount(number: float) -> str:
    """Return a large number in words: 7.62 billion, 494.0 million, 12,345."""
    if number >= 10**9:
        return f"{number / 10**9:,.2f} billion"
    return f"{number / 10**6:,.1f} million" if number >= 10**6 else f"{number:,.0f}"


def flops(number: float) -> str:
    """Return a number of floating-point operations: 15.1 GFLOP, 377.1 PFLOP."""
    for power, unit in ((18, "EFLOP"), (15, "PFLOP"), (12, "TFLOP"), (9, "GFLOP")):
        if number >= 10**power:
            return f"{number / 10**power:,.1f} {unit}"
    return f"{number / 10**6:,.1f} MFLOP"


def count(number: int, thing: str) -> str:
    """Return a number of things in words: 1 engine, 2 engines."""
    return f"{number} {thing}" + ("" if number == 1 else "s")


def facts_table(title: str, rows: Iterable[tuple[str, str]]) -> "Table":
    """Return a table of names and sentences, as the plan's own."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(Text(name), Text(text))
    return table


def grid(title: str, head: Sequence[str], rows: Iterable[Sequence[str]], numbers: int) -> "Table":
    """Return a table with a head. Columns from `numbers` on are aligned to the right."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left")
    for column, name in enumerate(head):
        side = "right" if column >= numbers else "left"
        table.add_column(Text(name), justify=side, overflow="fold")  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table
