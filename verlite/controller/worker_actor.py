"""The Ray actor around one worker. It prepares the process before the worker's code is loaded."""

import faulthandler
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from verlite import progress
from verlite.control import limits
from verlite.controller import debugger, guardian, node, ray_internals
from verlite.controller.heartbeat import Sender
from verlite.controller.records import Failed, ProcessInfo, WorkerSpec
from verlite.files import tolerate_full_disk
from verlite.importing import SignalExit, import_ahead
from verlite.threads import cores, share, use

if TYPE_CHECKING:
    from verlite.controller.worker import Worker


class WorkerActor:
    """Run one worker in its process. Return failures as `Failed` values instead of raising."""

    heartbeat: Sender | None = None

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        os.environ.update(spec.secrets)
        self.worker: Worker | None = None
        self.listener: socket.socket | None = None
        _log_to(spec.log)
        debugger.set_hook(spec.debugger)
        # Stored, because the guardian's input pipe closes with the Popen object.
        self.guardian = None if spec.mark is None else guardian.start(spec.mark, head=spec.head)
        with suppress(PermissionError):  # it leads a group already, as a fork does
            os.setsid()  # `node.kill` finds what this process starts by its session
        # Ctrl-C in a terminal reaches the whole process group. Only the driver acts on it.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, _on_sigterm)
        # A local cluster's processes start with them blocked, and so would this worker's own.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM, signal.SIGUSR1])
        # Ray sets OMP_NUM_THREADS=1. The value must be right before torch is imported.
        part = share(cores(), spec.devices_on_node, spec.devices)
        use(spec.threads or part, by_user=bool(spec.threads))
        interface = node.interface_of(spec.address)
        if interface:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            # NCCL takes a plain name for the beginning of one: eth1 would match eth10.
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
        ray_internals.set_visible_gpus(_gpus(spec))
        if spec.heartbeat is not None:
            self.heartbeat = Sender(spec.heartbeat)

    def process_info(self) -> ProcessInfo:
        """Return the process of this worker."""
        return ProcessInfo(node.this_process(), node.oom_kills())

    def listen(self) -> tuple[str, int]:
        """On rank 0: open the port where the ranks of the role meet, and return (address, port)."""
        self.listener = node.free_listener(self.spec.address)
        address, port = self.listener.getsockname()[:2]
        return address, port

    def load(self, modules: tuple[str, ...]) -> None:
        """Import modules that the worker will need."""
        import_ahead(*modules)

    def build(
        self, worker_class: bytes, names: list[str], rendezvous: tuple[str, int], *values: Any
    ) -> Failed | None:
        """Construct the worker.

        Args:
            worker_class: the pickled class.
            names: names of the keyword arguments, which are the last len(names) of `values`.
        """
        progress.begin("construction")
        try:
            cls = pickle.loads(worker_class)
            arguments, keywords = _split_arguments(names, values)
            worker = cls.__new__(cls)
            worker.assign(self.spec, rendezvous, self.listener)
            worker.__init__(*arguments, **keywords)
            self.worker = worker
            return None
        except BaseException as error:  # an uncaught SystemExit would look like a crash
            return self._report("construction", error)
        finally:
            progress.end()

    def call(self, called: str, *values: Any) -> Any:
        """Run a method of the worker.

        Args:
            called: its name and the names of its keyword arguments, which are the last of `values`,
                with spaces between: Ray takes 5 µs of the driver for each argument of a call.
        """
        method, *names = called.split()
        if self.worker is None:
            return Failed("WorkerNotBuilt", "its construction failed", "", time.time())
        progress.begin(method)
        try:
            arguments, keywords = _split_arguments(names, values)
            function = getattr(self.worker, method)
            is_split = getattr(function, "__dispatch__", None) == "split"
            kept = getattr(function, "__keep_remote__", ())
            if not is_split and not kept:
                return function(*arguments, **keywords)
            # Imported here because it imports torch, which a worker without batches does not need.
            from verlite.controller import columns

            if is_split and function.__fetch__:
                arguments = (columns.fetch(arguments[0]), *arguments[1:])
            result = function(*arguments, **keywords)
            return columns.keep(result, kept) if kept else result
        except BaseException as error:
            return self._report(method, error)
        finally:
            if self.heartbeat is not None:
                self.heartbeat.send()  # how long this call waited for other ranks
            progress.end()

    def _report(self, method: str, error: BaseException) -> Failed:
        """Return the exception as a value. In a post-mortem run, wait for the debugger first."""
        failed = _failed(error)
        if self.spec.stops_at_failures and isinstance(error, Exception):
            try:
                debugger.stop_at_failure(self.spec.debugger, method, failed, error)
            except Exception as problem:  # the failure itself must be reported in any case
                traceback.print_exception(problem)
        return failed

    def close(self) -> Failed | None:
        """Let the worker release its resources."""
        try:
            if self.worker is not None:
                self.worker.close()
            return None
        except BaseException as error:
            return _failed(error)


def _gpus(spec: WorkerSpec) -> Sequence[str]:
    """Return the ids of the worker's GPUs."""
    if spec.device_kind == "cpu":
        return ()
    return spec.gpu_ids or ray_internals.assigned_gpus()


def _split_arguments(
    names: list[str], values: tuple[Any, ...]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return (positional arguments, keyword arguments)."""
    count = len(values) - len(names)
    return values[:count], dict(zip(names, values[count:], strict=True))


class Sigterm(SignalExit):
    """This worker received SIGTERM."""


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    """End this worker, unless all processes got the signal: then only the driver acts on it."""
    until = time.monotonic() + limits.SIGTERM_TO_ALL_S
    while time.monotonic() < until:
        if ray_internals.raylet_got(number):
            return
        time.sleep(0.05)
    with suppress(OSError):
        os.write(2, f"{node.SIGTERM_LINE}\n".encode())
    raise Sigterm("SIGTERM")


def _log_to(path: str) -> None:
    """Send all output of this process to a file, including that of C++ code and of a crash.

    SIGUSR1 writes the stacks of all threads there.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    os.dup2(file, 1)
    os.dup2(file, 2)
    faulthandler.enable(file=file, all_threads=True)
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True, chain=False)
    tolerate_full_disk()
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    print(f"{node.LOG_HEADER} {os.getpid()} on {socket.gethostname()} at {now}")


def _failed(error: BaseException) -> Failed:
    """Print the exception into the worker's log and return it as a value."""
    traceback.print_exception(error)
    frames = traceback.extract_tb(error.__traceback__)
    text = "".join(traceback.format_list([frame for frame in frames if frame.filename != __file__]))
    pickled: bytes | None
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:  # a user's exception class may raise anything here
        pickled = None
    return Failed(type(error).__qualname__, str(error), text, time.time(), pickled)
