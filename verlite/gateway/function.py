"""Call a Python function as an agent program, in the process that would have become the program.

Standard library only, and little of it, because each sample starts with this file.
"""

import json
import os
import sys

from verlite.importing import find


def call(place: str, name: str) -> None:
    """Call a function with the task, base_url and key of its session; print what it returns.

    Args:
        place: its file or module.
        name: its name. It may be asynchronous. It may return None, printed as null, if another
            function scores.

    Raises:
        OwnCodeError: the function does not exist. What the function raises is passed on.
    """
    function = find(place, name)
    task = json.load(sys.stdin)
    result = function(task, os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])
    if hasattr(result, "__await__"):
        import asyncio

        result = asyncio.run(_wait(result))
    print(f"\n{json.dumps(result, default=float)}", flush=True)


async def _wait(result: object) -> object:
    return await result  # type: ignore[misc]  # it is awaitable
