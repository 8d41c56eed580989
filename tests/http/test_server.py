"""What all services share: tokens, limits of size and time, and errors without stack traces."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from fastapi import Request

from tests.http.running import running
from verlite.http import server as module
from verlite.http.address import bind, open_to_others, url
from verlite.http.server import application, parse_object, read_body
from verlite.http.token import TokenError, token_of_file, token_of_variable

pytestmark = pytest.mark.process


@contextmanager
def serving(token: str | None = None) -> Iterator[str]:
    """Run a service that answers its own body, and fails on {"fail": true}."""
    app = application("echo", token=token)

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


def test_token_is_checked_before_the_body_is_read() -> None:
    with serving("s3cret") as address, raw(address) as client:
        client.sendall(b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\n\r\nhalf")
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
        answer = httpx.post(f"{address}/echo", content=body)
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
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert client.recv(1000).startswith(b"HTTP/1.1 200")
        client.sendall(b"GET /health HTTP/1.1\r\nHo")
        with pytest.raises(ConnectionError):
            if not client.recv(1000):
                raise ConnectionError


def test_fast_requests_keep_their_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEAD_S", 0.3)
    with serving() as address, raw(address) as client:
        for _ in range(3):
            client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert client.recv(1000).startswith(b"HTTP/1.1 200")
            time.sleep(0.2)


def test_endless_head_is_disconnected() -> None:
    with serving() as address, raw(address) as client:
        client.sendall(b"POST /echo HTTP/1.1\r\nHost: x\r\n")
        with pytest.raises(ConnectionError):
            for _ in range(1000):
                client.sendall(b"X: " + b"y" * 60_000 + b"\r\n")
                time.sleep(0.001)


def test_slow_body_gets_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BODY_S", 0.3)
    with serving() as address, raw(address) as client:
        client.sendall(b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\n\r\nhalf")
        assert client.recv(1000).startswith(b"HTTP/1.1 408")


def test_large_body_gets_413() -> None:
    with serving() as address:
        fits = json.dumps({"a": 1}).ljust(1000)
        assert httpx.post(f"{address}/echo", content=fits).status_code == 200
        answer = httpx.post(f"{address}/echo", content=fits + " ")
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
