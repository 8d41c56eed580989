"""The Ray node that `verlite cluster start` has started on this machine.

Its record lies in a private folder of this machine, with the cluster's token. Through it later
commands and runs on this machine find the cluster without an environment variable. One user has at
most one such node per machine; VERLITE_CLUSTER_DIR names another folder, and so allows a second.
"""

import json
import os
import stat
from dataclasses import asdict, dataclass
from pathlib import Path

from verlite.controller.node import Process, process_state
from verlite.files import replace_file

MARK = "VERLITE_CLUSTER"
"""Environment variable of Ray's daemons and their children: RayNode.mark plus "/ray"."""
RANK_LABEL = "verlite-node-rank"
"""Ray label of a node: its rank. The head has 0."""
DAEMONS = ("gcs_server", "raylet")
"""Without one of these (the first runs on the head only) the node is lost."""


class NodeStateError(RuntimeError):
    """The folder with the node's record cannot be used."""


@dataclass(frozen=True)
class RayNode:
    """What was started on this machine.

    Attributes:
        address: host:port of Ray's head.
        node_address: IP address of this node.
        cluster_id: Ray's id of the cluster.
        authenticated: whether the cluster asks for the token.
        shared: the folder with the head file and the token; None if `--head` was given.
        mark: this start, in the environment of its processes (see MARK).
        boot: the machine's boot id. A record from before a reboot is ignored.
        daemons: (name, process id, start time) of Ray's daemons.
        session_dir: Ray's folder of logs and sockets.
        stopping: `verlite cluster stop` is ending it.
    """

    rank: int
    address: str
    node_address: str
    cluster_id: str
    authenticated: bool
    shared: str | None
    mark: str
    boot: str
    started: float
    daemons: list[tuple[str, int, int]]
    session_dir: str
    stopping: bool = False

    def dead(self) -> list[str]:
        """Return the names of the daemons in DAEMONS that have ended."""
        return [
            name
            for name, pid, started in self.daemons
            if name in DAEMONS and process_state(Process(pid, started)) in ("gone", "dead")
        ]


def folder() -> Path:
    """Return the folder of the record. In /tmp, because that is never shared between machines."""
    return Path(os.environ.get("VERLITE_CLUSTER_DIR") or f"/tmp/verlite-cluster-{os.getuid()}")


def make_folder() -> Path:
    """Create the folder, readable by this user only.

    Raises:
        NodeStateError: it belongs to another user, or others may read it.
    """
    path = folder()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise NodeStateError(
            f"{path} must be a folder of this user that nobody else can read or write. "
            "Remove it, or set VERLITE_CLUSTER_DIR to another folder."
        )
    return path


def record_path() -> Path:
    """Return the path of the record."""
    return folder() / "node.json"


def token_path() -> Path:
    """Return the path of this machine's copy of the token."""
    return folder() / "token"


def boot_id() -> str:
    """Return an id that changes when the machine (not a container on it) starts; "" if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def save(node: RayNode) -> None:
    """Write the record, replacing an older one at once."""
    make_folder()
    replace_file(record_path(), json.dumps(asdict(node), indent=1))


def load() -> RayNode | None:
    """Return the record; None if nothing was started since the machine has booted."""
    path = record_path()
    try:
        if path.stat().st_uid != os.getuid():
            return None
        values = json.loads(path.read_text(encoding="utf-8"))
        values["daemons"] = [tuple(daemon) for daemon in values["daemons"]]
        node = RayNode(**values)
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return node if node.boot == boot_id() else None


def remove() -> None:
    """Remove the record and the token."""
    for path in (record_path(), token_path()):
        path.unlink(missing_ok=True)


def token_environment(authenticated: bool) -> dict[str, str | None]:
    """Return the environment variables by which Ray finds the token. Unset those that are None.

    Args:
        authenticated: whether the cluster asks for the token.
    """
    if not authenticated:
        return {"RAY_AUTH_MODE": "disabled"}
    # Ray reads RAY_AUTH_TOKEN first.
    path = str(token_path())
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": path, "RAY_AUTH_TOKEN": None}
