"""The example environment of docs/agents.md works."""

import asyncio
import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "agents.md"


def test_example_of_the_page_works():
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict = {}
    exec(code, names)
    factory = names["Game"]()
    asyncio.run(factory.check())
    env = factory.env({"secret": 7})
    answers = [asyncio.run(env.step(text, last=False)) for text in ("5\n", "9", "x", "7")]
    assert [(step.obs, step.valid, step.done) for step in answers] == [
        ("higher\n", True, False),
        ("lower\n", True, False),
        ("a number, please\n", False, False),
        ("lower\n", True, True),
    ]
