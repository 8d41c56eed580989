"""`verlite cluster start --block`: stay until Ray dies on this node or a signal asks to stop."""

import time
from dataclasses import replace
from pathlib import Path

from verlite.controller import guardian, ray_node
from verlite.controller.head import answers
from verlite.controller.ray_node import MARK, RayNode
from verlite.launch.devices import count, view
from verlite.launch.errors import ClusterError
from verlite.launch.head import Say, Source
from verlite.launch.start import stop

VIEW_EVERY_S = 5.0
HEAD_FAILURES = 6
"""Another node ends its Ray if the head has not answered this many times in a row: after 30 s if
connections are refused, 60 s if nothing answers. Ray itself needs more than two minutes."""


def watch(node: RayNode, source: Source, say: Say) -> None:
    """Wait until Ray dies on this node or an exception (a signal) ends the wait; stop the node.

    On the head, report nodes that join and leave. If this process is killed, a guardian ends Ray.

    Raises:
        ClusterError: with the daemon that has ended, and where its log is; or the head is lost.
    """
    own_cluster = replace(source, named=False)
    guard = guardian.start(f"{MARK}={node.mark}")
    try:
        known: dict[str, str] | None = None
        next_view = 0.0
        failures = 0
        while True:
            dead = node.dead()
            if dead and _is_being_stopped():
                say("stopped by `verlite cluster stop`")
                return
            if dead:
                logs = Path(node.session_dir) / "logs"
                raise ClusterError(
                    f"Ray has died on this node (rank {node.rank}): {', '.join(dead)} has ended. "
                    f"Its log: {logs}/{dead[0]}.out and .err"
                )
            if time.monotonic() >= next_view:
                next_view = time.monotonic() + VIEW_EVERY_S
                if node.rank == 0:
                    known = _report_changes(known, own_cluster, say)
                else:
                    failures = 0 if answers(node.address) else failures + 1
            if failures == HEAD_FAILURES:
                raise ClusterError(
                    f"the head at {node.address} does not answer: ending Ray on this node (rank "
                    f"{node.rank}). Is the head's machine up, and the network between them?"
                )
            time.sleep(0.5)
    finally:
        stop(say)
        guardian.dismiss(guard)


def _is_being_stopped() -> bool:
    record = ray_node.load()
    return record is None or record.stopping


def _report_changes(
    known: dict[str, str] | None, source: Source, say: Say
) -> dict[str, str] | None:
    """Report the nodes that have joined or left since `known`; return those of now."""
    try:
        devices = count(view(source))
    except (ConnectionError, ClusterError):
        return known
    now = {
        f"{rank} {address}": f"rank {rank} ({address}, {number} devices)"
        for rank, address, number in devices.nodes
    }
    if known is not None:
        for name, text in now.items():
            if name not in known:
                say(f"{text} has joined: {devices.total} devices in all")
        for name, text in known.items():
            if name not in now:
                say(f"{text} is lost: {devices.total} devices remain")
    return now
