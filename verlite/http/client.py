"""HTTP client of a service that runs on one or several servers, for many requests at once.

`Client` chooses the least busy server and limits the requests in flight. A failed attempt is
repeated with exponential, jittered backoff until the deadline, on another server if there are
several. A server that keeps failing is paused, and gets a single request before it gets full
traffic again. Each attempt has a time limit, and the size of an answer is bounded, also in memory:
compressed answers are refused, and the number and depth of JSON values is limited.

`Client` takes a `ServiceSpec`, which has the service's addresses and limits; `post` takes a
function that reads the answers:

    async with Client(RewardServiceSpec(url=urls)) as client:
        answer = await client.post({"query": texts}, read_scores)

`verlite.http.batches` adds requests that several items share.

A service may ask for a bearer token (RFC 6750). It comes from an environment variable or a file and
never from the command line, which other users of the machine can read.
"""

import asyncio
import json
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from verlite.files import one_line, parse_foreign_json
from verlite.masking import display
from verlite.spec.roles import ServiceSpec

if TYPE_CHECKING:  # a run without services starts without it
    import httpx

# HTTP connections for many requests at once.
#
# httpx looks at all connections of a client when a request begins and when one ends. With hundreds
# of requests that takes longer than the requests themselves, so here each httpx client has few.

CONNECT_S = 2.0
KEEP_ALIVE_S = 3.0
"""Seconds for which an idle connection is kept: less than servers do (uvicorn: 5)."""
PER_CLIENT = 8
"""Requests of one httpx client at the same time."""


@dataclass
class _Share:
    """An httpx client, and the number of its requests."""

    client: "httpx.AsyncClient"
    in_flight: int = 0


class Connections:
    """Any number of connections, kept alive between requests. Use it in one event loop.

    After an answer with status 5xx its connection is not used again: servers such as uvicorn close
    it after an exception, some time after the answer, and a request that came meanwhile is lost.
    """

    def __init__(self, headers: Mapping[str, str]) -> None:
        """headers: of all requests."""
        import httpx

        self._headers = headers
        self._tls = httpx.create_ssl_context(trust_env=False)  # takes longer than a client
        self._shares: list[_Share] = []

    @asynccontextmanager
    async def stream(
        self, method: str, url: str, content: bytes | None
    ) -> AsyncIterator["httpx.Response"]:
        """Send a request; yield its answer, whose body is to be read. Raises httpx.HTTPError."""
        share = next((one for one in self._shares if one.in_flight < PER_CLIENT), None)
        if share is None:
            share = _Share(self._new())
            self._shares.append(share)
        share.in_flight += 1
        try:
            async with share.client.stream(method, url, content=content) as response:
                if response.status_code >= 500 and share in self._shares:
                    self._shares.remove(share)
                yield response
        finally:
            share.in_flight -= 1
            if not share.in_flight and share not in self._shares:
                await share.client.aclose()

    async def close(self) -> None:
        """Close all connections."""
        for share in self._shares:
            await share.client.aclose()

    def _new(self) -> "httpx.AsyncClient":
        import httpx

        return httpx.AsyncClient(
            verify=self._tls,
            trust_env=False,  # these are internal services, so proxies and .netrc do not apply
            headers=self._headers,
            timeout=httpx.Timeout(None, connect=CONNECT_S),  # `Client.attempt` limits the rest
            limits=httpx.Limits(max_connections=None, keepalive_expiry=KEEP_ALIVE_S),
        )


FIRST_BACKOFF_S = 0.25
MAX_BACKOFF_S = 8.0
PAUSE_AFTER = 5
"""Failures in a row after which a server is paused."""
PAUSE_S = 2.0
"""Seconds of that pause."""

T = TypeVar("T")


class Retry(Exception):
    """This attempt failed; another one may succeed."""

    tries = 0
    """Attempts of this call that failed so far, when a call raises it."""


class Down(Retry):
    """Nothing answered at the address, so the content of the request is not the cause."""


class Broken(Retry):
    """The connection broke before the whole answer came."""


class Slow(Retry):
    """No answer within the time limit."""


class Refused(Exception):
    """The server rejected the request: it answers with a client error (4xx) or a redirect."""

    tries = 0
    """Attempts of this call that failed so far, when a call raises it."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status
        """HTTP status."""


class Unavailable(Exception):
    """No server answered within the deadline. The message has the last cause."""


@dataclass
class Server:
    """One server and its state. str(server) is its address, with passwords masked."""

    url: str
    in_flight: int = 0
    failures: int = 0
    """Failures in a row."""
    paused_until: float = 0.0
    """Value of time.monotonic()."""

    def __str__(self) -> str:
        return display("url", self.url, known=True)

    def free(self, now: float, limit: int) -> bool:
        """Return whether the server may get a request. After a pause it gets one at a time."""
        return now >= self.paused_until and self.in_flight < (
            1 if self.failures >= PAUSE_AFTER else limit
        )


@dataclass(frozen=True)
class Answer(Generic[T]):
    """The result of a call."""

    value: T
    tries: int = 0
    """Attempts that failed before."""


Send = Callable[[Server, float], Awaitable[T]]
"""(server, seconds left) -> result of one attempt. Raises Retry or Refused."""


class Client:
    """A client for one process. Use it as `async with client:` in one event loop at a time."""

    def __init__(self, service: ServiceSpec) -> None:
        """Read the token; nothing is connected yet.

        Raises:
            TokenError: the environment variable with the token is not set.
        """
        self.service = service
        self.servers = [Server(url) for url in service.url]
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if service.token_env:
            token = token_of_variable(service.token_env, f"{service.section}.{service.token_key}")
            self._headers["Authorization"] = f"Bearer {token}"
        self._changed: asyncio.Condition | None = None
        self._connections: Connections | None = None

    @property
    def is_open(self) -> bool:
        """Whether the client is inside `async with`."""
        return self._connections is not None

    async def __aenter__(self) -> Self:
        self._connections = Connections(self._headers)
        self._changed = asyncio.Condition()
        for server in self.servers:
            server.in_flight = 0
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._connections
        await self._connections.close()
        self._connections = None

    async def post(
        self,
        body: Any,
        read: Callable[[Any], T],
        *,
        path: str = "",
        what: str = "the request",
    ) -> Answer[T]:
        """POST a JSON value, with all attempts that the service's deadline allows.

        Args:
            body: the JSON value.
            read: makes the result from the JSON value of the answer, or raises ValueError; then
                the attempt has failed and is repeated.
            path: is appended to the server's address.
            what: names the request in error messages.

        Raises:
            Refused: the server rejects the request.
            Unavailable: no answer within the deadline.
        """
        deadline = time.monotonic() + self.service.deadline_s

        def send(chosen: Server, left_s: float) -> Awaitable[T]:
            return self.attempt(chosen.url + path, body, read, limit_s=left_s, what=what)

        return await self.call(send, lambda: deadline)

    async def call(
        self,
        send: Send[T],
        deadline: Callable[[], float],
        *,
        tries: int = 0,
        raise_retry: bool = False,
    ) -> Answer[T]:
        """Repeat `send` until it succeeds.

        Args:
            send: one attempt on a server, such as a call of `attempt`.
            deadline: the end as a value of time.monotonic(), read before each attempt.
            tries: attempts that failed before this call; they count in messages and backoff.
            raise_retry: raise the Retry of a failed attempt at once, except Down, so that the
                caller can ask for less at a time.

        Raises:
            Refused, Retry: see above. `error.tries` counts the failed attempts.
            Unavailable: no attempt succeeded before the deadline.
        """
        last = "every server is busy or paused"
        while True:
            left_s = deadline() - time.monotonic()
            chosen = await self._reserve(left_s) if left_s > 0 else None
            if chosen is None:
                raise Unavailable(
                    f"no answer within {self.service.section}.deadline_s="
                    f"{self.service.deadline_s:g} after {tries} tries; the last: {last}"
                )
            allowed_s = deadline() - time.monotonic()
            try:
                value = await send(chosen, max(0.001, allowed_s))
            except Refused as error:
                error.tries = tries + 1
                raise
            except Retry as error:
                self._failed(chosen)
                # A last attempt with little time left does not show the cause.
                if not tries or allowed_s > self.service.timeout_s / 10:
                    last = f"{chosen}: {error}"
                tries += 1
                error.tries = tries
                if raise_retry and not isinstance(error, Down):
                    raise
            else:
                chosen.failures = 0
                return Answer(value, tries)
            finally:
                await self._release(chosen)
            if any(other.failures == 0 for other in self.servers):
                continue
            backoff_s = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2 ** (tries - 1))
            backoff_s *= random.uniform(0.5, 1.5)
            await asyncio.sleep(max(0.0, min(backoff_s, deadline() - time.monotonic())))

    async def attempt(
        self,
        url: str,
        body: Any,
        read: Callable[[Any], T],
        *,
        method: str = "POST",
        limit_s: float | None = None,
        what: str = "the request",
    ) -> T:
        """Send one request to one address and return what `read` makes of its JSON answer.

        Args:
            url: the full address.
            body: the JSON value to send, or None for no body.
            read: raises ValueError if the value is not in the service's format.
            method: the HTTP method.
            limit_s: seconds, if they are fewer than the service's timeout_s.
            what: names the request in error messages.

        Raises:
            Down, Broken, Slow: no answer.
            Retry: status 408, 429 or 5xx, an answer that is too large, or that `read` rejects.
            Refused: any other status than 2xx.
        """
        content = None if body is None else json.dumps(body, allow_nan=False).encode()
        answer = await self._answered(method, url, content, limit_s, what)
        try:
            return read(parse_foreign_json(answer, self.service.max_values) if answer else None)
        except (ValueError, RecursionError) as error:
            raise Retry(
                f"an answer that is not in the {self.service.name}'s format: {one_line(error)}"
            ) from error

    async def ping(self, url: str) -> None:
        """GET an address; any answer with status 2xx is right. Raises Retry or Refused."""
        await self._answered("GET", url, None, None, "the health check")

    async def _answered(
        self, method: str, url: str, content: bytes | None, limit_s: float | None, what: str
    ) -> bytearray:
        """Return the body of an answer with status 2xx. Raises as `attempt`."""
        import httpx

        limit_s = min(self.service.timeout_s, limit_s or self.service.timeout_s)
        try:
            # httpx limits each read but not their sum.
            status, answer = await asyncio.wait_for(self._exchange(method, url, content), limit_s)
        except TimeoutError as error:
            raise Slow(f"no answer to {what} within {limit_s:.3g} s") from error
        except httpx.HTTPError as error:
            refused = httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout
            kind = Down if isinstance(error, refused) else Broken
            raise kind(
                f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            ) from error
        except AttributeError as error:
            if error.name != "getpeername":
                raise
            # anyio asks a connection that the server has closed at once for its peer.
            raise Broken("the connection was closed at once") from error
        if not 200 <= status < 300:
            text = f"HTTP {status}: {one_line(answer[:800].decode(errors='replace'), 200)}"
            if status in (408, 429) or status >= 500:
                raise Retry(text)
            raise Refused(text, status)
        return answer

    async def _exchange(
        self, method: str, url: str, content: bytes | None
    ) -> tuple[int, bytearray]:
        """Return status and body."""
        assert self._connections, "use the client inside `async with`"
        answer = bytearray()
        async with self._connections.stream(method, url, content) as response:
            encodings = response.headers.get_list("content-encoding", split_commas=True)
            if any(encoding.strip().lower() != "identity" for encoding in encodings):
                raise Retry(
                    f"an answer with Content-Encoding: {one_line(', '.join(encodings), 60)}, "
                    "though the request accepts only identity"
                )
            async for chunk in response.aiter_raw():
                answer += chunk
                if len(answer) > self.service.max_answer:
                    raise Retry(f"an answer of more than {self.service.max_answer} bytes")
        return response.status_code, answer

    async def check(self, probe: Callable[[Server], Awaitable[Any]], remedy: str) -> str | None:
        """Try every server. Return a warning about those that fail, or None.

        Args:
            probe: one attempt on a server. Raises Retry or Refused.
            remedy: ends the message if no server answers, such as "Start it (...)".

        Raises:
            Unavailable: no server answers.
        """
        if not self.is_open:
            async with self:
                return await self.check(probe, remedy)
        silent = []
        for server in self.servers:
            try:
                await probe(server)
            except (Retry, Refused) as error:
                silent.append(f"the {self.service.name} at {server} does not answer: {error}")
                server.failures = PAUSE_AFTER
            else:
                server.failures = 0
                server.paused_until = 0.0
        if len(silent) == len(self.servers):
            raise Unavailable(f"{'; '.join(silent)}. {remedy}")
        return "; ".join(silent) or None

    async def _reserve(self, wait_s: float) -> Server | None:
        """Reserve the least busy server that is free. None if none is free for `wait_s` seconds."""
        assert self._changed
        end = time.monotonic() + wait_s
        async with self._changed:
            while True:
                now = time.monotonic()
                limit = self.service.max_in_flight
                free = [server for server in self.servers if server.free(now, limit)]
                if free:
                    chosen = min(free, key=lambda server: (server.failures, server.in_flight))
                    chosen.in_flight += 1
                    return chosen
                if now >= end:
                    return None
                wakes = [one.paused_until for one in self.servers if one.paused_until > now]
                try:
                    await asyncio.wait_for(
                        self._changed.wait(), max(0.001, min([end, *wakes]) - now)
                    )
                except TimeoutError:
                    pass

    async def _release(self, server: Server) -> None:
        assert self._changed
        async with self._changed:
            server.in_flight -= 1
            self._changed.notify_all()

    def _failed(self, server: Server) -> None:
        server.failures += 1
        if server.failures >= PAUSE_AFTER:
            server.paused_until = time.monotonic() + PAUSE_S


class TokenError(ValueError):
    """A token cannot be read or used. The message has the remedy and never the token."""


def token_of_variable(name: str, key: str) -> str:
    """Return the token in an environment variable. `key` is the setting that names the variable.

    Raises:
        TokenError: the variable is not set or its value is not a token.
    """
    value = os.environ.get(name)
    if value is None:
        raise TokenError(
            f"{key}={name}: this environment variable is not set in this process. Set it where "
            "the process starts; ray_kwargs.ray_init.runtime_env.env_vars reaches all workers"
        )
    return _checked(value, f"{key}={name}: this environment variable")


def token_of_file(path: str, key: str) -> str:
    """Return the token in a file, without white space around it.

    Raises:
        TokenError: the file cannot be read or its text is not a token.
    """
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "is not UTF-8 text"
        raise TokenError(f"{key}={path}: the file cannot be read: {reason}") from None
    return _checked(text, f"{key}={path}: the file")


def _checked(text: str, where: str) -> str:
    token = text.strip()
    if not token:
        raise TokenError(f"{where} has no token; write one, such as the output of openssl rand")
    if not (token.isascii() and token.isprintable() and " " not in token):
        raise TokenError(f"{where} has characters that a token cannot have; use letters and digits")
    return token
