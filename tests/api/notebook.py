"""Run the code cells of a notebook as a kernel does: one namespace, inside a running event loop."""

import asyncio
import json
from pathlib import Path
from typing import Any


def code_cells(notebook: Path) -> list[str]:
    """Return the text of each code cell."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def execute(notebook: Path) -> dict[str, Any]:
    """Execute all code cells and return the variables of the notebook."""
    # cloudpickle stores what belongs to __main__ by value, as in a kernel.
    variables: dict[str, Any] = {"__name__": "__main__"}

    async def cells() -> None:
        for number, text in enumerate(code_cells(notebook), start=1):
            exec(compile(text, f"cell {number}", "exec"), variables)

    asyncio.run(cells())
    return variables
