"""A stand-in for a server of OpenEnv 0.10, with the wire that the real package showed: /health,
/schema, and a session per WebSocket at /ws. `test_openenv.py` plays the real one where it is
installed.
"""

import asyncio
import json
import random
import sys
from typing import Any

from aiohttp import WSMsgType, web

SCHEMA = {
    "additionalProperties": False,
    "properties": {
        "metadata": {"additionalProperties": True, "type": "object"},
        "answer": {"title": "Answer", "type": "integer"},
    },
    "required": ["answer"],
    "title": "SumAction",
    "type": "object",
}


def observation(text: str, reward: float | None = None, done: bool = False) -> dict[str, Any]:
    data = {"observation": {"metadata": {}, "question": text}, "reward": reward, "done": done}
    return {"type": "observation", "data": data}


def error(code: str, message: str, **more: Any) -> dict[str, Any]:
    return {"type": "error", "data": {"message": message, "code": code, **more}}


class Server:
    """Asks for a sum, and then once more. `fault` is what goes wrong."""

    def __init__(self, fault: str = "", places: int = 64) -> None:
        self.fault = fault
        self.places = places
        self.most = self.active = 0
        self.resets: list[dict[str, Any]] = []
        self.actions: list[dict[str, Any]] = []

    async def health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "healthy"})

    async def schema(self, request: web.Request) -> web.Response:
        return web.json_response({"action": SCHEMA, "observation": {}, "state": {}})

    async def session(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if self.active >= self.places:
            told = error("CAPACITY_REACHED", "no session", active_sessions=1, max_sessions=1)
            await socket.send_json(told)
            return socket
        self.active += 1
        self.most = max(self.most, self.active)
        try:
            await self._play(socket)
        finally:
            self.active -= 1
        return socket

    async def _play(self, socket: web.WebSocketResponse) -> None:
        sums: tuple[int, int] = (0, 0)
        steps = 0
        async for message in socket:
            if message.type != WSMsgType.TEXT:
                return
            asked = json.loads(message.data)
            data = asked["data"]
            if self.fault == f"hang {asked['type']}":
                await asyncio.sleep(600)
            if self.fault == f"close {asked['type']}":
                return
            if self.fault == f"raise {asked['type']}":
                await socket.send_json(error("EXECUTION_ERROR", "division by zero"))
            elif self.fault == f"nonsense {asked['type']}":
                await socket.send_str("<html>")
            elif asked["type"] == "reset":
                self.resets.append(data)
                numbers = random.Random(data.get("seed"))
                sums, steps = (numbers.randint(0, 4), numbers.randint(0, 4)), 0
                given = 0.25 if self.fault == "reward at once" else None
                await socket.send_json(observation("{}+{}=".format(*sums), given))
            elif set(data) != {"answer"}:
                errors = [{"loc": ["answer"], "msg": "Field required"}]
                await socket.send_json(error("VALIDATION_ERROR", "Invalid message", errors=errors))
            else:
                self.actions.append(data)
                steps += 1
                reward = 0.5 if data["answer"] == sum(sums) else 0.0
                told = observation("again:", reward, steps == 2)
                if self.fault == "no reward":
                    told["data"]["reward"] = None
                await socket.send_json(told)

    def app(self) -> web.Application:
        app = web.Application()
        routes = {"/health": self.health, "/schema": self.schema, "/ws": self.session}
        app.add_routes([web.get(path, handler) for path, handler in routes.items()])
        return app


if __name__ == "__main__":
    web.run_app(Server().app(), host="127.0.0.1", port=int(sys.argv[1]), print=None)
