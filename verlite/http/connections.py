"""HTTP connections for many requests at once.

httpx looks at all connections of a client when a request begins and when one ends. With hundreds
of requests that takes longer than the requests themselves, so here each httpx client has few.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx

CONNECT_S = 2.0
KEEP_ALIVE_S = 3.0
"""Seconds for which an idle connection is kept: less than servers do (uvicorn: 5)."""
PER_CLIENT = 8
"""Requests of one httpx client at the same time."""


@dataclass
class _Share:
    """An httpx client, and the number of its requests."""

    client: httpx.AsyncClient
    in_flight: int = 0


class Connections:
    """Any number of connections, kept alive between requests. Use it in one event loop.

    After an answer with status 5xx its connection is not used again: servers such as uvicorn close
    it after an exception, some time after the answer, and a request that came meanwhile is lost.
    """

    def __init__(self, headers: Mapping[str, str]) -> None:
        """headers: of all requests."""
        self._headers = headers
        self._tls = httpx.create_ssl_context(trust_env=False)  # takes longer than a client
        self._shares: list[_Share] = []

    @asynccontextmanager
    async def stream(
        self, method: str, url: str, content: bytes | None
    ) -> AsyncIterator[httpx.Response]:
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

    def _new(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            verify=self._tls,
            trust_env=False,  # these are internal services, so proxies and .netrc do not apply
            headers=self._headers,
            timeout=httpx.Timeout(None, connect=CONNECT_S),  # `Client.attempt` limits the rest
            limits=httpx.Limits(max_connections=None, keepalive_expiry=KEEP_ALIVE_S),
        )
