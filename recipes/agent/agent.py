"""An agent program as it could have been written for any server of OpenAI's protocol.

It knows nothing of verlite: it asks the model at OPENAI_BASE_URL, runs the calculator that the
model calls, and prints the score of its task as its last line. Standard library only.
"""

import http.client
import json
import os
import re
import sys
from urllib.parse import urlsplit

PARAMETERS = {
    "type": "object",
    "properties": {"expression": {"type": "string", "description": "Such as 12*34"}},
    "required": ["expression"],
}
CALCULATOR = {"name": "calculator", "description": "Multiply two numbers."}
MAX_CALLS = 2


def calculate(expression):
    """Return what the calculator says."""
    found = re.fullmatch(r"(\d{1,4})\*(\d{1,4})", str(expression))
    return str(int(found[1]) * int(found[2])) if found else "error"


def report(task, said, calls):
    """Print the score of the model's last words."""
    right = said == f"={task['ground_truth']}"
    print(json.dumps({"score": float(right), "calls": calls}))


def ask(messages):
    """Return the model's next message."""
    url = urlsplit(os.environ["OPENAI_BASE_URL"])
    headers = {
        "Content-Type": "application/json",
        "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
    }
    tools = [{"type": "function", "function": {**CALCULATOR, "parameters": PARAMETERS}}]
    body = json.dumps({"model": "policy", "messages": messages, "tools": tools})
    connection = http.client.HTTPConnection(url.hostname, url.port)
    connection.request("POST", f"{url.path}/chat/completions", body, headers)
    response = connection.getresponse()
    answer = json.load(response)
    if response.status != 200:
        raise RuntimeError(answer["error"]["message"])
    return answer["choices"][0]["message"]


def main():
    task = json.load(sys.stdin)
    messages = list(task["prompt"])
    calls = 0
    while True:
        message = ask(messages)
        messages.append(message)
        if not message.get("tool_calls") or calls == MAX_CALLS:
            break
        calls += 1
        for call in message["tool_calls"]:
            said = calculate(json.loads(call["function"]["arguments"]).get("expression"))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": said})
    report(task, message["content"], calls)


if __name__ == "__main__":
    main()
