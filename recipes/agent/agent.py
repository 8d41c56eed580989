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

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Multiply two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string", "description": "Such as 12*34"}},
                "required": ["expression"],
            },
        },
    }
]
MAX_CALLS = 2


def ask(messages):
    """Return the model's next message."""
    url = urlsplit(os.environ["OPENAI_BASE_URL"])
    headers = {
        "Content-Type": "application/json",
        "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
    }
    body = json.dumps({"model": "policy", "messages": messages, "tools": TOOLS})
    connection = http.client.HTTPConnection(url.hostname, url.port)
    connection.request("POST", f"{url.path}/chat/completions", body, headers)
    response = connection.getresponse()
    answer = json.load(response)
    if response.status != 200:
        raise RuntimeError(answer["error"]["message"])
    return answer["choices"][0]["message"]


def calculate(call):
    """Return what the calculator says to a call of the model."""
    arguments = json.loads(call["function"]["arguments"])
    found = re.fullmatch(r"(\d{1,4})\*(\d{1,4})", str(arguments.get("expression")))
    return str(int(found[1]) * int(found[2])) if found else "error"


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
            answer = {"role": "tool", "tool_call_id": call["id"], "content": calculate(call)}
            messages.append(answer)
    right = message["content"] == f"={task['ground_truth']}"
    print(json.dumps({"score": float(right), "calls": calls}))


if __name__ == "__main__":
    main()
