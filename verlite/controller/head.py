"""Find the head of a Ray cluster, and wait until it is there."""

import os
import socket
import time
import urllib.parse

from verlite.controller import ray_internals, ray_node
from verlite.terminal import Countdown

ASK_TIMEOUT_S = 5.0
"""How long one question to a head may take."""
DEFAULT_PORT = 6379
HERE = "the cluster started on this machine"
HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""The first bytes of a gRPC client: the HTTP/2 preface and empty settings (RFC 9113, section 3.4).
The server's first frame contains settings, too."""
HTTP2_SETTINGS = 4


class NoCluster(ConnectionError):
    """No Ray cluster that this process can join answers at the given address."""


def find(address: str | None) -> str | None:
    """Return the address of the cluster to join, "auto", or None to start one.

    Args:
        address: host:port, "auto", "local", or None for RAY_ADDRESS and else a cluster that
            `ray start` has started on this machine.

    Raises:
        NoCluster: a server answers there, and it cannot be joined. No answer at all is not an
            error; see `wait_for`.
    """
    wanted = address or os.environ.get("RAY_ADDRESS") or ""
    if wanted == "local":
        return None
    if wanted.startswith(("ray://", "http://", "https://")):
        raise NoCluster(
            f"{_source(address)}={wanted}: this process must run inside the cluster. Submit it "
            f"with `ray job submit --address={wanted} -- <command>`, or give the host:port that "
            "`ray start --head` printed."
        )
    if wanted:
        _what_is_missing(wanted, _source(address))
        return wanted
    started_here = ray_node.load()
    if started_here is not None:
        if started_here.dead() or _what_is_missing(started_here.address, _source(address)):
            raise NoCluster(
                f"`verlite cluster start` has started Ray on this machine (rank "
                f"{started_here.rank} of the cluster at {started_here.address}), but "
                "it no longer answers. Run `verlite cluster stop` here and start it again; after "
                "a stop alone the run uses this machine only."
            )
        return started_here.address
    found = ray_internals.running_cluster()
    if found and _what_is_missing(found, _source(address)) is None:
        return found
    return None


def token_environment(target: str) -> dict[str, str | None]:
    """Return the environment variables with the token of the cluster at host:port.

    {} if they are set already, or if `verlite cluster start` did not start it on this machine.
    """
    started_here = ray_node.load() if "RAY_AUTH_MODE" not in os.environ else None
    if started_here is None or started_here.address != target:
        return {}
    return ray_node.token_environment(started_here.authenticated)


def answers(address: str) -> bool:
    """Return whether a gRPC server, such as Ray's head, answers there. It needs no token."""
    try:
        parts = urllib.parse.urlsplit("//" + address)
        server = (parts.hostname or "", parts.port or DEFAULT_PORT)
        with socket.create_connection(server, timeout=ASK_TIMEOUT_S) as connection:
            if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
                return True  # the answer would be encrypted
            connection.sendall(HTTP2_GREETING)
            reply = connection.recv(9)
            return len(reply) > 3 and reply[3] == HTTP2_SETTINGS
    except (OSError, ValueError):
        return False


def wait_for(target: str, address: str | None, wait_s: float) -> str:
    """Wait until the cluster can be joined from this machine; return its host:port.

    Shows a countdown on the terminal.

    Args:
        target: what `find(address)` returned.

    Raises:
        NoCluster: after wait_s, or at once if what answers cannot be joined.
    """
    source = _source(address)
    deadline = time.monotonic() + wait_s
    with Countdown() as countdown:
        while True:
            missing = _what_is_missing(target, source)
            if missing is None:
                return target if target != "auto" else str(ray_internals.running_cluster())
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise NoCluster(f"{_missing_text(source, target, missing, wait_s)}.")
            countdown.show(
                f"waiting for the Ray cluster at {source}={target}: {missing}, "
                f"giving up in {remaining:.0f} s"
            )
            time.sleep(min(1.0, remaining))


def missing(target: str, address: str | None, wait_s: float) -> str | None:
    """Return why the cluster cannot be joined now, as `wait_for` says it; None if it can.

    Raises:
        NoCluster: waiting would not help.
    """
    source = _source(address)
    why = _what_is_missing(target, source)
    return None if why is None else _missing_text(source, target, why, wait_s)


def _missing_text(source: str, target: str, why: str, wait_s: float) -> str:
    return (
        f"{source}={target}: {why}. Start the cluster with `verlite cluster start` or `ray start`, "
        "give the host:port that its head printed (not the dashboard's), or use "
        "ray_kwargs.ray_init.address=local to run on this machine alone. A cluster that starts "
        f"later is awaited for ray_kwargs.wait_s (here {wait_s:g} s)"
    )


def _source(address: str | None) -> str:
    """Return the name of the setting that gives the address."""
    if address:
        return "ray_kwargs.ray_init.address"
    return "RAY_ADDRESS" if os.environ.get("RAY_ADDRESS") else HERE


def _what_is_missing(target: str, source: str) -> str | None:
    """Return why the cluster cannot be joined yet, None if it can.

    Raises:
        NoCluster: waiting would not help.
    """
    if target == "auto":
        found = ray_internals.running_cluster()
        if found is None:
            return "no cluster runs on this machine"
        target = found
    try:
        parts = urllib.parse.urlsplit("//" + target)
        port = parts.port or DEFAULT_PORT
        socket.getaddrinfo(parts.hostname, port)
    except ValueError as error:
        raise NoCluster(f"{source}={target}: {error}. Give host:port.") from error
    except OSError as error:
        return f"{parts.hostname}: {error.strerror}"
    with ray_internals.environment(token_environment(target)):
        answer = ray_internals.ask_head(target, ASK_TIMEOUT_S)
    if answer.refusal:
        alone = ""
        if source == HERE:
            alone = ". To run on this machine alone: ray_kwargs.ray_init.address=local"
        raise NoCluster(f"{source}={target}: {answer.refusal}{alone}")
    return answer.missing
