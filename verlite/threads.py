"""The cores of this machine, how processes that work at the same time divide them, and how
OpenMP's threads wait. All of it is set before torch loads its OpenMP library (libgomp).

By default torch takes a thread per core in every process. Two processes then have twice as many
threads as cores, and each operation ends with its slowest thread. A thread that has finished its
part spins until the others have: by default 300,000 rounds, some milliseconds, on the core that
they need. Two such processes take many times as long as one after the other (docs/benchmarks.md
has measurements and the table of who gets how many threads). So processes divide the cores, and a
waiting thread sleeps after a short spin.

OMP_NUM_THREADS of the user is the number of threads of each process, and stays.
"""

import contextlib
import math
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

SPINS = "100"
"""Rounds that a waiting thread spins before it sleeps: enough for barriers within an operation."""
CHOICES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
"""Variables of libgomp. If the user has set one of them, it stays."""
COUNT = "OMP_NUM_THREADS"
OURS = "VERLITE_THREADS"
"""The value of COUNT that verlite has set, by which child processes know that it is not the
user's."""
TORCHRUN = "LOCAL_WORLD_SIZE"
"""How many processes torchrun, or another launcher, has started on this machine."""


def quota(root: Path = Path("/")) -> float | None:
    """Return how many cores the CPU quota of this process's control groups allows; None: no quota.

    A group has at most what the groups above it have. In a container whose own group is mounted
    as the root, the path in /proc/self/cgroup does not exist; then the root counts.

    Args:
        root: holds proc/self/cgroup and sys/fs/cgroup.
    """
    try:
        entries = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        entries = []
    found = []
    mounts = root / "sys/fs/cgroup"
    for entry in entries:  # "0::/a/b" in version 2, "4:cpu,cpuacct:/a/b" in version 1
        number, controllers, path = entry.split(":", 2)
        parts = [part for part in path.split("/") if part]
        groups = ["/".join(parts[:length]) for length in range(len(parts) + 1)]
        if number == "0":
            found += [_version_2(mounts / group) for group in groups]
        elif "cpu" in controllers.split(","):
            for name in ("cpu", controllers):
                found += [_version_1(mounts / name / group) for group in groups]
    return min((cores for cores in found if cores is not None), default=None)


def _version_2(group: Path) -> float | None:
    try:
        allowed, period = (group / "cpu.max").read_text(encoding="utf-8").split()
        return int(allowed) / int(period)
    except (OSError, ValueError):  # no such group, or the word max
        return None


def _version_1(group: Path) -> float | None:
    try:
        allowed = int((group / "cpu.cfs_quota_us").read_text(encoding="utf-8"))
        period = int((group / "cpu.cfs_period_us").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return allowed / period if allowed > 0 else None  # -1: none


def affinity() -> int:
    """Return how many cores the scheduler may give to this process."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS has no affinity


def cores(root: Path = Path("/")) -> int:
    """Return how many cores this process may use: its affinity, limited by its CPU quota.

    Part of a core counts as one.
    """
    allowed = quota(root)
    return affinity() if allowed is None else max(1, min(affinity(), math.ceil(allowed)))


def share(cores: int, processes: int, parts: int = 1) -> int:
    """Return the threads of one of `processes` that work at the same time, at least 1.

    Args:
        parts: of how many of the processes this one does the work, such as the devices of a rank.
    """
    return max(1, cores // processes) * parts


def users() -> int:
    """Return the OMP_NUM_THREADS that the user has set; 0: none."""
    value = os.environ.get(COUNT, "")
    return int(value) if value.isdigit() and value != os.environ.get(OURS) else 0


def mine() -> int:
    """Return how many threads torch has, or will have, in this process."""
    value = os.environ.get(COUNT, "")
    return int(value) if value.isdigit() and value != "0" else cores()


def use(count: int, by_user: bool = False) -> None:
    """Give this process `count` threads, and the processes that it starts.

    Args:
        by_user: the user of the run has chosen it, so that child processes keep it.
    """
    os.environ |= _variables(count)
    if by_user:
        del os.environ[OURS]
    if "torch" in sys.modules:  # libgomp has read the variable
        sys.modules["torch"].set_num_threads(count)


def undivided(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the number of threads that verlite has set, for a process that
    finds its own: on another host, or of a launcher that divides the cores."""
    is_ours = environment.get(COUNT) == environment.get(OURS)
    left_out = {COUNT, OURS} if is_ours else {OURS}
    return {name: value for name, value in environment.items() if name not in left_out}


def divided(processes: int) -> dict[str, str]:
    """Return the variables for each of `processes` that this process starts, which work at the same
    time while it waits for them; {} if the user has set OMP_NUM_THREADS."""
    return {} if users() else _variables(share(mine(), processes))


@contextlib.contextmanager
def dividing(processes: int) -> Iterator[None]:
    """Give each process that is started meanwhile its part of this process's threads."""
    before = {name: os.environ.get(name) for name in (COUNT, OURS)}
    os.environ |= divided(processes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _variables(count: int) -> dict[str, str]:
    return {COUNT: str(count), OURS: str(count)}


def settle() -> None:
    """Set, for this process and those that it starts, how threads wait; and how many there are if
    torch would start too many, because of a CPU quota or of other ranks on this machine.

    It has no effect in a process that has loaded torch already.
    """
    if not any(name in os.environ for name in CHOICES):
        os.environ["GOMP_SPINCOUNT"] = SPINS
    if COUNT not in os.environ:
        ranks = os.environ.get(TORCHRUN, "")
        count = share(cores(), int(ranks) if ranks.isdigit() and ranks != "0" else 1)
        if count < affinity():
            os.environ |= _variables(count)


def waiting() -> str:
    """Return the variable that decides how threads wait, with its value, for `verlite doctor`."""
    name = next(name for name in CHOICES if name in os.environ)
    by = " (verlite's choice)" if os.environ[name] == SPINS else ""
    return f"{name}={os.environ[name]}{by}"


def described(workers: int) -> tuple[str, str]:
    """Return the cores with what limits them, and the threads of each process.

    Args:
        workers: how many a machine of a run may have.
    """
    allowed = quota()
    limit = "no CPU quota" if allowed is None else f"CPU quota {allowed:g}"
    usable = cores()
    if users():
        each = f"{users()} in each process ({COUNT} is set)"
    else:
        each = (
            f"{usable} in the driver and in an only worker, {share(usable, workers)} in each of "
            f"{workers} workers, 1 in each reward process"
        )
    return f"{usable} (affinity {affinity()}, {limit})", each
