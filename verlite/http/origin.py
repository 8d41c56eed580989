"""Which requests a service answers, by their headers: none that a web page of another site caused.

A page that a user of the machine visits can send requests to services on loopback. With DNS
rebinding its own host name becomes 127.0.0.1, and it reads the answers too.
"""

import functools
import ipaddress
import socket
from collections.abc import Collection, Mapping
from typing import Any
from urllib.parse import urlsplit

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
