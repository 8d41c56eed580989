"""`verlite cluster start` and `stop`: make this machine the head of a Ray cluster, or join one.

With --block stay until Ray dies on this node or a signal asks to stop.
"""

import secrets
import socket
import time
from dataclasses import dataclass, replace
from pathlib import Path

from verlite.control import limits
from verlite.controller import guardian, ray_internals, ray_node
from verlite.controller.head import answers
from verlite.controller.ray_internals import ClusterView
from verlite.controller.ray_node import MARK, RANK_LABEL, RayNode
from verlite.files import replace_file
from verlite.launch import ClusterError, addresses, ray_daemons
from verlite.launch.devices import count, view
from verlite.launch.head import (
    DASHBOARD,
    HEAD_FILE,
    Head,
    HeadSource,
    Say,
    WaitMessages,
    create_token,
    credentials,
    find_head,
    given_token,
    no_token,
    read_head,
    read_token,
    remove_head,
    write_head,
)


@dataclass(frozen=True)
class Options:
    """What the user asked for.

    Attributes:
        address: IP address or interface of this node; None: choose.
        num_cpus, num_gpus: devices to announce; None: what Ray finds.
        dashboard_port: None: Ray's default, 8265.
        ray_options: more options of `ray start`.
    """

    rank: int
    source: HeadSource
    address: str | None = None
    num_cpus: int | None = None
    num_gpus: int | None = None
    dashboard_port: int | None = None
    ray_options: tuple[str, ...] = ()


def start(options: Options, say: Say) -> RayNode:
    """Start Ray on this machine, record it, and return the record.

    Raises:
        ClusterError, NodeStateError: nothing of Ray is left running.
    """
    _end_remains(say)
    return _start_head(options, say) if options.rank == 0 else _join(options, say)


def stop(say: Say) -> bool:
    """End what `start` started on this machine. Return False if there was nothing."""
    node = ray_node.load()
    if node is None:
        return False
    if not node.stopping:
        ray_node.save(replace(node, stopping=True))
    count = ray_daemons.end(node)
    ray_node.remove()
    if node.rank == 0 and node.shared:
        try:
            remove_head(Path(node.shared), node.cluster_id)
        except OSError as error:
            say(f"{node.shared}/{HEAD_FILE} cannot be removed: {error.strerror}")
    say(f"Stopped rank {node.rank} of the cluster at {node.address} ({count} Ray daemons).")
    return True


def _end_remains(say: Say) -> None:
    """Refuse a second start on this machine, and clean up after a node that has died."""
    node = ray_node.load()
    if node is None:
        return
    dead = node.dead()
    if not dead:
        raise ClusterError(
            f"rank {node.rank} of the cluster at {node.address} already runs on this machine. "
            "End it with `verlite cluster stop`. For a second cluster of this user on the same "
            "machine set VERLITE_CLUSTER_DIR to another folder."
        )
    say(
        f"The Ray of an earlier start (rank {node.rank}) has died ({', '.join(dead)}); removing it."
    )
    stop(lambda text: None)


def _start_head(options: Options, say: Say) -> RayNode:
    if options.source.head is not None:
        host, port = addresses.split(options.source.head)
        try:
            address = addresses.own_address(host, None)
        except ClusterError:
            raise ClusterError(
                f"rank 0 is the head, but --head {host} is not an address of this machine. Run "
                "rank 0 on that machine, or name this one."
            ) from None
    else:
        address, port = addresses.own_address(options.address, None), options.source.port
    head = addresses.join(address, port)
    if options.source.shared is not None:
        _refuse_second_head(options.source, options.source.shared, head, say)
    addresses.check_port(address, port)
    token = given_token(options.source)
    if token is None and options.source.authenticate:
        if options.source.shared is None:
            raise ClusterError(no_token("--head"))
        token = create_token(options.source.shared)
    _save_token(token)
    ray_options = ["--head", f"--port={port}"]
    if options.dashboard_port is not None:
        ray_options.append(f"--dashboard-port={options.dashboard_port}")
    others = addresses.other_interfaces(address)
    say(f"head: rank 0 on {socket.gethostname()}, {head}" + (f" (not {others})" if others else ""))
    try:
        node, seen = _ray_start(options, head, address, ray_options, token, say)
    except BaseException:
        if options.source.shared is not None:
            remove_head(options.source.shared)
        raise
    if options.source.shared is not None:
        content = Head(head, node.cluster_id, token is not None, socket.gethostname(), time.time())
        write_head(options.source.shared, content)
        say(f"head file: {options.source.shared / HEAD_FILE}")
    if seen.dashboard:
        say(dashboard_line(seen.dashboard, options.dashboard_port or DASHBOARD))
    return node


def dashboard_line(address: str, wanted: int) -> str:
    """Say where the dashboard is. Ray takes the next free port without a word."""
    taken = "" if address.endswith(f":{wanted}") else f" (another program has port {wanted})"
    return f"dashboard: http://{address}{taken}"


def _join(options: Options, say: Say) -> RayNode:
    head, token, seen = _wait_for_head(options.source, say)
    address = addresses.own_address(options.address, addresses.split(head)[0])
    for other in seen.nodes:
        if other.labels.get(RANK_LABEL) == str(options.rank) and other.address != address:
            raise ClusterError(
                f"rank {options.rank} is taken by {other.address}. Give each node its own RANK. (A "
                "node that has died stays listed for up to a minute.)"
            )
    _save_token(token)
    say(f"rank {options.rank} on {socket.gethostname()}, {address}; head: {head}")
    ray_options = [f"--address={head}"]
    node, _ = _ray_start(options, head, address, ray_options, token, say)
    return node


def _refuse_second_head(source: HeadSource, folder: Path, head: str, say: Say) -> None:
    """Remove an old head file, unless its head still runs.

    Raises:
        ClusterError: it does.
    """
    old = read_head(folder, addresses.split(head)[1])
    if old is None:
        return
    if _still_runs(old, source, folder):
        raise ClusterError(
            f"{folder / HEAD_FILE} names a head that runs: {old.address} on "
            f"{old.host or 'another host'}, started {old.age()}. Run `verlite cluster stop` there, "
            "join it with another RANK, or give this cluster its own folder with --shared."
        )
    say(
        f"The head file names {old.address}, started {old.age()}, which no longer runs. "
        "Replacing it."
    )
    remove_head(folder)


def _still_runs(head: Head, source: HeadSource, folder: Path) -> bool:
    """Return whether the cluster of a head file still runs.

    Raises:
        ClusterError: the token is missing, so the cluster cannot be asked.
    """
    if not answers(head.address):
        return False
    own = read_token(folder) if head.authenticated else None
    token = own or (given_token(source) if head.authenticated else None)
    if head.authenticated and token is None:
        raise ClusterError(
            f"{folder / HEAD_FILE} names {head.address}, where a Ray answers, but the "
            "token is missing, so it cannot be asked which cluster it is. If the cluster of the "
            "file has ended, remove the file."
        )
    try:
        with credentials(token):
            view = ray_internals.view(head.address)
    except PermissionError:
        return own is None  # with the cluster's own token: another cluster uses the address now
    except ConnectionError:
        return False  # something else uses the address now
    return head.cluster_id in ("", view.cluster_id)


def _wait_for_head(source: HeadSource, say: Say) -> tuple[str, str | None, ClusterView]:
    """Return what `find_head` does, once the head answers.

    Raises:
        ClusterError: it did not within wait_s, or it refuses the token.
    """
    deadline = time.monotonic() + source.wait_s
    progress = WaitMessages(say)
    while True:
        try:
            return find_head(source)
        except ConnectionError as error:
            reason = str(error)
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise ClusterError(f"gave up after {source.wait_s:.0f} s (--wait): {reason}")
        progress.show(f"waiting for the head: {reason}", remaining)
        time.sleep(min(1.0, remaining))


def _ray_start(
    options: Options, head: str, address: str, ray_options: list[str], token: str | None, say: Say
) -> tuple[RayNode, ClusterView]:
    """Run `ray start`, and record what it started. On an error nothing is left."""
    ray_options = [*ray_options, f"--node-ip-address={address}"]
    if options.num_cpus is not None:
        ray_options.append(f"--num-cpus={options.num_cpus}")
    if options.num_gpus is not None:
        ray_options.append(f"--num-gpus={options.num_gpus}")
    extra = ray_daemons.with_label(options.ray_options, f"{RANK_LABEL}={options.rank}")
    mark = secrets.token_hex(8)
    environment = ray_node.token_environment(token is not None)
    try:
        ray_daemons.start([*ray_options, *extra], environment, mark, say)
        daemons, session_dir = ray_daemons.found(mark)
        with credentials(token):
            seen = ray_internals.view(head)
        node = RayNode(
            options.rank,
            head,
            address,
            seen.cluster_id,
            token is not None,
            str(options.source.shared) if options.source.shared is not None else None,
            mark,
            ray_node.boot_id(),
            time.time(),
            daemons,
            session_dir,
        )
        ray_node.save(node)
        return node, seen
    except BaseException:
        ray_daemons.kill(mark)
        ray_node.remove()
        raise


def _save_token(token: str | None) -> None:
    """Keep a private copy on this machine, for Ray's daemons and for later commands."""
    ray_node.make_folder()
    path = ray_node.token_path()
    if token is None:
        path.unlink(missing_ok=True)
        return
    replace_file(path, token, 0o600)


def watch(node: RayNode, source: HeadSource, say: Say) -> None:
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
                next_view = time.monotonic() + limits.VIEW_EVERY_S
                if node.rank == 0:
                    known = _report_changes(known, own_cluster, say)
                else:
                    failures = 0 if answers(node.address) else failures + 1
            if failures == limits.VIEW_FAILURES:
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
    known: dict[str, str] | None, source: HeadSource, say: Say
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
