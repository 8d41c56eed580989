"""A middleware of `vllm serve` (`--middleware`): health in JSON, a token, and fewer endpoints.

Training needs VLLM_SERVER_DEV_MODE=1, which also opens endpoints that run any method in vLLM's
workers, show the configuration with its secrets, or reset the weights. vLLM's own --api-key does
not cover them. This middleware lets through what ENDPOINTS lists, asks for the token of
VLLM_API_KEY on every request but GET /health, and refuses requests that a web page of another site
caused (`verlite.http.server.refusal`).
"""

import hmac
import json
import os
from collections.abc import Mapping
from typing import Any

from verlite.http import server
from verlite.rollout.servers.command import HOSTS

Scope = Mapping[str, Any]

ENDPOINTS = {
    "GET": (
        "/health",
        "/is_paused",
        "/metrics",
        "/v1/models",
        "/version",
        "/weight_info",
    ),
    "POST": (
        "/collective_rpc",
        "/finish_weight_update",
        "/inference/v1/generate",
        "/pause",
        "/reset_prefix_cache",
        "/resume",
        "/start_weight_update",
        "/update_weights",
        "/v1/chat/completions",
        "/v1/completions",
    ),
}
"""What clients may ask."""
WORKER_METHODS = ("verlite_fingerprints", "verlite_settings")
"""Methods that /collective_rpc may call."""
MAX_BODY = 64 << 20
"""Bytes of a request."""


class Gate:
    """The middleware around vLLM's application."""

    def __init__(self, app: Any) -> None:
        self._app = app
        token = os.environ.get("VLLM_API_KEY")
        self._wanted = f"Bearer {token}".encode() if token else None
        self._hosts = frozenset(os.environ.get(HOSTS, "").lower().split())

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # a websocket
            await send({"type": "websocket.close", "code": 1008})
            return
        method, path = scope["method"], scope["path"]
        is_health = (method, path) == ("GET", "/health")
        refusal = self._refusal(scope, method, path, is_health)
        if refusal:
            await _answer(send, refusal[0], {"detail": refusal[1]})
            return
        if is_health:
            await self._health(scope, receive, send)
            return
        if path == "/collective_rpc":
            body = await _body(receive)
            if not _is_allowed_call(body):
                methods = ", ".join(WORKER_METHODS)
                await _answer(send, 403, {"detail": f"only these methods can be called: {methods}"})
                return
            receive = _Replay(body, receive)
        await self._app(scope, receive, send)

    def _refusal(
        self, scope: Scope, method: str, path: str, is_open: bool
    ) -> tuple[int, str] | None:
        """Return status and reason if vLLM must not see a request. An open one needs no token."""
        headers = dict(scope["headers"])
        if self._wanted is not None and not is_open:
            given = headers.get(b"authorization", b"")
            if not hmac.compare_digest(given, self._wanted):
                return 401, "this server needs the header Authorization: Bearer TOKEN"
        foreign = server.refusal(scope, self._hosts, self._wanted is not None)
        if foreign:
            return foreign
        if path not in ENDPOINTS.get(method, ()):
            return 404, "not an endpoint of this server"
        if b"transfer-encoding" in headers:
            return 411, "a request needs the header Content-Length"
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > MAX_BODY:
            return 413, f"a request may have {MAX_BODY} bytes"
        return None

    async def _health(self, scope: Scope, receive: Any, send: Any) -> None:
        """Answer GET /health with JSON, and vLLM's status."""
        status = 503

        async def take(message: Mapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]

        await self._app(scope, receive, take)
        await _answer(send, status, {"status": "healthy" if status == 200 else "unhealthy"})


class _Replay:
    """`receive` of a request whose body was read."""

    def __init__(self, body: bytes, receive: Any) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Mapping[str, Any]:
        if self._body is None:
            message: Mapping[str, Any] = await self._receive()
            return message
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


async def _body(receive: Any) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            return bytes(body)


def _is_allowed_call(body: bytes) -> bool:
    try:
        call = json.loads(body)
    except (ValueError, RecursionError):
        return False
    return isinstance(call, dict) and set(call) == {"method"} and call["method"] in WORKER_METHODS


async def _answer(send: Any, status: int, value: dict[str, str]) -> None:
    body = json.dumps(value).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
