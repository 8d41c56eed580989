"""What the services of `verlite serve` have in common: the application, limits, and running it.

A service is `application(...)` with its routes, which read a request with `read_json`, and
`run(app, bound, line)` with a socket from `verlite.http.address.bind`.
"""

import asyncio
import hmac
import logging
import signal
import socket
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from verlite.files import parse_foreign_json
from verlite.http import origin

STOP_S = 30
"""Seconds for requests in progress after the server was asked to stop."""
HEAD_S = 10.0
"""Seconds in which a client must send the line and headers of a request."""
MAX_HEAD = 1 << 16
"""Bytes of them."""
BODY_S = 60.0
"""Seconds in which a client must send the body of a request."""
MAX_CONNECTIONS = 1024
"""Open connections. Further requests get status 503, and clients of verlite try again."""
LOG = logging.getLogger("uvicorn.error")
# The client has disconnected, so this response is not read.
GONE = HTTPException(499, "the client has gone")


def application(
    title: str,
    lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]] | None = None,
    token: str | None = None,
) -> FastAPI:
    """Return an application without routes.

    With a token every request, health checks too, needs the header "Authorization: Bearer TOKEN";
    others get status 401 before their body is read. Requests that a web page of another site caused
    get 403 or 415 (`verlite.http.origin`). An exception in a route is answered by status 500 with
    one sentence, and its traceback goes to standard error only.
    """
    app = FastAPI(title=title, lifespan=lifespan, openapi_url=None)
    app.add_middleware(_Guard, token=token)
    return app


class _Guard:
    """Answer requests without the token or from other sites, and exceptions of the application."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app = app
        self._wanted = f"Bearer {token}".encode() if token is not None else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"authorization", b"")
        if self._wanted is not None and not hmac.compare_digest(given, self._wanted):
            refusal = JSONResponse(
                {"detail": "this service needs the header Authorization: Bearer TOKEN"},
                401,
                {"WWW-Authenticate": "Bearer"},
            )
            await refusal(scope, receive, send)
            return
        names = getattr(scope["app"].state, "hosts", ())
        refused = origin.refusal(scope, names, self._wanted is not None)
        if refused:
            await JSONResponse({"detail": refused[1]}, refused[0])(scope, receive, send)
            return
        started = False

        async def note_start(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, note_start)
        except Exception:
            if started:
                raise
            LOG.exception("%s %s failed", scope["method"], scope["path"])
            answer = JSONResponse({"detail": "the service failed; its log has the cause"}, 500)
            await answer(scope, receive, send)


async def read_body(request: Request, limit: int, remedy: str = "send less at a time") -> bytes:
    """Return the whole body.

    Raises:
        HTTPException: 413 if it has more than `limit` bytes; 408 if it takes more than BODY_S.
    """
    body, size = bytearray(), 0
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in request.stream():
                size += len(chunk)
                if size <= limit:
                    body += chunk
                elif size > 16 * limit:
                    break
                # Up to that size the body is read and dropped, so that the client sees the answer.
    except ClientDisconnect:
        raise GONE from None
    except TimeoutError:
        raise HTTPException(
            408, f"the body was not complete after {BODY_S:g} s", {"Connection": "close"}
        ) from None
    if size > limit:
        raise HTTPException(413, f"the body has more than {limit} bytes; {remedy}")
    return bytes(body)


def parse_object(body: bytes, example: str) -> dict[str, Any]:
    """Return a body that is a JSON object; `example` shows one in the error message.

    Raises:
        HTTPException: status 422, with a sentence that says what the body is.
    """
    try:
        value = parse_foreign_json(body)
    except ValueError as error:
        raise wrong(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise wrong(f"the body is a {type(value).__name__}, expected an object such as {example}")
    return value


def wrong(sentence: str) -> HTTPException:
    """Return the answer to an invalid request: status 422, with a sentence that names the field."""
    return HTTPException(422, sentence)


class _Protocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's protocol, with limits of time and size for the head of a request.

    uvicorn limits neither, so a client could hold a connection by sending nothing, and fill the
    memory with a header that does not end.
    """

    _timer: asyncio.TimerHandle | None = None
    _head = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        rest_of_body = self.cycle is not None and self.cycle.more_body
        self._head = self._head + len(data) if self._waits() and not rest_of_body else 0
        if self._head > MAX_HEAD:
            self.transport.abort()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._forget()

    def _waits(self) -> bool:
        """Return whether no request is in progress: the next one's headers are incomplete."""
        return self.cycle is None or self.cycle.response_complete

    def _watch(self) -> None:
        if not self._waits():
            self._forget()
        elif self._timer is None:
            self._timer = self.loop.call_later(HEAD_S, self.transport.abort)

    def _forget(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Server(uvicorn.Server):
    """A uvicorn server with limits that prints a line when it is ready."""

    def __init__(self, app: FastAPI, line: str) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=_Protocol,
                ws="none",
                log_level="warning",
                use_colors=False,
                access_log=False,
                limit_concurrency=MAX_CONNECTIONS,
                server_header=False,
                timeout_graceful_shutdown=STOP_S,
            )
        )
        self._line = line

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(self._line, flush=True)


def run(app: FastAPI, bound: socket.socket, line: str, hosts: Iterable[str] = ()) -> None:
    """Serve until SIGTERM or Ctrl-C, then finish the requests in progress.

    hosts: host names that clients may use besides those of this machine.
    """
    app.state.hosts = {host.lower() for host in hosts}
    for number in (signal.SIGINT, signal.SIGTERM):
        # uvicorn has its own handlers while it serves, and raises the signal again afterwards.
        signal.signal(number, lambda *_: None)
    with suppress(KeyboardInterrupt):
        Server(app, line).run(sockets=[bound])
