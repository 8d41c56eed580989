"""All uses of Ray's private modules. Ray has no public interface for these."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any


def running_cluster() -> str | None:
    """Return the address that the last `ray start` on this machine recorded.

    That cluster may have ended.
    """
    from ray._private.utils import read_ray_address

    address: str | None = read_ray_address()
    return address


def reload_environment() -> None:
    """Have Ray read again the environment variables that it read when it was imported."""
    from ray import _raylet
    from ray._private import ray_constants

    constants: Any = ray_constants
    constants.ENABLE_RAY_CLUSTER = constants.env_bool(
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", sys.platform == "linux"
    )
    if hasattr(_raylet, "Config"):
        _raylet.Config.initialize("")
    if hasattr(_raylet, "AuthenticationTokenLoader"):
        _raylet.AuthenticationTokenLoader.instance().reset_cache()


@contextmanager
def lean_head() -> Iterator[None]:
    """Start a head node without the autoscaler, the log monitor and the dashboard.

    Ray has no option for it. A version of Ray without one of these functions starts as usual.

    On 2 cores this saves 4.9 of 10.9 s of CPU time from the start until 3 s after it (minima of
    alternating runs), 3 of 10 processes and 300 of 755 MiB of memory.
    """
    from ray import _raylet
    from ray._private import utils
    from ray._private.node import Node

    def start_nothing(self: Any, *args: Any, **kwargs: Any) -> None:
        return None

    replacements: list[tuple[Any, str, Callable[..., Any]]] = [
        (Node, "start_monitor", start_nothing),
        (Node, "start_log_monitor", start_nothing),
        (Node, "start_api_server", start_nothing),
    ]
    # With this the node's agent starts without servers, and the driver does not import the
    # dashboard. Versions without persist_port would print a warning about it.
    if hasattr(_raylet, "persist_port"):
        no_dashboard = ImportError("the dashboard is not used")
        replacements.append((utils, "get_dashboard_dependency_error", lambda: no_dashboard))
    originals = []
    try:
        for owner, name, replacement in replacements:
            if hasattr(owner, name):
                originals.append((owner, name, getattr(owner, name)))
                setattr(owner, name, replacement)
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def redirect_messages(write: Callable[[Sequence[str]], None]) -> None:
    """Send the lines that Ray prints on the driver's output to `write`.

    Ray prints, for example, a paragraph for each process that has ended.
    """
    from ray._private import worker

    def print_to_stdstream(data: Mapping[str, Any], *args: object, **kwargs: object) -> None:
        write(data["lines"])

    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = print_to_stdstream


def free_resources() -> dict[str, dict[str, float]]:
    """Return {node id: {resource: amount that no one has reserved}}."""
    from ray._private import state

    untyped_state: Any = state
    free: dict[str, dict[str, float]] = untyped_state.available_resources_per_node()
    return free


def set_visible_gpus(gpu_ids: Sequence[str]) -> None:
    """Override which GPUs this process sees, with the variable of the GPU's vendor.

    Needed only for workers with no GPU or several. Ray shows other workers the GPU of their bundle.
    """
    from ray._private.accelerators import get_accelerator_manager_for_resource

    manager = get_accelerator_manager_for_resource("GPU")
    if manager is None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu_ids)
    else:
        manager.set_current_process_visible_accelerator_ids(list(gpu_ids))
