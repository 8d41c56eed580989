"""What all services share: tokens, limits of size and time, and errors without stack traces."""

import json
import socket
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from fastapi import Request

from tests.http.running import running
from verlite.http import server as module
from verlite.http.client import TokenError, token_of_file, token_of_variable
from verlite.http.server import (
    application,
    bind,
    open_to_others,
    parse_object,
    read_body,
    refusal,
    url,
)

pytestmark = pytest.mark.process

JSON = {"Content-Type": "application/json"}
KIND = "Content-Type: application/json"
HALF = b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HALF += b"Content-Length: 900\r\n\r\nhalf"


@contextmanager
def serving(token: str | None = None, hosts: Collection[str] = ()) -> Iterator[str]:
    """Run a service that answers its own body, and fails on {"fail": true}."""
    app = application("echo", token=token)
    app.state.hosts = hosts

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "healthy"}

    @app.post("/echo")
    async def echo(request: Request) -> Any:
        value = parse_object(await read_body(request, 1000), '{"a": 1}')
        if value.get("fail"):
            raise KeyError("a secret of the service")
        return value

    with running(app) as address:
        yield address


def raw(address: str) -> socket.socket:
    target = httpx.URL(address)
    return socket.create_connection((target.host, target.port), timeout=10)


@pytest.mark.parametrize(
    "header",
    [None, "Bearer wrong", "Bearer", "bearer s3cret", "Basic s3cret", "s3cret", "Bearer s3cre"],
)
def test_requests_without_the_token_get_401(header: str | None) -> None:
    with serving("s3cret") as address, httpx.Client() as client:
        headers = {} if header is None else {"Authorization": header}
        for method, path in (("GET", "/health"), ("POST", "/echo"), ("GET", "/none")):
            answer = client.request(method, address + path, headers=headers)
            assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
            assert "s3cret" not in answer.text


def test_token_opens_every_route() -> None:
    with serving("s3cret") as address:
        headers = {"Authorization": "Bearer s3cret"}
        with httpx.Client(base_url=address, headers=headers) as client:
            assert client.get("/health").json() == {"status": "healthy"}
            assert client.post("/echo", json={"a": 1}).json() == {"a": 1}


def ask(address: str, *headers: str, method: str = "POST") -> int:
    """Send {} with exactly these headers, and return the status."""
    with raw(address) as client:
        head = "\r\n".join([f"{method} /echo HTTP/1.1", *headers, "Content-Length: 2"])
        client.sendall(f"{head}\r\n\r\n{{}}".encode())
        return int(client.recv(1000).split()[1])


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (200, ["Host: 127.0.0.1:{port}", KIND]),
        (200, ["Host: localhost", "Content-Type: Application/JSON; charset=utf-8"]),
        (200, ["Host: [::1]:80", KIND]),
        (200, [f"Host: {socket.gethostname().upper()}:1", KIND]),
        (200, ["Host: 127.0.0.1:{port}", KIND, "Origin: http://127.0.0.1:{port}"]),
        # DNS rebinding: the name of a site that has become 127.0.0.1
        (403, ["Host: evil.example:{port}", KIND]),
        (403, ["Host: localhost.evil.example", KIND]),
        (403, ["Host: 127.0.0.1.evil.example", KIND]),
        (403, ["Host: localhost@evil.example", KIND]),
        (403, ["Host: 192.0.2.1", KIND]),
        (403, ["Host: [::1", KIND]),
        # a form or script of another site
        (403, ["Host: 127.0.0.1:{port}", KIND, "Origin: https://evil.example"]),
        (403, ["Host: 127.0.0.1:{port}", KIND, "Origin: null"]),
        (403, ["Host: 127.0.0.1:{port}", KIND, "Origin: http://127.0.0.1:1"]),
        (415, ["Host: 127.0.0.1:{port}", "Content-Type: text/plain"]),
        (415, ["Host: 127.0.0.1:{port}", "Content-Type: text/plain; a=application/json"]),
        (415, ["Host: 127.0.0.1:{port}", KIND, "Content-Type: text/plain"]),
        (415, ["Host: 127.0.0.1:{port}"]),
    ],
)
def test_requests_of_other_sites_are_refused(status: int, headers: list[str]) -> None:
    with serving() as address:
        port = str(httpx.URL(address).port)
        assert ask(address, *(header.replace("{port}", port) for header in headers)) == status


def test_a_page_of_another_site_reads_nothing() -> None:
    with serving() as address, httpx.Client(base_url=address) as client:
        assert client.get("/health", headers={"Host": "evil.example"}).status_code == 403


def test_further_names_and_a_token_open_a_service_to_other_hosts() -> None:
    foreign = ["Host: gpu4.example:80", KIND]
    with serving(hosts={"gpu4.example"}) as address:
        assert ask(address, *foreign) == 200
    with serving("s3cret") as address:
        assert ask(address, *foreign) == 401
        assert ask(address, *foreign, "Authorization: Bearer s3cret") == 200


def test_a_service_for_other_machines_has_their_addresses_as_names() -> None:
    scope = {"method": "GET", "headers": [(b"host", b"10.1.2.3:80")], "server": ("10.0.0.1", 80)}
    assert refusal(scope, (), False) is None
    assert refusal({**scope, "server": ("127.0.0.1", 80)}, (), False) is not None
    for name in (b"evil.example", b"", b"[", b":80"):
        scope["headers"] = [(b"host", name)]
        assert refusal(scope, (), False) is not None
    scope["headers"] = [(b"host", b"gpu4:80")]
    assert refusal(scope, (), False) is None
    assert refusal({**scope, "server": ("127.0.0.1", 80)}, (), False) is not None


def test_token_is_checked_before_the_body_is_read() -> None:
    with serving("s3cret") as address, raw(address) as client:
        client.sendall(
            b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: 900\r\n\r\nhalf"
        )
        assert client.recv(1000).startswith(b"HTTP/1.1 401")


def test_error_of_the_service_shows_no_traceback() -> None:
    with serving() as address, httpx.Client() as client:
        answer = client.post(f"{address}/echo", json={"fail": True})
        assert answer.status_code == 500
        assert answer.json() == {"detail": "the service failed; its log has the cause"}
        assert client.get(f"{address}/health").status_code == 200, "the service goes on"


@pytest.mark.parametrize("body", [b"{", b"\xff", b"[1]", b"[" * 900, b"NaN"])
def test_body_that_is_not_an_object_gets_422(body: bytes) -> None:
    with serving() as address:
        answer = httpx.post(f"{address}/echo", content=body, headers=JSON)
        assert answer.status_code == 422 and answer.json()["detail"].startswith("the body is")


def test_slow_head_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEAD_S", 0.3)
    with serving() as address:
        for beginning in (b"", b"POST /echo HTTP/1.1\r\nHo"):
            with raw(address) as client:
                client.sendall(beginning)
                began = time.monotonic()
                with pytest.raises(ConnectionError):
                    if not client.recv(1000):
                        raise ConnectionError
                assert 0.2 < time.monotonic() - began < 3


def test_second_request_of_a_connection_must_be_complete_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "HEAD_S", 0.3)
    with serving() as address, raw(address) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert client.recv(1000).startswith(b"HTTP/1.1 200")
        client.sendall(b"GET /health HTTP/1.1\r\nHo")
        with pytest.raises(ConnectionError):
            if not client.recv(1000):
                raise ConnectionError


def test_fast_requests_keep_their_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEAD_S", 0.3)
    with serving() as address, raw(address) as client:
        for _ in range(3):
            client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert client.recv(1000).startswith(b"HTTP/1.1 200")
            time.sleep(0.2)


def test_endless_head_is_disconnected() -> None:
    with serving() as address, raw(address) as client:
        client.sendall(b"POST /echo HTTP/1.1\r\nHost: localhost\r\n")
        with pytest.raises(ConnectionError):
            for _ in range(1000):
                client.sendall(b"X: " + b"y" * 60_000 + b"\r\n")
                time.sleep(0.001)


def test_slow_body_gets_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BODY_S", 0.3)
    with serving() as address, raw(address) as client:
        client.sendall(
            b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: 900\r\n\r\nhalf"
        )
        assert client.recv(1000).startswith(b"HTTP/1.1 408")


def test_large_body_gets_413() -> None:
    with serving() as address:
        fits = json.dumps({"a": 1}).ljust(1000)
        assert httpx.post(f"{address}/echo", content=fits, headers=JSON).status_code == 200
        answer = httpx.post(f"{address}/echo", content=fits + " ", headers=JSON)
        assert answer.status_code == 413
        assert answer.json()["detail"] == "the body has more than 1000 bytes; send less at a time"


def test_connections_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CONNECTIONS", 2)
    with serving() as address, raw(address), raw(address), httpx.Client() as client:
        time.sleep(0.1)
        assert client.get(f"{address}/health").status_code == 503


def test_addresses_that_other_machines_reach() -> None:
    with bind("127.0.0.1", 0) as own, bind("0.0.0.0", 0) as every:
        assert not open_to_others(own) and open_to_others(every)
        assert url(own, "/x") == f"http://127.0.0.1:{own.getsockname()[1]}/x"


def test_tokens_come_from_variables_and_files(tmp_path: Any, monkeypatch: Any) -> None:
    file = tmp_path / "token"
    file.write_text("s3cret\n")
    assert token_of_file(str(file), "--token-file") == "s3cret"
    monkeypatch.setenv("TOKEN_OF_TEST", "s3cret")
    assert token_of_variable("TOKEN_OF_TEST", "retriever.token_env") == "s3cret"
    monkeypatch.delenv("TOKEN_OF_TEST")
    with pytest.raises(TokenError, match=r"retriever\.token_env=TOKEN_OF_TEST: .* is not set"):
        token_of_variable("TOKEN_OF_TEST", "retriever.token_env")
    with pytest.raises(TokenError, match="cannot be read: No such file"):
        token_of_file(str(tmp_path / "none"), "--token-file")
    for text, reason in (("", "has no token"), ("two words", "cannot have"), ("é", "cannot have")):
        file.write_text(text)
        with pytest.raises(TokenError, match=reason) as caught:
            token_of_file(str(file), "--token-file")
        assert not text or text not in str(caught.value)
