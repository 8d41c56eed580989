"""The calculator's loop with Anthropic's client (package anthropic)."""

import json
import sys

from agent import CALCULATOR, MAX_CALLS, PARAMETERS, calculate, report
from anthropic import Anthropic

TOOLS = [{**CALCULATOR, "input_schema": PARAMETERS}]

task = json.load(sys.stdin)
client = Anthropic(max_retries=0)  # reads ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY
messages = list(task["prompt"])
calls = 0
while True:
    answer = client.messages.create(model="policy", max_tokens=100, messages=messages, tools=TOOLS)
    messages.append({"role": "assistant", "content": answer.content})
    if answer.stop_reason != "tool_use" or calls == MAX_CALLS:
        break
    calls += 1
    results = []
    for block in answer.content:
        if block.type == "tool_use":
            said = calculate(block.input.get("expression"))
            results.append({"type": "tool_result", "tool_use_id": block.id, "content": said})
    messages.append({"role": "user", "content": results})
report(task, "".join(block.text for block in answer.content if block.type == "text"), calls)
