"""The Ray actor around one worker. It prepares the process before the worker's code and its heavy imports are loaded."""

import faulthandler
import gc
import importlib
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from verlite.controller import guardian, node


@dataclass(frozen=True)
class WorkerSpec:
    """Where a worker sits.

    rank, world_size: among the workers of its role. local_rank: among those of its role on its node.
    device_kind: cpu or cuda. gpu_ids: the GPUs to make visible, where Ray's own choice (one) is not enough; else None.
    threads: for torch and OpenMP; 0 means cores of the node divided by devices_on_node, times devices.
    mark: NAME=VALUE in the environment of this worker and its children only, on machines where the driver's guardian cannot see them.
    """

    role: str
    rank: int
    world_size: int
    local_rank: int
    device_kind: str
    devices: int
    devices_on_node: int
    address: str
    log: str
    threads: int = 0
    gpu_ids: tuple[str, ...] | None = None
    mark: str | None = None


@dataclass(frozen=True)
class Failed:
    """An exception in a worker, as plain values that always survive the trip. `pickled`: the exception itself, where it can travel."""

    type_name: str
    message: str
    traceback: str
    when: float
    pickled: bytes | None = None


@dataclass(frozen=True)
class ProcessInfo:
    """What the driver must know to look after a worker's process."""

    process: node.Process
    oom_kills: int


class WorkerActor:
    """Runs in the worker process. Every method answers with a value; failures are `Failed` values, never Ray's exceptions."""

    def __init__(self, seat: WorkerSpec) -> None:
        self.seat = seat
        self.worker: Any = None
        self.listener: socket.socket | None = None
        _log_to(seat.log)
        self.guardian = None if seat.mark is None else guardian.start(seat.mark, seat.mark)
        signal.signal(
            signal.SIGINT, signal.SIG_IGN
        )  # Ctrl-C in a terminal reaches the whole group; the driver decides what it means
        signal.signal(signal.SIGTERM, _terminate)
        threads = seat.threads or max(1, node.cores() // seat.devices_on_node) * seat.devices
        os.environ["OMP_NUM_THREADS"] = str(
            threads
        )  # Ray sets 1; must stand before torch is imported
        if interface := node.interface_of(seat.address):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
        if seat.device_kind == "cpu":
            make_visible(())
        elif seat.gpu_ids is not None:
            make_visible(seat.gpu_ids)

    def presence(self) -> ProcessInfo:
        return ProcessInfo(node.this_process(), node.oom_kills())

    def listen(self) -> tuple[str, int]:
        """Rank 0: open the meeting point of the role's ranks, on a free port that stays bound from now on."""
        self.listener = node.free_listener(self.seat.address)
        return self.listener.getsockname()[:2]

    def load(self, modules: tuple[str, ...]) -> None:
        """Import what `build` will need, before it is known what to build."""
        import_ahead(*modules)

    def build(
        self, worker_class: bytes, names: list[str], rendezvous: tuple[str, int], *values: Any
    ) -> Failed | None:
        """Import the worker's class and construct it."""
        try:
            cls = pickle.loads(worker_class)
            if (
                "torch" in sys.modules
            ):  # in case something had loaded OpenMP before the variable was set
                sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
            worker = cls.__new__(cls)
            worker.assign(self.seat, rendezvous, self.listener)
            count = len(values) - len(names)
            worker.__init__(*values[:count], **dict(zip(names, values[count:], strict=True)))
            self.worker = worker
            return None
        except BaseException as error:  # SystemExit too: it would look like a crash
            return _failed(error)

    def call(self, method: str, names: list[str], *values: Any) -> Any:
        """Run a method; the last len(names) values are keyword arguments."""
        if self.worker is None:
            return Failed("WorkerNotBuilt", "its construction failed", "", time.time())
        try:
            count, function = len(values) - len(names), getattr(self.worker, method)
            arguments, named = values[:count], dict(zip(names, values[count:], strict=True))
            if getattr(function, "__dispatch__", None) != "split":
                return function(*arguments, **named)
            from verlite.controller.columns import (
                fetch,
                keep,
            )  # with torch, which a worker that handles no batches starts without

            batch = fetch(arguments[0]) if function.__fetch__ else arguments[0]
            result = function(batch, *arguments[1:], **named)
            return keep(result, function.__keep_remote__) if function.__keep_remote__ else result
        except BaseException as error:
            return _failed(error)

    def close(self) -> Failed | None:
        """Let the worker release what it holds."""
        try:
            if self.worker is not None:
                self.worker.close()
            return None
        except BaseException as error:
            return _failed(error)


def import_ahead(*modules: str) -> None:
    """Import before it is needed. What fails here fails again where it is needed, and is told there.

    Without collecting garbage, of which imports make little: looking for it takes an eighth of their time.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        for module in modules:
            with suppress(Exception):
                importlib.import_module(module)
    finally:
        if collects:
            gc.enable()


def make_visible(gpu_ids: tuple[str, ...]) -> None:
    """The one place that overrides which GPUs a worker sees. Ray knows each vendor's variable (CUDA_, HIP_VISIBLE_DEVICES, ...).

    Ordinary GPU workers do not come here: Ray shows an actor the one GPU of its bundle.
    """
    from ray._private.accelerators import get_accelerator_manager_for_resource

    manager = get_accelerator_manager_for_resource("GPU")
    if manager is None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu_ids)
    else:
        manager.set_current_process_visible_accelerator_ids(list(gpu_ids))


class Sigterm(SystemExit):
    """Someone sent SIGTERM to this worker."""


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Sigterm("SIGTERM")


def _log_to(path: str) -> None:
    """Send this process's output, also that of C++ code and of a crash, to its own file; SIGUSR1 writes all stacks there."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    faulthandler.enable(file=file, all_threads=True)
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True, chain=False)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    print(
        f"--- pid {os.getpid()} on {socket.gethostname()} at {time.strftime('%Y-%m-%d %H:%M:%S')}"
    )


def _failed(error: BaseException) -> Failed:
    traceback.print_exception(error)
    frames = traceback.extract_tb(error.__traceback__)
    text = "".join(traceback.format_list([frame for frame in frames if frame.filename != __file__]))
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:  # whatever a foreign exception's own pickling raises
        pickled = None
    return Failed(type(error).__qualname__, str(error), text, time.time(), pickled)
