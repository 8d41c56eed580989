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


def assigned_gpus() -> list[str]:
    """Return the ids of the GPUs that Ray gave to this actor or task."""
    import ray

    return ray.get_runtime_context().get_accelerator_ids()["GPU"]


def set_visible_gpus(gpu_ids: Sequence[str]) -> None:
    """Let this process and its children see exactly these GPUs of Ray's. Call it before torch.

    Ray sets one variable, that of the GPU's vendor, and none under
    RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES or its variant for HIP. On AMD, HIP also reads
    CUDA_VISIBLE_DEVICES, and vLLM refuses to start where the two differ. So both are always set;
    NVIDIA's libraries do not read HIP's.

    HIP numbers the GPUs that ROCR_VISIBLE_DEVICES leaves, and so do Ray's ids, unless both
    variables list the same GPUs: those are the machine's own numbers, and HIP must see them all.
    """
    rocr = os.environ.get("ROCR_VISIBLE_DEVICES")
    if rocr is not None and _visible_before() == rocr.split(","):
        del os.environ["ROCR_VISIBLE_DEVICES"]
    # An empty HIP_VISIBLE_DEVICES hides nothing; -1 hides all GPUs of both vendors.
    ids = ",".join(gpu_ids) or "-1"
    os.environ["CUDA_VISIBLE_DEVICES"] = ids
    os.environ["HIP_VISIBLE_DEVICES"] = ids


def _visible_before() -> list[str] | None:
    """Return the ids in the vendor's variable when this process started; None if it was unset."""
    from ray._private.worker import global_worker

    ids: Mapping[str, list[str] | None] = global_worker.original_visible_accelerator_ids
    return ids.get("GPU")
