"""The address of a service: bind it early, and print it."""

import errno
import socket


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
