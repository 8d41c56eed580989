"""The client of services against real servers. tests/envs/test_retriever.py has its retries."""

import asyncio
import gzip
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from verlite.config.commands import PPO
from verlite.http.client import Broken, Client, Down, Refused, Retry, TokenError, Unavailable
from verlite.rollout.servers import fit
from verlite.spec import roles
from verlite.spec.roles import ServiceSpec

pytestmark = pytest.mark.process

Answers = Callable[[str, dict[str, str], Any], tuple[int, Any]]
"""(path, headers, body) -> status and answer, bytes or a JSON value."""


@contextmanager
def serving(answers: Answers, encoding: str | None = None) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, answer = answers(
                self.path, dict(self.headers), json.loads(body) if body else None
            )
            content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            if status == 302:
                self.send_header("Location", "/elsewhere")
            if encoding is not None:
                self.send_header("Content-Encoding", encoding)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            try:
                self.wfile.write(content)
            except OSError:
                pass  # the client has seen enough

        do_GET = do_POST

        def log_message(self, *arguments: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 256

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def service(*urls: str, **settings: Any) -> ServiceSpec:
    limits = {"timeout_s": 1.0, "deadline_s": 3.0, **settings}
    return ServiceSpec("echo service", "echo", urls, **limits)


def run(client: Client, use: Callable[[Client], Any]) -> Any:
    async def opened() -> Any:
        async with client:
            return await use(client)

    return asyncio.run(opened())


def same(value: Any) -> Any:
    return value


def test_post_returns_what_the_reader_makes_of_the_answer() -> None:
    with serving(lambda path, headers, body: (200, {"path": path, "body": body})) as url:
        answer = run(
            Client(service(url)),
            lambda client: client.post({"a": "é\ud800"}, lambda value: value, path="/v1/x"),
        )
    assert answer.value == {"path": "/v1/x", "body": {"a": "é\ud800"}}
    assert answer.tries == 0


def test_answer_that_the_reader_rejects_is_tried_again() -> None:
    numbers = iter(range(10))

    def positive(value: int) -> int:
        if value < 1:
            raise ValueError("not positive")
        return value

    with serving(lambda *request: (200, next(numbers))) as url:
        answer = run(Client(service(url)), lambda client: client.post({}, positive))
    assert (answer.value, answer.tries) == (1, 1)


def test_token_is_sent_and_must_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHO_TOKEN", "s3cret")
    with serving(lambda path, headers, body: (200, headers.get("Authorization"))) as url:
        client = Client(service(url, token_env="ECHO_TOKEN"))
        assert run(client, lambda client: client.post({}, same)).value == "Bearer s3cret"
    monkeypatch.delenv("ECHO_TOKEN")
    with pytest.raises(TokenError, match=r"echo\.token_env=ECHO_TOKEN"):
        Client(service("http://127.0.0.1:1", token_env="ECHO_TOKEN"))


@pytest.mark.parametrize(
    ("spec", "key"),
    [
        (roles.RewardServiceSpec(token_env="NO_TOKEN"), "reward.remote.token_env"),
        (roles.RetrieverSpec(token_env="NO_TOKEN"), "retriever.token_env"),
        (roles.ReferenceServiceSpec(token_env="NO_TOKEN"), "actor_rollout_ref.ref.token_env"),
        (
            fit.service(roles.GenerationSpec(server_token_env="NO_TOKEN")),
            "actor_rollout_ref.rollout.server_token_env",
        ),
    ],
)
def test_the_message_about_a_token_names_a_key(spec: roles.ServiceSpec, key: str) -> None:
    assert PPO.meaning(key) == "schema"
    with pytest.raises(TokenError, match=f"^{re.escape(key)}=NO_TOKEN"):
        Client(spec)


def test_answer_size_is_bounded() -> None:
    with serving(lambda *request: (200, b'"' + b"x" * 5_000_000 + b'"')) as url:
        small = Client(service(url, max_answer=1000))

        async def ask(client: Client) -> None:
            await client.attempt(url, {}, same)

        with pytest.raises(Retry, match="an answer of more than 1000 bytes"):
            run(small, ask)


@pytest.mark.parametrize("layers", [1, 2])
def test_compressed_answers_are_refused_before_they_are_decoded(layers: int) -> None:
    """Nested layers of gzip made 1.84 GB of 1,627 bytes."""
    content = b'"' + b"x" * 1_000_000 + b'"'
    for _ in range(layers):
        content = gzip.compress(content)
    encoding = ", ".join(["gzip"] * layers)
    with serving(lambda *request: (200, content), encoding) as url:
        with pytest.raises(Retry, match=f"an answer with Content-Encoding: {encoding}, though"):
            run(Client(service(url)), lambda client: client.attempt(url, {}, same))
    with serving(lambda *request: (200, b"1"), "Identity") as url:
        assert run(Client(service(url)), lambda client: client.attempt(url, {}, same)) == 1


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"[" + b"[]," * 2_000_000 + b"[]]", "the JSON has more than 2,000,000 values"),
        (b"[" * 65 + b"]" * 65, "the JSON is nested deeper than 64 levels"),
        (b'{"a":' * 65 + b"1" + b"}" * 65, "the JSON is nested deeper than 64 levels"),
    ],
)
def test_json_that_would_fill_the_memory_is_refused(answer: bytes, reason: str) -> None:
    with serving(lambda *request: (200, answer)) as url:
        slow = Client(service(url, timeout_s=30.0))
        with pytest.raises(Retry, match=reason):
            run(slow, lambda client: client.attempt(url, {}, same))


def test_error_bodies_have_no_control_characters() -> None:
    with serving(lambda *request: (400, "\x1b]0;title\x07 \u202e\n no".encode())) as url:
        with pytest.raises(Refused) as caught:
            run(Client(service(url)), lambda client: client.attempt(url, {}, same))
    assert str(caught.value) == "HTTP 400: ?]0;title? ? no"


@pytest.mark.parametrize("status", [302, 400, 401, 404, 422])
def test_client_errors_and_redirects_are_not_tried_again(status: int) -> None:
    asked = []

    def answers(path: str, headers: dict[str, str], body: Any) -> tuple[int, Any]:
        asked.append(path)
        return status, {"detail": "no"}

    with serving(answers) as url:
        with pytest.raises(Refused, match=f"HTTP {status}: .*no"):
            run(Client(service(url)), lambda client: client.post({}, same))
    assert asked == ["/"]


def test_proxy_settings_do_not_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with serving(lambda *request: (200, "direct")) as url:
        assert run(Client(service(url)), lambda client: client.post({}, same)).value == "direct"


def test_many_requests_run_at_once() -> None:
    """More than httpx's usual 100 connections."""
    together = threading.Barrier(120, timeout=60)

    def answers(*request: Any) -> tuple[int, Any]:
        together.wait()
        return 200, "ok"

    with serving(answers) as url:
        client = Client(service(url, timeout_s=30, deadline_s=30, max_in_flight=120))

        async def ask(client: Client) -> list[Any]:
            return await asyncio.gather(*(client.post({}, same) for _ in range(120)))

        assert [answer.value for answer in run(client, ask)] == ["ok"] * 120


def test_connections_are_used_again() -> None:
    """By requests at the same time each has its own; the next requests open no more."""
    opened = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened
        opened += 1
        while await reader.readline():
            await reader.readuntil(b"\r\n\r\n")
            await asyncio.sleep(0.2)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        writer.close()

    async def ask() -> None:
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with Client(service(url, timeout_s=30)) as client:
            for _ in range(3):
                await asyncio.gather(*(client.ping(url) for _ in range(20)))
        server.close()

    asyncio.run(ask())
    assert opened == 20


def test_a_connection_is_not_used_again_after_an_error() -> None:
    """The server closes it some time after the answer. Requests beside the failed one go on."""
    closed = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal closed
        slow = b"/slow" in await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(0.3 if slow else 0.0)
        status = b"200 OK" if slow else b"500 No"
        writer.write(b"HTTP/1.1 " + status + b"\r\nContent-Length: 2\r\n\r\n{}")
        if slow:
            closed += await reader.read() == b""
        await asyncio.sleep(0.1)
        writer.close()

    async def ask() -> None:
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with Client(service(url, timeout_s=30)) as client:
            slow = asyncio.create_task(client.ping(f"{url}/slow"))
            await asyncio.sleep(0.1)
            for _ in range(3):
                with pytest.raises(Retry, match="HTTP 500") as caught:
                    await client.ping(url)
                assert not isinstance(caught.value, Broken)
            await slow
            await asyncio.sleep(0.1)
            assert closed == 1
        server.close()

    asyncio.run(ask())


def test_slow_trickle_is_ended_by_the_time_limit() -> None:
    """Each read of a trickle is fast; only their sum is too slow."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:

        def trickle() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
                try:
                    for _ in range(400):
                        connection.sendall(b" ")
                        time.sleep(0.05)
                except OSError:
                    pass

        thread = threading.Thread(target=trickle)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(Retry, match=r"no answer to the request within 0\.4 s"):
            run(Client(service(url, timeout_s=0.4)), lambda client: client.attempt(url, {}, same))
        assert time.monotonic() - began < 15, "the answer would take 20 s"
        thread.join()


def test_check_names_servers_that_fail() -> None:
    with serving(lambda *request: (200, "ok")) as url:
        gone = "http://me:secret@127.0.0.1:1"

        async def check(client: Client) -> str | None:
            return await client.check(
                lambda server: client.attempt(server.url + "/health", None, same, method="GET"),
                "Start it.",
            )

        assert asyncio.run(check(Client(service(url)))) is None
        warning = asyncio.run(check(Client(service(url, gone))))
        assert warning and "the echo service at http://me:***@127.0.0.1:1 does not" in warning
        with pytest.raises(Unavailable, match=r"does not answer.*Start it\.") as caught:
            asyncio.run(check(Client(service(gone))))
        assert "secret" not in str(caught.value)


def test_server_that_hangs_up_is_not_down() -> None:
    """The request may be the cause, so it is repeated in halves, or not without end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def hang_up() -> None:
            connection, _ = listener.accept()
            connection.recv(1000)
            connection.close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(Broken, match="RemoteProtocolError|ReadError"):
            run(Client(service(url)), lambda client: client.attempt(url, {}, same))
        thread.join()


def test_no_server_at_the_address_is_down() -> None:
    url = "http://127.0.0.1:1"
    with pytest.raises(Down):
        run(Client(service(url)), lambda client: client.attempt(url, {}, same))


def test_a_connection_that_is_closed_at_once_is_broken(monkeypatch):
    """anyio then finds no socket. Other such errors are raised as they are."""
    monkeypatch.setattr(Client, "_exchange", lambda self, *_: self.asked())
    for name, expected in (("getpeername", Broken), ("other", AttributeError)):

        async def asked(name: str = name) -> None:
            getattr(None, name)

        monkeypatch.setattr(Client, "asked", lambda self, asked=asked: asked(), raising=False)
        client = Client(service("http://127.0.0.1:1"))
        with pytest.raises(expected):
            asyncio.run(client.attempt("http://127.0.0.1:1", {}, lambda value: value))
