"""The two files by which the nodes of a cluster find each other on a shared folder.

`ray_head_ip.txt` says where the head is. Its first line is the address alone, as other tools write
it. `ray_token` is the secret that lets a process join.
"""

import os
import secrets
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from verlite.files import replace_file
from verlite.launch.addresses import join, split
from verlite.launch.errors import ClusterError

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
