"""Addresses and ports of this machine."""

import ipaddress
import socket

from verlite.controller.node import interface_of
from verlite.launch import ClusterError


def join(host: str, port: int) -> str:
    """Return host:port; an IPv6 address gets brackets.

    Raises:
        ValueError: the host is not an IP address.
    """
    address = ipaddress.ip_address(host)
    return f"[{host}]:{port}" if address.version == 6 else f"{host}:{port}"


def split(address: str) -> tuple[str, int]:
    """Return (host, port) of host:port.

    Raises:
        ValueError: there is no port.
    """
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def resolve_head(text: str, default_port: int) -> str:
    """Return ip:port for `--head HOST[:PORT]`.

    Raises:
        ClusterError: the name has no address, or the port is not a number.
    """
    host, port = text, default_port
    if text.startswith("[") or text.count(":") == 1:
        name, colon, number = text.rpartition(":")
        if colon and not text.endswith("]"):
            if not number.isdecimal() or not 0 < int(number) < 65536:
                raise ClusterError(
                    f"--head {text}: {number!r} is not a port; write HOST or HOST:PORT"
                )
            host, port = name, int(number)
    host = host.strip("[]")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ClusterError(f"--head {text}: {host} has no address here: {error.strerror}") from None
    return join(str(found[0][4][0]), port)


def own_address(wanted: str | None, head: str | None) -> str:
    """Return the address of this machine that Ray uses on it.

    Args:
        wanted: `--address`: an IP address or the name of an interface. None: choose.
        head: IP address of the head's node. The interface that leads there is chosen. None: this
            is the head; the interface of the default route is chosen, else the first other one,
            IPv4 before IPv6.

    Raises:
        ClusterError: this machine has no such address or interface, or no way to the head.
    """
    if wanted:
        return _of_interface(wanted)
    if head is not None:
        chosen = _source_address(head)
        if chosen is None:
            raise ClusterError(f"this machine has no network route to the head at {head}")
        return chosen
    # Addresses of documentation networks (RFC 5737, 3849): nothing is sent there, the kernel is
    # only asked which of its addresses it would use.
    for outside in ("192.0.2.1", "2001:db8::1"):
        chosen = _source_address(outside)
        if chosen is not None and not ipaddress.ip_address(chosen).is_loopback:
            return chosen
    addresses = [
        address for _, address in interfaces() if not ipaddress.ip_address(address).is_loopback
    ]
    return addresses[0] if addresses else "127.0.0.1"


def interfaces() -> list[tuple[str, str]]:
    """Return (interface, IP address) of this machine, IPv4 first, without link-local ones."""
    import psutil

    found = []
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family in (socket.AF_INET, socket.AF_INET6) and "%" not in entry.address:
                found.append((name, entry.address))
    return sorted(found, key=lambda pair: ":" in pair[1])


def other_interfaces(address: str) -> str:
    """Return "eth1 10.0.0.1, ..." for the interfaces that were not chosen; "" if there are none."""
    others = [
        f"{name} {other}"
        for name, other in interfaces()
        if other != address and not ipaddress.ip_address(other).is_loopback
    ]
    return ", ".join(others)


def check_port(address: str, port: int) -> None:
    """Check that a server can listen on this port.

    Raises:
        ClusterError: it is in use, or this user may not use it.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address, port))
        except OSError as error:
            raise ClusterError(
                f"port {port} of {address} cannot be used: {error.strerror}. End the process that "
                f"listens there (`ss -ltnp`), or choose another port with --port or RAY_PORT."
            ) from None


def _of_interface(wanted: str) -> str:
    pairs = interfaces()
    for name, address in pairs:
        if wanted == name:
            return address
    try:
        address = str(ipaddress.ip_address(wanted.strip("[]")))
    except ValueError:
        address = ""
    if address and interface_of(address) is not None:
        return address
    known = ", ".join(f"{name} {address}" for name, address in pairs)
    raise ClusterError(
        f"--address {wanted}: this machine has no such address or interface. It has {known}"
    )


def _source_address(target: str) -> str | None:
    """Return the address from which this machine would send to the target, None without a route."""
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return None
