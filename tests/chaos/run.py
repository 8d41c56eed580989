"""One disturbed run: its attempts, its processes, and whether it ended like the undisturbed one."""

import os
import re
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

from tests.chaos.workloads import Workload
from tests.trainer.runs import MARK, Launch, quiet
from verlite.controller.ray_internals import AGENTS

PROGRAMS = {
    "raylet": ("/raylet/raylet",),
    "gcs": ("/gcs/gcs_server",),
    "dashboard agent": AGENTS["dashboard_agent"],
    "environment agent": AGENTS["runtime_env_agent"],
    "guardian": ("controller/guardian.py",),
    "forks": ("controller/worker_fork.py --serve",),
    "reward": ("verlite.rewards.process",),
    "driver": ("-m tests.chaos.driver",),
}
"""Parts of each process's command line."""
SUPERVISED_END = re.compile(
    r"supervise: the command (was ended by (?P<signal>SIG\w+)|"
    r"ended with exit code (?P<code>\d+)\b(?! \(the run needs)).*"
)
"""What `verlite supervise` prints before it starts a command again. It does not match an
attempt that could not find a lost node: the supervisor then waits for the node."""
LOG = re.compile(r"/logs/([a-z]+_[0-9]+)\.log$")


class Run:
    """A run that is started again until it is done.

    Attributes:
        workload: its command line.
        folder: has the run directory "run", the attempts' output and the trace of phases.
        has_disk: whether the run directory is a small disk of its own.
        launches: the processes that were started here; the last one may be alive.
        starts: how often the command was started, also by `verlite supervise`.
    """

    def __init__(self, workload: Workload, folder: Path, supervised: bool = False):
        """Prepare a run.

        Args:
            supervised: leave starting again to `verlite supervise`, where it does that.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.workload, self.folder, self.supervised = workload, folder, supervised
        self.trace = folder / "phases"
        self.launches: list[Launch] = []
        self.starts = 0
        self.has_disk = False
        self._output_before = 0

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    @property
    def launch(self) -> Launch:
        return self.launches[-1]

    def start(self) -> None:
        """Start the command, or start it again. A living supervisor does that by itself."""
        self.starts += 1
        if self.launches and self.launch.process.poll() is None:
            match = SUPERVISED_END.search(self.launch.text(), self._output_before)
            self._output_before = match.end() if match else self._output_before
            return
        log = self.folder / f"output_{len(self.launches) + 1}.log"
        program = ["-m", "tests.chaos.driver", str(self.trace)]
        if self.supervised:
            # Several faults may hit one step.
            supervise = ["-m", "verlite", "supervise", "--max-restarts=50", "--same-step=10"]
            program = [*supervise, "--", sys.executable, *program]
        self._output_before = 0
        options, hosts = self.workload.options, self.workload.hosts
        if hosts is not None:  # workers there do not inherit the driver's variables
            mark = f"ray_kwargs.ray_init.runtime_env.env_vars.{MARK}={self.run_dir}"
            options = [*options, mark]
        environment = hosts.environment if hosts is not None else {}
        self.launches.append(
            Launch(self.run_dir, options, log, program=program, environment=environment)
        )

    def code(self) -> int | None:
        """Exit code of the latest attempt, -N if signal N ended it. None while it runs."""
        code = self.launch.process.poll()
        if code is not None or not self.supervised:
            return code
        match = SUPERVISED_END.search(self.launch.text(), self._output_before)
        if match is None:
            return None
        return -signal.Signals[match["signal"]] if match["signal"] else int(match["code"])

    def text(self) -> str:
        """Output of the latest attempt."""
        return self.launch.text()[self._output_before :]

    def phases(self) -> list[tuple[int, int, str]]:
        """Return (driver's process id, finished steps, phase) for each phase that was entered."""
        if not self.trace.exists():
            return []
        lines = (line.split(" ", 3) for line in self.trace.read_text().splitlines())
        return [(int(pid), int(finished), phase) for _, pid, finished, phase in lines]

    def finished_steps(self) -> int:
        """The last step in metrics.jsonl, 0 if there is none."""
        steps = re.findall(rb'^{"step": (\d+)', metrics_bytes(self.run_dir), re.MULTILINE)
        return max(map(int, steps), default=0)

    def find(self, role: str) -> list[psutil.Process]:
        """Return the live processes of a role: one of PROGRAMS, or a worker role; or a worker of
        one rank, such as "actor_1"."""
        found = []
        candidates = {*self.launch.processes(), *self.agents()}
        for process in candidates:
            try:
                name = role_of(process) or ""
                is_role = role in (name, name.rpartition("_")[0])
            except (psutil.Error, OSError):
                continue
            if is_role:
                found.append(process)
        return found

    def resumed_step(self) -> int | None:
        """The step that the current attempt resumed from; 0: from the beginning; None: not yet."""
        text = self.text()
        match = re.search(r"resumed from \S+ \(step (\d+)", text)
        if match:
            return int(match[1])
        return 0 if re.search(r"(?m)^(?:[-\d]+ [:\d]+ )?step \d", text) else None

    def temporary_folders(self) -> list[Path]:
        """Return the folders of the run's Ray clusters, with their sockets."""
        pids = {str(pid) for pid, _, _ in self.phases()}
        found = []
        for folder in Path("/tmp").glob("verlite-*"):
            with suppress(OSError):  # it may be removed meanwhile
                names = os.listdir(folder / "r")  # Ray's part, with names such as session_..._PID
                if pids & {entry.rpartition("_")[2] for entry in names}:
                    found.append(folder)
        return found

    def agents(self) -> list[psutil.Process]:
        """Return living agents of the run's Ray clusters, which have no mark, by their files."""
        sessions = tuple({f"_{pid}/logs/" for pid, _, _ in self.phases()})
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                files = f"/proc/{process.pid}/fd"
                if " ".join(process.cmdline()).startswith("ray::") and any(
                    session in os.readlink(f"{files}/{number}")
                    for number in os.listdir(files)
                    for session in sessions
                ):
                    found.append(process)
        return found

    def leftovers(self) -> list[str]:
        """Return what the run left behind: processes, temporary folders with sockets, files."""
        if self.launch.process.poll() is None:
            return []  # its supervisor starts the next attempt at any time
        living = {*self.launch.processes(), *self.agents()}
        left = [f"process {p.pid} {name(p)}" for p in living]
        left += map(str, self.temporary_folders())
        return left

    def wait_until_clean(self, seconds: float = 20) -> list[str]:
        """Return what is still left after some seconds."""
        deadline = time.monotonic() + seconds
        while (left := self.leftovers()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return left

    def finish(self, seconds: float = 900) -> int:
        """Wait until the attempt ends and return its exit code. It is killed after some time."""
        deadline = time.monotonic() + seconds
        while (code := self.code()) is None and time.monotonic() < deadline:
            time.sleep(0.1)
        if code is None:
            self.kill()
        return self.launch.process.wait() if code is None else code

    def kill(self) -> None:
        """Kill the driver, and its supervisor if there is one."""
        for process in self.find("driver"):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.launch.process.kill()
        self.launch.process.wait()

    def keep_small_files(self) -> None:
        """Copy metrics and logs out of the run directory, which is about to disappear."""
        target = self.folder / "kept"
        for file in [*self.run_dir.glob("*.json*"), *self.run_dir.glob("logs/*")]:
            if file.is_file() and file.stat().st_size < 1 << 20:
                copy = target / file.relative_to(self.run_dir)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, copy)

    def stop(self) -> None:
        """End the attempt at once, with all that it has started."""
        if not self.launches:
            return
        self.kill()
        self.wait_until_clean()  # by its guardian, unless a fault has stopped that one
        for process in {*self.launch.processes(), *self.agents()}:
            with suppress(psutil.Error):
                process.kill()
        for folder in self.temporary_folders():
            shutil.rmtree(folder, ignore_errors=True)


def end_at_sigterm() -> None:
    """Let SIGTERM end this process as an exception, so that it ends the runs that it has started.

    Further signals are ignored.
    """

    def end(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)


def role_of(process: psutil.Process) -> str | None:
    """Return the role of a process of a run, of a worker with its rank. None for one that no fault
    aims at."""
    command = " ".join(process.cmdline())
    if " -m verlite supervise " in command:
        return "supervisor"
    for role, parts in PROGRAMS.items():
        if any(part in command for part in parts):
            return role
    for number in os.listdir(f"/proc/{process.pid}/fd"):
        match = LOG.search(os.readlink(f"/proc/{process.pid}/fd/{number}"))
        if match:
            return match[1]
    return None


def name(process: psutil.Process) -> str:
    """Return the name of a process, "" if it has just ended."""
    try:
        return process.name()
    except psutil.Error:
        return ""


def metrics_bytes(run_dir: Path) -> bytes:
    """Return the content of metrics.jsonl, empty if it does not exist."""
    path = run_dir / "metrics.jsonl"
    return path.read_bytes() if path.exists() else b""


def differences(run: Run, undisturbed: Run, numbers: bool = True) -> list[str]:
    """Return how the result of a run differs from that of the undisturbed one, in one line each.

    Args:
        numbers: whether metrics and weights must be equal. Otherwise only the sequence of steps is
            compared.
    """
    workload = run.workload
    lines, expected = run.launch.metrics(), undisturbed.launch.metrics()
    found = []
    steps = [line["step"] for line in lines]
    if steps != list(range(workload.first_step, workload.steps + 1)):
        found.append(f"metrics.jsonl has the steps {steps}")
    if not numbers:
        return found
    given_up = validations_given_up(run)
    for line, other in zip(lines, expected, strict=False):
        ignored = workload.ignored + ("val-",) * (line["step"] in given_up)
        a, b = (comparable(values, ignored) for values in (line, other))
        keys = [key for key in sorted(a.keys() | b.keys()) if a.get(key) != b.get(key)]
        if keys:
            found.append(
                f"step {line['step']}: {len(keys)} metrics differ, the first is {keys[0]}: "
                f"{a.get(keys[0])!r}, undisturbed {b.get(keys[0])!r}"
            )
    if weights(run) != weights(undisturbed):
        found.append("the exported weights differ")
    return found


def validations_given_up(run: Run) -> set[int]:
    """Return the steps that were saved without their validation, because of a stop."""
    log = run.run_dir / "logs" / "driver.log"
    text = log.read_text() if log.exists() else ""
    return {int(step) for step in re.findall(r": the validation of step (\d+) was given up", text)}


def comparable(line: dict, ignored: tuple[str, ...]) -> dict:
    """Return the metrics of a step that are equal in equal runs."""
    return {key: value for key, value in quiet(line).items() if not key.startswith(ignored)}


def weights(run: Run) -> bytes:
    """Return the exported weights, empty if there are none."""
    path = run.run_dir / "huggingface" / "model.safetensors"
    return path.read_bytes() if path.exists() else b""
