"""A client of debugpy: the Debug Adapter Protocol over TCP, as an editor speaks it.

https://microsoft.github.io/debug-adapter-protocol/specification
"""

import json
import socket
from typing import Any, Self


class Client:
    """One attached debugger. Closing the connection lets the process continue.

    events: events that have arrived and were not waited for yet.
    """

    def __init__(self, address: str, timeout_s: float = 60) -> None:
        """Attach to host:port. Stops at exceptions that nobody catches are on, as in VS Code."""
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host.strip("[]"), int(port)), timeout_s)
        self.stream = self.socket.makefile("rb")
        self.events: list[dict[str, Any]] = []
        self.sent = 0
        self.request("initialize", adapterID="debugpy", pathFormat="path")
        attach = self.send("attach", justMyCode=False)
        self.event("initialized")
        self.request("setExceptionBreakpoints", filters=["uncaught"])
        self.request("configurationDone")
        self.response(attach)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stream.close()
        self.socket.close()

    def send(self, command: str, **arguments: Any) -> int:
        """Send a request; return its number."""
        self.sent += 1
        message = {"seq": self.sent, "type": "request", "command": command, "arguments": arguments}
        body = json.dumps(message).encode()
        self.socket.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        return self.sent

    def receive(self) -> dict[str, Any]:
        """Return the next message."""
        length = 0
        while line := self.stream.readline().strip():
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        assert length, "the debugged process has closed the connection"
        message: dict[str, Any] = json.loads(self.stream.read(length))
        return message

    def response(self, number: int) -> Any:
        """Return the body of the response to a request; keep events for `event`."""
        while True:
            message = self.receive()
            if message["type"] == "event":
                self.events.append(message)
            elif message.get("request_seq") == number:
                assert message["success"], message
                return message.get("body")

    def request(self, command: str, **arguments: Any) -> Any:
        """Send a request and return the body of its response."""
        return self.response(self.send(command, **arguments))

    def event(self, name: str) -> dict[str, Any]:
        """Wait for an event of this name and return its body."""
        while True:
            for number, message in enumerate(self.events):
                if message["event"] == name:
                    body: dict[str, Any] = self.events.pop(number).get("body", {})
                    return body
            message = self.receive()
            if message["type"] == "event":
                self.events.append(message)

    def stopped(self) -> tuple[int, dict[str, Any]]:
        """Wait until a thread has stopped. Return the thread's number and its top frame."""
        thread = self.event("stopped")["threadId"]
        frames = self.request("stackTrace", threadId=thread)["stackFrames"]
        return thread, frames[0]

    def evaluate(self, expression: str, frame: dict[str, Any]) -> str:
        """Return the value of an expression in a frame, as text."""
        body = self.request("evaluate", expression=expression, frameId=frame["id"], context="repl")
        return str(body["result"])

    def go_on(self, thread: int) -> None:
        """Let the stopped thread continue."""
        self.request("continue", threadId=thread)
