"""The calculator's loop with OpenAI's client (package openai)."""

import json
import sys

from agent import CALCULATOR, MAX_CALLS, PARAMETERS, calculate, report
from openai import OpenAI

TOOLS = [{"type": "function", "function": {**CALCULATOR, "parameters": PARAMETERS}}]

task = json.load(sys.stdin)
client = OpenAI(max_retries=0)  # reads OPENAI_BASE_URL and OPENAI_API_KEY
messages = list(task["prompt"])
calls = 0
while True:
    answer = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
    message = answer.choices[0].message
    messages.append(message)
    if not message.tool_calls or calls == MAX_CALLS:
        break
    calls += 1
    for call in message.tool_calls:
        said = calculate(json.loads(call.function.arguments).get("expression"))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
report(task, message.content, calls)
