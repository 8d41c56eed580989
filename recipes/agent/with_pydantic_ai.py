"""The calculator as a tool of Pydantic AI (package pydantic-ai-slim[openai])."""

import json
import sys

from agent import MAX_CALLS, calculate, report
from pydantic_ai import Agent
from pydantic_ai.exceptions import UnexpectedModelBehavior, UsageLimitExceeded
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.usage import UsageLimits

calls = 0
agent = Agent(OpenAIChatModel("policy"))  # reads OPENAI_BASE_URL and OPENAI_API_KEY


@agent.tool_plain
def calculator(expression: str) -> str:
    """Multiply two numbers, such as 12*34."""
    global calls
    calls += 1
    return calculate(expression)


task = json.load(sys.stdin)
(question,) = task["prompt"]
try:
    limits = UsageLimits(request_limit=MAX_CALLS + 1)
    said = agent.run_sync(question["content"], usage_limits=limits).output
except (
    UnexpectedModelBehavior,
    UsageLimitExceeded,
) as mistake:  # of the model: a score, no failure
    print(mistake)
    said = None
report(task, said, calls)
