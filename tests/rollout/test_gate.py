"""The gate before vLLM's application, without vLLM."""

import asyncio
from typing import Any

import pytest

from verlite.rollout.servers.command import HOSTS
from verlite.rollout.servers.gate import Gate

KIND = (b"content-type", b"application/json")


def status(*headers: tuple[bytes, bytes], path: str = "/pause") -> int:
    """Ask the gate and return the status of its answer; 200 is vLLM's."""
    sent: list[Any] = []

    async def vllm(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": headers,
        "server": ("127.0.0.1", 80),
    }
    asyncio.run(Gate(vllm)(scope, None, send))
    return int(sent[0]["status"])


def test_requests_of_other_sites_do_not_reach_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.setenv(HOSTS, "127.0.0.1 Gpu4")
    assert status((b"host", b"127.0.0.1:80"), KIND) == 200
    assert status((b"host", b"gpu4:80"), KIND) == 200
    assert status((b"host", b"evil.example"), KIND) == 403
    assert status((b"host", b"gpu4"), KIND, (b"origin", b"https://evil.example")) == 403
    assert status((b"host", b"gpu4"), (b"content-type", b"text/plain")) == 415
    assert status((b"host", b"gpu4"), (b"content-length", b"2")) == 415
    assert status((b"host", b"gpu4"), (b"content-length", b"0")) == 200
    monkeypatch.setenv("VLLM_API_KEY", "s3cret")
    assert status((b"host", b"balancer"), KIND, (b"authorization", b"Bearer s3cret")) == 200
    assert status((b"host", b"balancer"), KIND) == 401
