"""What the services of `verlite serve` have in common: address, application, limits, which requests
are refused, and running it.

A service is `application(...)` with its routes, which read a request with `read_json`, and
`run(app, bound, line)` with a socket from `bind`.
"""

import asyncio
import errno
import functools
import hmac
import ipaddress
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from verlite.files import kind_of, parse_foreign_json

Explain = Callable[[str, str, int], dict[str, Any]]

STOP_S = 30
"""Seconds for requests in progress after the server was asked to stop."""
HEAD_S = 30.0
"""Seconds in which a client must send the line and headers of a request. On a machine with many
processes some take more than 10."""
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
    explain: Explain | None = None,
) -> FastAPI:
    """Return an application without routes.

    With a token every request, health checks too, needs the header "Authorization: Bearer TOKEN";
    others get status 401 before their body is read. Requests that a web page of another site caused
    get 403 or 415 (`refusal`). An exception in a route is answered by status 500 with
    one sentence, and its traceback goes to standard error only.

    explain: returns the body of an error, given the request's path, a sentence and the status.
        None: {"detail": sentence}.
    """
    app = FastAPI(title=title, lifespan=lifespan, openapi_url=None)
    app.add_middleware(_Guard, token=token, explain=explain or _detail)
    return app


def _detail(path: str, sentence: str, status: int) -> dict[str, Any]:
    return {"detail": sentence}


class _Guard:
    """Answer requests without the token or from other sites, and exceptions of the application."""

    def __init__(self, app: ASGIApp, token: str | None, explain: Explain) -> None:
        self._app = app
        self._explain = explain
        self._wanted = f"Bearer {token}".encode() if token is not None else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"authorization", b"")
        if self._wanted is not None and not hmac.compare_digest(given, self._wanted):
            sentence = "this service needs the header Authorization: Bearer TOKEN"
            unauthorized = self._error(scope, 401, sentence, {"WWW-Authenticate": "Bearer"})
            await unauthorized(scope, receive, send)
            return
        names = getattr(scope["app"].state, "hosts", ())
        refused = refusal(scope, names, self._wanted is not None)
        if refused:
            await self._error(scope, *refused)(scope, receive, send)
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
            answer = self._error(scope, 500, "the service failed; its log has the cause")
            await answer(scope, receive, send)

    def _error(
        self, scope: Scope, status: int, sentence: str, headers: Mapping[str, str] | None = None
    ) -> JSONResponse:
        return JSONResponse(self._explain(scope["path"], sentence, status), status, headers)


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


def one_of(body: Mapping[str, Any], names: tuple[str, str], remedy: str) -> str:
    """Return which of a field's two names the body has.

    remedy: what to do if it has neither.

    Raises:
        HTTPException: status 422: it has both or neither.
    """
    given = [name for name in names if body.get(name) is not None]
    if not given:
        raise wrong(f"the body has no {names[0]}; {remedy}")
    if len(given) > 1:
        raise wrong(f"the body has both {names[0]} and {names[1]}; keep one")
    return given[0]


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
        raise wrong(f"the body is {kind_of(value)}, expected an object such as {example}")
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


class HTTPServer(uvicorn.Server):
    """A uvicorn server with limits that prints a line when it is ready, unless it is ""."""

    def __init__(self, app: FastAPI, line: str, **limits: int) -> None:
        options: dict[str, Any] = {"limit_concurrency": MAX_CONNECTIONS} | limits
        super().__init__(
            uvicorn.Config(
                app,
                http=_Protocol,
                ws="none",
                log_level="warning",
                use_colors=False,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=STOP_S,
                **options,
            )
        )
        self._line = line

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._line:
            print(self._line, flush=True)


class _Beside(HTTPServer):
    """A server in an event loop that has other work. Signals are not for it."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def serving(app: FastAPI, bound: socket.socket, **limits: int) -> AsyncIterator[None]:
    """Serve in this event loop meanwhile. At the end requests in progress are cancelled.

    limits: uvicorn's `limit_concurrency` and `timeout_keep_alive`.
    """
    server = _Beside(app, "", **limits)
    server.config.lifespan = "off"
    task = asyncio.create_task(server.serve([bound]))
    while not (server.started or task.done()):
        await asyncio.sleep(0)
    try:
        yield
    finally:
        server.should_exit = server.force_exit = True
        for request in server.server_state.tasks:
            request.cancel()
        await task


def run(app: FastAPI, bound: socket.socket, line: str, hosts: Iterable[str] = ()) -> None:
    """Serve until SIGTERM or Ctrl-C, then finish the requests in progress.

    hosts: host names that clients may use besides those of this machine.
    """
    app.state.hosts = {host.lower() for host in hosts}
    for number in (signal.SIGINT, signal.SIGTERM):
        # uvicorn has its own handlers while it serves, and raises the signal again afterwards.
        signal.signal(number, lambda *_: None)
    with suppress(KeyboardInterrupt):
        HTTPServer(app, line).run(sockets=[bound])


# The address: bind it early, and print it


class ServiceError(ValueError):
    """A service cannot start: a file, model, option or address cannot be used.

    The message has the remedy.
    """


def bind(host: str, port: int) -> socket.socket:
    """Return a bound socket, so that an address in use is found before a long start.

    Port 0 is any free port.

    Raises:
        ServiceError: the address is invalid or in use.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError, OverflowError) as error:
        raise ServiceError(
            f"--host {host} --port {port}: is not a valid address: {error}"
        ) from None
    bound = socket.socket(family, kind, protocol)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise ServiceError(
                f"--port {port}: is in use on {host}; choose another, or 0 for any free one"
            ) from None
        raise ServiceError(
            f"--host {host} --port {port}: cannot be listened on: {error.strerror}"
        ) from None
    return bound


def url(bound: socket.socket, path: str = "") -> str:
    """Return the URL of a path of the service, such as /retrieve."""
    host, port = bound.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}{path}"


def open_to_others(bound: socket.socket) -> bool:
    """Return whether other machines can connect."""
    host = bound.getsockname()[0]
    return not (host.startswith("127.") or host == "::1")


# Which requests a service answers, by their headers: none that a web page of another site caused.
#
# A page that a user of the machine visits can send requests to services on loopback. With DNS
# rebinding its own host name becomes 127.0.0.1, and it reads the answers too.

BODY_METHODS = ("POST", "PUT", "PATCH")


def refusal(
    scope: Mapping[str, Any], names: Collection[str], has_token: bool
) -> tuple[int, str] | None:
    """Return status and reason if a request must not be answered, else None.

    Args:
        scope: of the request, in ASGI.
        names: further host names that clients may use, in lower case.
        has_token: the service asks for a token. A page of another site does not have it, so host
            and origin do not count.
    """
    headers = scope["headers"]
    # A request without a body needs no type, as vLLM's POST /pause.
    marks = (b"content-length", b"transfer-encoding", b"content-type")
    has_body = any(name in marks and value.strip() != b"0" for name, value in headers)
    if scope["method"] in BODY_METHODS and has_body:
        kinds = [value for name, value in headers if name == b"content-type"]
        if [kind.partition(b";")[0].strip().lower() for kind in kinds] != [b"application/json"]:
            return 415, "this service needs the header Content-Type: application/json"
    if has_token:
        return None
    hosts = [value.decode("latin-1").lower() for name, value in headers if name == b"host"]
    server = (scope.get("server") or ("",))[0]
    for host in hosts:
        if not _is_own(host, server, names):
            return 403, (
                f"the header Host: {host[:100]!a} is not a name of this service. Use an IP address "
                "or the machine's host name, or start the service with --allow-host NAME or with "
                "a token"
            )
    origins = [value.decode("latin-1").lower() for name, value in headers if name == b"origin"]
    if any(_host_of(origin) not in hosts for origin in origins):
        return 403, "a web page of another site caused this request"
    return None


def _is_own(host: str, server: str, names: Collection[str]) -> bool:
    """Return whether a Host header names this service.

    server: the address that the client has connected to.
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    if name.rstrip(".") in names:
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        # The public domain name system has no names without a dot: such a name of a cluster's
        # machine is not that of another site.
        is_internal = bool(name) and "." not in name and not _is_loopback(server)
        return name == "localhost" or name in own_names() or is_internal
    # An address cannot be rebound. A service on loopback has no other address than loopback.
    return address.is_loopback or not _is_loopback(server)


def _is_loopback(server: str) -> bool:
    try:
        return ipaddress.ip_address(server).is_loopback
    except ValueError:  # such as a Unix socket
        return False


def _host_of(origin: str) -> str:
    """Return host and port of an Origin header; "" for null and what is not a URL."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


@functools.cache
def own_names() -> frozenset[str]:
    """Return this machine's host name, with and without its domain, in lower case."""
    return frozenset(name.lower() for name in (socket.gethostname(), socket.getfqdn()) if name)
