"""Find the head of a cluster: by its address, or by two files on a folder that all nodes share.

`ray_head_ip.txt` says where the head is. Its first line is the address alone, as other tools write
it. `ray_token` is the secret that lets a process join.
"""

import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from verlite.controller import ray_internals, ray_node
from verlite.controller.head import answers
from verlite.controller.ray_internals import ClusterView, environment
from verlite.files import replace_file
from verlite.launch import ClusterError
from verlite.launch.addresses import join, split

HEAD_FILE = "ray_head_ip.txt"
TOKEN_FILE = "ray_token"


@dataclass(frozen=True)
class Head:
    """The content of the head file.

    Attributes:
        address: host:port of Ray's head.
        cluster_id: Ray's id of the cluster, new each time that the head starts. "" if the file has
            only an address.
        authenticated: whether the cluster asks for a token.
        host: the host name of the head's node.
        started: seconds since the epoch.
    """

    address: str
    cluster_id: str = ""
    authenticated: bool = True
    host: str = ""
    started: float = 0.0

    def age(self) -> str:
        """Return how long ago the head was started, for a message."""
        if not self.started:
            return "at an unknown time"
        minutes = max(0.0, time.time() - self.started) / 60
        return f"{minutes:.0f} min ago" if minutes < 120 else f"{minutes / 60:.0f} h ago"


def write_head(folder: Path, head: Head) -> None:
    """Write the head file at once, so that no reader sees a part of it.

    Raises:
        ClusterError: the folder cannot be written.
    """
    host, port = split(head.address)
    lines = [
        host,
        f"port: {port}",
        f"cluster: {head.cluster_id}",
        f"authentication: {'token' if head.authenticated else 'none'}",
        f"host: {head.host}",
        f"started: {head.started:.0f}",
    ]
    _replace(folder / HEAD_FILE, "\n".join(lines) + "\n", 0o644)


def read_head(folder: Path, default_port: int) -> Head | None:
    """Return the content of the head file; None if there is none.

    Args:
        default_port: the port if the file has only an address.

    Raises:
        ClusterError: the file is not a head file, or cannot be read.
    """
    path = folder / HEAD_FILE
    try:
        # Listing the folder has a network file system look for files that are new.
        os.listdir(folder)
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ClusterError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ClusterError(f"{path} is not a text file. Remove it.") from None
    if not text.strip():
        return None  # another tool has created it, and has not written the address yet
    host, *rest = text.split("\n")
    fields = dict(line.split(": ", 1) for line in rest if ": " in line)
    try:
        port = int(fields.get("port", default_port))
        float(fields.get("started", 0))
    except ValueError:
        raise ClusterError(f"{path}: port or started is not a number. Remove the file.") from None
    try:
        return Head(
            join(host.strip(), port),
            fields.get("cluster", ""),
            fields.get("authentication", "token") == "token",
            fields.get("host", ""),
            float(fields.get("started", 0)),
        )
    except ValueError:
        raise ClusterError(
            f"{path} does not begin with an IP address: {host!r}. Remove it."
        ) from None


def remove_head(folder: Path, cluster_id: str | None = None) -> None:
    """Remove the head file and the token, unless another cluster has written them since.

    Args:
        cluster_id: the cluster that ends. None: any.
    """
    if cluster_id is not None:
        try:
            head = read_head(folder, 0)
        except ClusterError:
            head = None
        if head is None or head.cluster_id != cluster_id:
            return
    for name in (HEAD_FILE, TOKEN_FILE):
        (folder / name).unlink(missing_ok=True)


def create_token(folder: Path) -> str:
    """Write a new random token that only this user can read, and return it.

    Raises:
        ClusterError: the folder cannot be written, or its file system lets others read it.
    """
    token = secrets.token_hex(32)
    path = folder / TOKEN_FILE
    _replace(path, token, 0o600)
    try:
        return read_token(folder) or token
    except ClusterError:
        path.unlink(missing_ok=True)
        raise


def read_token(folder: Path) -> str | None:
    """Return the token; None if there is none.

    Raises:
        ClusterError: the file cannot be read, or others can read it.
    """
    path = folder / TOKEN_FILE
    try:
        mode = path.stat().st_mode
        token = path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ClusterError(
            f"{path} cannot be read: {error.strerror}. All nodes must be started by one user."
        ) from None
    if stat.S_IMODE(mode) & 0o077:
        raise ClusterError(
            f"{path} has mode {stat.S_IMODE(mode):o}: other users can read the token. Use a folder "
            "on a file system that keeps modes (--shared), or export one secret as RAY_AUTH_TOKEN "
            "on every node."
        )
    return token


def _replace(path: Path, text: str, mode: int) -> None:
    """Write a file atomically. Raises ClusterError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text, mode)
    except OSError as error:
        raise ClusterError(
            f"{path} cannot be written: {error.strerror}. Choose another folder with --shared."
        ) from None


DASHBOARD = 8265
"""The port of Ray's dashboard, unless another is asked for or it is taken."""
REMINDER_S = 30.0
"""While waiting, say so at least this often."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class HeadSource:
    """Where the head is, and how to be let in.

    Attributes:
        shared: folder of the head file and the token; None: `head` says where the head is.
        head: ip:port of the head; None: from the head file.
        port: the head's port, if neither of these has one.
        authenticate: whether joining takes a token.
        wait_s: how long to wait for the head, in seconds.
        named: whether the user named the folder or the head. Else `shared` is the default folder.
    """

    shared: Path | None
    head: str | None = None
    port: int = 6379
    authenticate: bool = True
    wait_s: float = 600.0
    named: bool = True


def find_head(source: HeadSource) -> tuple[str, str | None, ClusterView]:
    """Return (ip:port, the token or None if it asks for none, the view) of the head.

    Raises:
        ConnectionError: the head is not there yet; the message says what is missing.
        ClusterError: the head refuses the token, or there is none. Waiting does not help.
    """
    token = given_token(source)
    authenticated = source.authenticate
    cluster_id = ""
    if source.head is not None:
        address = source.head
        where = f"--head {address}"
    else:
        assert source.shared is not None
        path = source.shared / HEAD_FILE
        head = read_head(source.shared, source.port)
        if head is None:
            raise ConnectionError(
                f"{path} does not exist. Rank 0 writes it when its Ray runs; the folder must be "
                "shared by all nodes (else use --head HOST and RAY_AUTH_TOKEN)"
            )
        address, cluster_id = head.address, head.cluster_id
        authenticated = authenticated and head.authenticated
        where = f"{path} names {address}, started {head.age()}"
    if not answers(address):
        hint = "Is rank 0 started? Does a firewall block the port?"
        if address.endswith(f":{DASHBOARD}"):
            hint = f"{DASHBOARD} is the dashboard's port. Name the head's: {source.port}"
        raise ConnectionError(f"{where}, where no Ray answers. {hint}")
    is_given = token is not None
    if not authenticated:
        token = None
    elif token is None:
        if source.shared is None:
            raise ClusterError(no_token(where))
        token = read_token(source.shared)
        if token is None:
            path = source.shared / TOKEN_FILE
            raise ConnectionError(
                f"{path} does not exist. If the head was given RAY_AUTH_TOKEN, export it here too"
            )
    try:
        with credentials(token):
            view = ray_internals.view(address)
    except PermissionError:
        if source.head is not None or is_given or not authenticated:
            raise ClusterError(
                f"{where}: the cluster there refuses "
                + ("this token" if authenticated else "a process without a token")
                + ". Give every node the same RAY_AUTH_TOKEN, or the shared folder of the head."
            ) from None
        raise ConnectionError(
            f"{where}, but the cluster there refuses the token of that folder, so it is another "
            "cluster. Rank 0 replaces the file when it starts"
        ) from None
    if cluster_id and cluster_id != view.cluster_id:
        raise ConnectionError(
            f"{where}, but another cluster answers there now. Rank 0 replaces the file when it "
            "starts"
        )
    if not any(node.is_head for node in view.nodes):
        raise ConnectionError(f"{where}, whose own node has not joined it yet")
    return address, token, view


@contextmanager
def credentials(token: str | None) -> Iterator[None]:
    """Let this process talk to a cluster meanwhile. None: the cluster asks for no token."""
    mode = "disabled" if token is None else "token"
    with environment({"RAY_AUTH_MODE": mode, "RAY_AUTH_TOKEN": token}):
        yield


def given_token(source: HeadSource) -> str | None:
    """Return the token of the environment, as Ray would read it; None if there is none.

    Raises:
        ClusterError: RAY_AUTH_TOKEN_PATH cannot be read.
    """
    if not source.authenticate:
        return None
    token = os.environ.get("RAY_AUTH_TOKEN")
    if token:
        return token
    path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    if path == str(ray_node.token_path()):
        path = None  # exported for an earlier cluster on this machine
    elif path is None and os.environ.get("RAY_AUTH_MODE") == "token":
        default = Path.home() / ".ray" / "auth_token"
        path = str(default) if default.is_file() else None
    if not path:
        return None
    try:
        return Path(path).read_text(encoding="utf-8").strip() or None
    except OSError as error:
        raise ClusterError(f"RAY_AUTH_TOKEN_PATH={path} cannot be read: {error.strerror}") from None


def no_token(why: str) -> str:
    return (
        f"{why} needs a token that all nodes know: export one secret as RAY_AUTH_TOKEN on every "
        "node (for example of `openssl rand -hex 32`), use a shared folder (--shared), or "
        "--no-auth in a network that nobody else can reach."
    )


class WaitMessages:
    """Says why a command waits: when the reason changes, and every REMINDER_S seconds."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._reason = ""
        self._last = 0.0

    def show(self, reason: str, remaining: float) -> None:
        """Report the reason, with the seconds that remain."""
        now = time.monotonic()
        if reason != self._reason or now - self._last > REMINDER_S:
            self._reason = reason
            self._last = now
            self._say(f"{reason} (giving up in {remaining:.0f} s)")
