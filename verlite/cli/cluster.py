"""`verlite cluster`: start Ray on several nodes, check that all have joined, stop it."""

import os
import signal
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from verlite.cli.common import fail, failing

if TYPE_CHECKING:
    from verlite.launch.head import HeadSource

DEFAULT_PORT = 6379
"""Ray's own default, so that `--head HOST` and `ray start --address=HOST` mean the same."""
DEFAULT_SHARED = "~/.verlite/cluster"

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Start Ray on several nodes, check that all have joined, stop it. docs/cluster.md",
)

Shared = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Folder that all nodes share, for the head's address and the token. "
        f"Default: {DEFAULT_SHARED}; none with --head.",
    ),
]
HeadAddress = Annotated[
    str | None,
    typer.Option(
        metavar="HOST[:PORT]",
        help="Where the head is, in place of the shared folder. The token then comes from "
        "RAY_AUTH_TOKEN.",
    ),
]
Port = Annotated[int, typer.Option(envvar="RAY_PORT", min=1, max=65535, help="Port of the head.")]
NoAuth = Annotated[
    bool,
    typer.Option("--no-auth", help="Let everybody who reaches the head run code in the cluster."),
]
Wait = Annotated[
    float, typer.Option("--wait", min=0, metavar="SECONDS", help="How long to wait at most.")
]


class Stopped(BaseException):
    """A signal asks to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@app.command()
def start(
    ray_options: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- RAY_OPTION]...", help="More options of `ray start`."),
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(
            envvar="RANK", min=0, help="This node's number. 0 is the head.", show_default=False
        ),
    ] = None,
    shared: Shared = None,
    head: HeadAddress = None,
    port: Port = DEFAULT_PORT,
    address: Annotated[
        str | None,
        typer.Option(
            help="This node's IP address or interface (ib0). Default: the interface that leads to "
            "the head; on the head, the default route's."
        ),
    ] = None,
    num_cpus: Annotated[int | None, typer.Option(min=0, help="CPU slots of this node.")] = None,
    num_gpus: Annotated[int | None, typer.Option(min=0, help="GPUs of this node.")] = None,
    dashboard_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Head: Ray's default is 8265.")
    ] = None,
    no_auth: NoAuth = False,
    wait: Wait = 600,
    block: Annotated[
        bool, typer.Option("--block", help="Stay until Ray ends here; SIGTERM ends Ray.")
    ] = False,
) -> None:
    """Start Ray on this node: rank 0 is the head, all others join it.

    Run it once per node, in any order. The last line is "Ray started". Exit code 1: not started.
    """
    if rank is None:
        fail(
            "RANK is not set. Give each node a number, 0 for the head: "
            "`RANK=0 verlite cluster start`, or --rank 0. (Slurm has $SLURM_NODEID, dstack "
            "$DSTACK_NODE_RANK, SkyPilot $SKYPILOT_NODE_RANK.)"
        )
    from verlite.controller.ray_node import NodeStateError, token_environment
    from verlite.launch import ClusterError, ray_daemons
    from verlite.launch.start import Options, watch
    from verlite.launch.start import start as start_node

    with failing(ClusterError):
        ray_daemons.check_options(ray_options or [])
    source = _source(shared, head, port, no_auth, wait)
    options = Options(
        rank, source, address, num_cpus, num_gpus, dashboard_port, tuple(ray_options or [])
    )
    if not source.authenticate:
        _say(
            f"WARNING: no authentication. Everybody who reaches port {port} of the head can run "
            "code as this user on every node."
        )
    _catch_signals()
    try:
        node = start_node(options, _say)
        export = " ".join(
            f"{name}={value}"
            for name, value in token_environment(node.authenticated).items()
            if value
        )
        _say(f"for Ray's own commands on this node (ray status, ray job): export {export}")
        _say("Ray started")
        if block:
            watch(node, source, _say)
    except Stopped as stopped:
        _say(f"stopped by {signal.Signals(stopped.number).name}")
        raise typer.Exit(128 + stopped.number) from None
    except (ClusterError, NodeStateError) as error:
        fail(error, code=1)


@app.command()
def check(
    devices: Annotated[
        int, typer.Argument(min=1, help="GPUs in all; CPU slots if no node has a GPU.")
    ],
    wait: Wait = 600,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Number of nodes, to name those that are missing.")
    ] = None,
    shared: Shared = None,
    head: HeadAddress = None,
    port: Port = DEFAULT_PORT,
    no_auth: NoAuth = False,
) -> None:
    """Wait until the cluster has this many devices in all. Exit code 1: it has not.

    Without --shared and --head it looks at the cluster of this machine, if `verlite cluster start`
    has run here.
    """
    from verlite.controller.ray_node import NodeStateError
    from verlite.launch import ClusterError
    from verlite.launch.devices import check as check_devices

    _catch_signals()
    try:
        enough = check_devices(devices, _source(shared, head, port, no_auth, wait), nodes, _say)
    except Stopped as stopped:
        raise typer.Exit(128 + stopped.number) from None
    except (ClusterError, NodeStateError) as error:
        fail(error, code=1)
    if not enough:
        raise typer.Exit(1)


@app.command()
def stop() -> None:
    """End the Ray that `verlite cluster start` has started on this node, and nothing else.

    On the head, remove the head file and the token, too.
    """
    from verlite.launch.start import stop as stop_node

    if not stop_node(_say):
        _say("Nothing to stop: `verlite cluster start` has started nothing on this node.")


def _source(
    shared: Path | None, head: str | None, port: int, no_auth: bool, wait: float
) -> "HeadSource":
    """Return where the head is, with --head resolved to an IP address."""
    from verlite.launch import ClusterError
    from verlite.launch.addresses import resolve_head
    from verlite.launch.head import HeadSource

    named = shared is not None or head is not None
    if not named:
        shared = Path(DEFAULT_SHARED)
    with failing(ClusterError):
        resolved = resolve_head(head, port) if head is not None else None
    authenticate = not no_auth and os.environ.get("RAY_AUTH_MODE", "token").lower() != "disabled"
    return HeadSource(
        shared=shared.expanduser().resolve() if shared is not None else None,
        head=resolved,
        port=port,
        authenticate=authenticate,
        wait_s=wait,
        named=named,
    )


def _catch_signals() -> None:
    """Raise Stopped once for SIGTERM, SIGINT and SIGHUP. The cleanup is not interrupted again."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

    def handle(number: int, frame: FrameType | None) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise Stopped(number)

    for each in numbers:
        if signal.getsignal(each) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(each, handle)


def _say(text: str) -> None:
    print(text, flush=True)
