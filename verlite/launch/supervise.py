"""`verlite supervise`: run a command, and start it again while that is likely to help."""

import contextlib
import ctypes
import fcntl
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from verlite import threads
from verlite.control import exit_codes, limits
from verlite.control.restarts import Attempt, Frozen, Leave, Restarts
from verlite.controller import supervisor_file
from verlite.controller.node import process, process_state
from verlite.files import one_line, read_json
from verlite.trainer import checkpoints
from verlite.trainer.tracking import METRICS, TIME, read_lines

SIGNALS = {
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGUSR1: signal.SIGUSR1,
    signal.SIGINT: signal.SIGINT,
    signal.SIGHUP: signal.SIGTERM,
}
"""Signals that are passed on to the command, and as which."""
FOLDER = "verlite-supervise-"
STALE_S = 60.0
"""A folder that no process has locked is removed at this age: a new one is not locked yet."""


@dataclass(eq=False)
class CommandSupervisor:
    """Runs a command again and again, and passes signals on to it."""

    command: Sequence[str]
    restarts: Restarts
    say: Callable[[str], None]
    """Prints a line."""

    def __post_init__(self) -> None:
        self._asked = ""
        """Name of the last signal to this process."""
        self._process: subprocess.Popen[bytes] | None = None
        self._started = time.time()

    def run(self) -> int:
        """Run the command until it needs no restart. Returns the exit code to end with.

        Raises:
            OSError: the command cannot be started.
        """
        before = {
            number: signal.signal(number, self._pass_on)
            for number in SIGNALS
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN  # nohup
        }
        try:
            with private_folder() as folder:
                return self._run(folder / "report.json")
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _run(self, report: Path) -> int:
        count = 0
        while True:
            report.unlink(missing_ok=True)
            attempt = self._attempt(report, count)
            following = self.restarts.ended(attempt, self._asked)
            if following.why:
                self.say(following.why)
            if isinstance(following, Leave):
                return following.code
            resume_at = time.monotonic() + following.after_s
            while not self._asked and time.monotonic() < resume_at:
                time.sleep(limits.LOOK_S)
            if self._asked:
                return self.restarts.code_when_asked(attempt, self._asked)
            count += 1

    def _attempt(self, report: Path, count: int) -> Attempt:
        """Run the command once. count: how often it was started before."""
        started = time.time()
        environment = {
            **threads.undivided(os.environ),
            supervisor_file.VARIABLE: str(report),
            supervisor_file.STARTED: f"{self._started:.3f}",
            supervisor_file.RESTARTS: str(count),
        }
        # A session of its own: a closed terminal and Ctrl-C reach this process only.
        self._process = subprocess.Popen(
            self.command,
            env=environment,
            start_new_session=True,
            preexec_fn=_end_with_parent(os.getpid()),
        )
        if self._asked:  # it came while the process started
            self._process.send_signal(SIGNALS[signal.Signals[self._asked]])
        self._wait(self._process)
        return read_attempt(
            self._process.returncode, supervisor_file.read(report), started, self._started
        )

    def _wait(self, child: "subprocess.Popen[bytes]") -> None:
        """Wait for the end of the command. Kill it if it stays stopped by SIGSTOP."""
        watched, frozen = process(child.pid), Frozen()
        while child.poll() is None:
            following = frozen.look(process_state(watched) == "stopped by a signal")
            if following == "kill":
                child.kill()
            elif following == "say":
                self.say(
                    f"process {child.pid} of the command has been stopped by SIGSTOP for "
                    f"{limits.FROZEN_S:g} s. It is killed after {limits.FROZEN_END_S:g} s unless "
                    "SIGCONT comes"
                )
            time.sleep(limits.LOOK_S)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP and self._asked:
            return  # a terminal that closes may send it more than once
        self._asked = signal.Signals(number).name
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(SIGNALS[signal.Signals(number)])


def read_attempt(
    code: int, report: supervisor_file.Report, started: float, since: float = 0.0
) -> Attempt:
    """Return how a run of the command ended, from its exit code and its run directory.

    Ray's native client ends the driver with 1 if it puts a value into the object store of a lost
    raylet, or frees one there. If the run had reported its end before, the exit code of that report
    counts.

    Args:
        started: when it started, in seconds since the epoch.
        since: checkpoints that were saved before are not the command's.
    """
    names = {-number: number.name for number in signal.Signals}
    name = names.get(code, f"signal {-code}") if code < 0 else ""
    code = 128 - code if code < 0 else code  # as a shell reports it
    if not report.run_dir:
        return Attempt(code, no_restart=report.no_restart, signal=name)
    run_dir = Path(report.run_dir)
    saved = checkpoints.last_saved(run_dir, since)
    try:
        lines = read_lines(run_dir / METRICS)
    except (OSError, ValueError):
        lines = []
    # The attempt may have ended before it renamed or truncated the file of an earlier run.
    steps = [line["step"] for line in lines if line.get(TIME, 0.0) >= started]
    error_type, error, reported = read_error(run_dir / supervisor_file.ERROR_FILE, started)
    return Attempt(
        reported if code == exit_codes.FAILED and reported is not None else code,
        report.run_dir,
        error,
        max(steps, default=saved),
        saved,
        report.no_restart,
        error_type,
        name,
    )


def read_error(path: Path, started: float) -> tuple[str, str, int | None]:
    """Return the type, the first line of the message, and the exit code in error.json.

    ("", "", None) if it is older than `started`.
    """
    try:
        error = read_json(path)
        if not isinstance(error, Mapping) or float(error["time"]) < started:
            return "", "", None
        message = one_line(str(error["message"]).partition("\n")[0]) or "no message"
        code = error.get("exit_code")
        return str(error.get("type", "")), message, code if isinstance(code, int) else None
    except (OSError, ValueError, TypeError, KeyError):
        return "", "", None


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """Create a locked temporary folder for the time of the block, and remove those of supervisors
    that were killed."""
    for stale in Path(tempfile.gettempdir()).glob(f"{FOLDER}*"):
        with contextlib.suppress(OSError), _locked(stale) as status:
            if status.st_uid == os.getuid() and time.time() - status.st_mtime > STALE_S:
                shutil.rmtree(stale)
    with tempfile.TemporaryDirectory(prefix=FOLDER) as folder, _locked(Path(folder)):
        yield Path(folder)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[os.stat_result]:
    """Lock a folder. Raises OSError if another process has locked it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield os.fstat(descriptor)
    finally:
        os.close(descriptor)


def _end_with_parent(parent: int) -> Callable[[], None]:
    """Return a function for the child before exec: it gets SIGTERM when this process ends."""
    libc = ctypes.CDLL(None)

    def prepare() -> None:
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG
        if hasattr(libc, "prctl"):
            libc.prctl(set_parent_death_signal, signal.SIGTERM)
            if os.getppid() != parent:
                os.kill(os.getpid(), signal.SIGTERM)

    return prepare


def supervise(
    command: Sequence[str], max_restarts: int, same_step: int, say: Callable[[str], None]
) -> int:
    """Run a command, restart it while that is likely to help, and return the exit code.

    Args:
        max_restarts: restarts in a row without a new checkpoint.
        same_step: failed attempts in a row at the same step after which it gives up. 0: no limit.

    Raises:
        OSError: the command cannot be started.
    """
    try:
        return CommandSupervisor(command, Restarts(max_restarts, same_step), say).run()
    except OSError as error:
        error.add_note(f"command: {shlex.join(command)}")
        raise
