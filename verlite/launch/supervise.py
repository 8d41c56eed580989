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
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from verlite import threads
from verlite.control import exit_codes
from verlite.controller import supervisor_file
from verlite.controller.head import NoCluster
from verlite.controller.node import process, process_state
from verlite.controller.placement import ResourcesMissing
from verlite.files import one_line, read_json
from verlite.trainer import checkpoints
from verlite.trainer.errors import ServiceMissing
from verlite.trainer.tracking import METRICS, TIME, read_lines

SIGNALS = {
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGUSR1: signal.SIGUSR1,
    signal.SIGINT: signal.SIGINT,
    signal.SIGHUP: signal.SIGTERM,
}
"""Signals that are passed on to the command, and as which."""
CRASHES = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL)
"""Signals that end a command which may succeed when it is started again."""
POLL_S = 0.2
AFTER_STOP_S = 1.0
"""Pause before a restart after a stop with a checkpoint."""
FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 300.0
"""Pause before a restart after a failure: the first, and the limit of its doubling."""
FROZEN_S = 15.0
"""A command that SIGSTOP has stopped for so long is reported."""
FROZEN_END_S = 60.0
"""A command that SIGSTOP has stopped for so long is killed."""
MISSING = (NoCluster.__name__, ResourcesMissing.__name__, ServiceMissing.__name__)
"""Types in error.json of a run that did not find its cluster, its devices or a service."""
FOLDER = "verlite-supervise-"
STALE_S = 60.0
"""A folder that no process has locked is removed at this age: a new one is not locked yet."""


@dataclass(frozen=True)
class Attempt:
    """How one run of the command ended.

    Attributes:
        code: exit code; -N if signal N ended it.
        run_dir: whether its run directory is known.
        error: first line of its error.json; "" if it has written none.
        error_type: class of that error.
        step: last step that it has written to metrics.jsonl; without one, that of the checkpoint
            from which it resumed, if the supervisor has seen it saved; otherwise None.
        saved: step of the newest checkpoint since the supervisor started; None without one.
        no_restart: see `supervisor_file.Report`.
    """

    code: int
    run_dir: str = ""
    error: str = ""
    step: int | None = None
    saved: int | None = None
    no_restart: str = ""
    error_type: str = ""

    @property
    def ending(self) -> str:
        """How it ended, for messages."""
        if self.code < 0:
            text = f"was ended by {signal.Signals(-self.code).name}"
        else:
            text = f"ended with exit code {self.code}"
        return f"{text} ({self.error})" if self.error else text

    @property
    def is_stop(self) -> bool:
        """Whether it was stopped on request."""
        signals = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
        return self.code == exit_codes.STOPPED or -self.code in signals

    @property
    def misses_cluster(self) -> bool:
        """Whether it did not start because a cluster, devices or a service were not there."""
        return self.code == exit_codes.REFUSED and self.error_type in MISSING

    @property
    def may_succeed(self) -> bool:
        """Whether the same command may succeed now. It does not know of earlier attempts."""
        if self.no_restart:
            return False
        if self.is_stop or self.code == exit_codes.LOST or -self.code in CRASHES:
            return True
        # A failure of the run's own has a report. Without one, native code has ended the process.
        vanished = bool(self.run_dir) and not self.error
        return self.code == exit_codes.FAILED and vanished


@dataclass
class Budget:
    """Counts restarts without progress. Progress is a checkpoint of a later step.

    In a run that has no checkpoint yet, a later step in metrics.jsonl is progress, too.

    Attributes:
        max_restarts: restarts in a row without progress.
        same_step: failed attempts in a row that end at the same step without progress. Attempts
            that did not find their cluster do not count.
    """

    max_restarts: int
    same_step: int
    restarts: int = 0
    failures: int = 0
    at_step: int = 0
    best: tuple[int, int] = (-1, -1)
    last_step: int | None = field(default=None)

    def refusal(self, attempt: Attempt) -> str | None:
        """Count an attempt that may succeed. Return why there is no restart; None: restart."""
        saved, step = _progress(attempt)
        if self.has_progress(attempt):
            self.restarts = self.failures = self.at_step = 0
        self.best = (max(saved, self.best[0]), max(step, self.best[1]))
        self.restarts += 1
        if not attempt.is_stop:
            self.failures += 1
        if not attempt.is_stop and not attempt.misses_cluster:
            self.at_step = self.at_step + 1 if attempt.step == self.last_step else 1
            self.last_step = attempt.step
        where = "before the first step" if step < 1 else f"after step {step}"
        if self.same_step and self.at_step >= self.same_step:
            return f"{self.at_step} attempts in a row failed {where}"
        if self.restarts > self.max_restarts:
            return f"{self.max_restarts} restarts brought no new checkpoint; the last ended {where}"
        return None

    def has_progress(self, attempt: Attempt) -> bool:
        """Whether an attempt that is not counted yet went further than those before."""
        saved, step = _progress(attempt)
        return saved > self.best[0] or (saved < 0 and step > self.best[1])

    @property
    def pause_s(self) -> float:
        """How long to wait before the next restart."""
        if not self.failures:
            return AFTER_STOP_S
        return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (self.failures - 1))


def _progress(attempt: Attempt) -> tuple[int, int]:
    """Return (step of the newest checkpoint, last step), each -1 without one."""
    saved = -1 if attempt.saved is None else attempt.saved
    return saved, -1 if attempt.step is None else attempt.step


class CommandSupervisor:
    """Runs a command again and again, and passes signals on to it.

    Args:
        say: prints a line.
    """

    def __init__(self, command: Sequence[str], budget: Budget, say: Callable[[str], None]) -> None:
        self._command = command
        self._budget = budget
        self._say = say
        self._signal: signal.Signals | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._started = time.time()
        self._restarts = 0
        self._lost = False
        """Whether an attempt lost something, and none has made progress since."""

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
        while True:
            report.unlink(missing_ok=True)
            attempt = self._attempt(report)
            has_progress = self._budget.has_progress(attempt)
            if has_progress:
                self._lost = False
            self._lost = self._lost or attempt.code == exit_codes.LOST
            if self._signal is not None:
                return self._code_after_signal(attempt)
            if not self._may_succeed(attempt):
                if attempt.no_restart:
                    self._say(f"no restart: {attempt.no_restart}")
                return shell_code(attempt.code)
            refusal = self._budget.refusal(attempt)
            if refusal:
                self._say(f"the command {attempt.ending}. No restart: {refusal}")
                return exit_codes.FAILED
            count = f"restart {self._budget.restarts} of {self._budget.max_restarts}"
            if has_progress and attempt.saved is not None:
                count += f" since checkpoint {attempt.saved}"
            elif not has_progress:
                count += " without a new checkpoint"
            pause_s = self._budget.pause_s
            self._say(f"the command {attempt.ending}; {count}, in {pause_s:g} s")
            resume_at = time.monotonic() + pause_s
            while self._signal is None and time.monotonic() < resume_at:
                time.sleep(POLL_S)
            if self._signal is not None:
                return self._code_after_signal(attempt)

    def _may_succeed(self, attempt: Attempt) -> bool:
        """Whether the command may succeed now. A lost node may stay away for longer than the run
        waits for it."""
        is_away = self._lost and attempt.misses_cluster
        return attempt.may_succeed or (is_away and not attempt.no_restart)

    def _attempt(self, report: Path) -> Attempt:
        """Run the command once."""
        started = time.time()
        environment = {
            **threads.undivided(os.environ),
            supervisor_file.VARIABLE: str(report),
            supervisor_file.STARTED: f"{self._started:.3f}",
            supervisor_file.RESTARTS: str(self._restarts),
        }
        self._restarts += 1
        # A session of its own: a closed terminal and Ctrl-C reach this process only.
        self._process = subprocess.Popen(
            self._command,
            env=environment,
            start_new_session=True,
            preexec_fn=_end_with_parent(os.getpid()),
        )
        if self._signal is not None:  # it came while the process started
            self._process.send_signal(SIGNALS[self._signal])
        self._wait(self._process)
        return read_attempt(
            self._process.returncode, supervisor_file.read(report), started, self._started
        )

    def _wait(self, child: "subprocess.Popen[bytes]") -> None:
        """Wait for the end of the command. Kill it if it stays stopped by SIGSTOP."""
        watched = process(child.pid)
        frozen_s = 0.0
        while child.poll() is None:
            # Counted in polls: a supervisor that is itself stopped, as by Ctrl-Z, counts nothing.
            is_frozen = process_state(watched) == "stopped by a signal"
            was_frozen_s, frozen_s = frozen_s, frozen_s + POLL_S if is_frozen else 0.0
            if was_frozen_s < FROZEN_S <= frozen_s:
                self._say(
                    f"process {child.pid} of the command has been stopped by SIGSTOP for "
                    f"{FROZEN_S:g} s. It is killed after {FROZEN_END_S:g} s unless SIGCONT comes"
                )
            if frozen_s >= FROZEN_END_S:
                child.kill()
            time.sleep(POLL_S)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP and self._signal is not None:
            return  # a terminal that closes may send it more than once
        self._signal = signal.Signals(number)
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(SIGNALS[self._signal])

    def _code_after_signal(self, attempt: Attempt) -> int:
        """Return the exit code after a signal to this process: there is no restart."""
        if self._signal == signal.SIGINT:
            is_end = attempt.code in (exit_codes.DONE, exit_codes.FAILED, exit_codes.REFUSED)
            return attempt.code if is_end else exit_codes.INTERRUPTED
        return exit_codes.STOPPED if self._may_succeed(attempt) else shell_code(attempt.code)


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
    if not report.run_dir:
        return Attempt(code, no_restart=report.no_restart)
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


def shell_code(code: int) -> int:
    """Return an exit code as a shell reports it: 128 + N for signal N."""
    return code if code >= 0 else 128 - code


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
        return CommandSupervisor(command, Budget(max_restarts, same_step), say).run()
    except OSError as error:
        error.add_note(f"command: {shlex.join(command)}")
        raise
