"""A small real retriever on loopback, in Search-R1's wire format, with faults that tests choose."""

import asyncio
import json
import re
import socket
import threading
import time

import uvicorn

CORPUS = {
    "Paul Walker": "Paul Walker was an American actor who died in 2013.",
    "Eiffel Tower": "The Eiffel Tower stands in Paris and is 330 metres high.",
    "Paris": "Paris is the capital of France.",
    "Mount Everest": "Mount Everest is 8849 metres high.",
}


def passages(query: str, topk: int) -> list[dict]:
    """Return the articles that share the most words with the query, and at least one word."""
    words = set(re.findall(r"\w+", query.lower()))
    scored = [
        (len(words & set(re.findall(r"\w+", f"{title} {text}".lower()))), title, text)
        for title, text in CORPUS.items()
    ]
    best = sorted((row for row in scored if row[0]), key=lambda row: (-row[0], row[1]))[:topk]
    return [
        {"document": {"id": title, "contents": f'"{title}"\n{text}'}, "score": score}
        for score, title, text in best
    ]


class Retriever:
    """A retriever whose answers tests can replace.

    `answer(body)` returns (status, bytes or JSON value). `requests` has every received body.
    """

    def __init__(self, port: int = 0):
        self.requests: list[dict] = []
        self.delay = 0.0
        self.delays = lambda body: self.delay
        self.answer = self.usual
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", port))
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/retrieve"
        self._server = uvicorn.Server(
            uvicorn.Config(self._app, interface="asgi3", log_level="critical", lifespan="off")
        )
        self._thread = threading.Thread(
            target=lambda: self._server.run(sockets=[self._socket]), daemon=True
        )

    @staticmethod
    def usual(body: dict):
        return 200, {"result": [passages(query, body.get("topk", 3)) for query in body["queries"]]}

    async def _app(self, scope, receive, send):
        raw = b""
        while True:
            message = await receive()
            raw += message.get("body", b"")
            if not message.get("more_body"):
                break
        body = json.loads(raw)
        self.requests.append(body)
        await asyncio.sleep(self.delays(body))
        status, answer = self.answer(body)
        content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        await send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [(b"content-type", b"application/json")],
            }
        )
        await send({"type": "http.response.body", "body": content})

    def __enter__(self):
        self._thread.start()
        while not self._server.started:
            time.sleep(0.005)
        return self

    def __exit__(self, *error):
        self._server.force_exit = True
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()


def free_port() -> int:
    """Return a loopback port without a listener."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
