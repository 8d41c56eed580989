"""A process between the trainer and user code, so that faults of that code end there.

`split` forks: user code runs in the child, and this process keeps watch over it. What user code
may do, and what then happens:

- kill its parent: the parent is this process, and the pool replaces both;
- print without end, or escape sequences of terminals: this process passes on a limited amount,
  cleaned;
- leave processes behind: they become children of this process, which kills them when it ends;
- allocate without end: the kernel refuses memory beyond a limit, which raises MemoryError.

Standard library and `verlite.terminal` only, and only on Linux; elsewhere user code runs without a
keeper.
"""

import codecs
import ctypes
import os
import resource
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from verlite.terminal import clean

OUTPUT_BYTES = 64 << 10
"""Output of user code that is passed on per OUTPUT_SECONDS. The rest is dropped."""
OUTPUT_SECONDS = 60.0
LAST_BYTES = 2000
"""How much of the dropped output is passed on if user code fails: its end, which says why."""
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER


def split(parent: int, memory_bytes: int) -> None:
    """Return in a new process, which is the only child of this one. This one never returns.

    Args:
        parent: id of the process that started this one. The kernel ends this one with it.
        memory_bytes: limit of the new process's own memory (RLIMIT_DATA).
    """
    if not sys.platform.startswith("linux"):
        return
    _end_with(parent)
    with suppress(OSError):  # some containers forbid it, and rewards work without it
        Path("/proc/self/oom_score_adj").write_text("1000")  # first when memory runs out
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    adopt_orphans()
    keeper = os.getpid()
    output, child_output = os.pipe()
    ended, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    child = os.fork()
    if child:
        os.close(child_output)
        os.dup2(2, 1)  # the pool sees the end of the results when the child has ended
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        status = _watch(child, output, ended)
        kill_descendants(keeper)
        with suppress(ChildProcessError):
            while True:
                os.wait()
        _end_like(status)
    _end_with(keeper)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Workers ignore Ctrl-C and start with signals blocked. User code may send them to its own.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.dup2(child_output, 2)
    for descriptor in (output, child_output, ended, wakeup):
        os.close(descriptor)
    with suppress(ValueError, OSError):  # the hard limit is lower
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))


def adopt_orphans() -> None:
    """Make what the descendants of this process leave behind its children."""
    _prctl(_SUBREAPER, 1)


def descendants(pid: int) -> list[int]:
    """Return the ids of the processes that a process and its children started, [] without /proc."""
    children: dict[int, list[int]] = {}
    with suppress(OSError):
        for name in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError):  # it has ended
                text = Path(f"/proc/{name}/stat").read_text(errors="replace")
                state, its_parent = text.rpartition(")")[2].split()[:2]
                if state != "Z":
                    children.setdefault(int(its_parent), []).append(int(name))
    found = children.get(pid, [])
    for child in found:  # grows while it is read
        found += children.get(child, [])
    return found


def kill_descendants(pid: int) -> None:
    """Kill the processes that a process and its children started."""
    for _ in range(3):  # processes that start during the search
        found = descendants(pid)
        for child in found:
            with suppress(OSError):
                os.kill(child, signal.SIGKILL)
        if not found:
            return
        time.sleep(0.01)


def kill_kept(keeper: int) -> None:
    """Kill the children of a keeper that leads a session, and all that they started, in other
    groups too.

    The keeper is spared while it has children: it collects them, and then ends itself.
    """
    children = descendants(keeper)
    for child in children:
        with suppress(OSError):
            os.kill(child, signal.SIGKILL)
    if not children:
        kill_group(keeper)


def kill_marked(mark: bytes) -> None:
    """Kill the processes whose environment has a text that no other has: what user code started and
    left behind when it killed its keeper."""
    for _ in range(3):  # processes that start during the search
        found = False
        for name in filter(str.isdigit, os.listdir("/proc") if Path("/proc").is_dir() else ()):
            with suppress(OSError):  # it has ended, or is another user's
                if mark in Path(f"/proc/{name}/environ").read_bytes():
                    os.kill(int(name), signal.SIGKILL)
                    found = True
        if not found:
            return
        time.sleep(0.01)


def kill_group(leader: int) -> None:
    """Kill a process and its group."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _watch(child: int, output: int, ended: int) -> int:
    """Pass on the child's output until it ends. Return its wait status."""
    sources = [output, ended]
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    status = None
    period_end, left, dropped = 0.0, 0, b""
    while True:
        ready = select.select(sources, [], [], None if status is None else 0)[0]
        if ended in ready:
            os.read(ended, 64)
            status = _reap(child)
        if output in ready:
            data = os.read(output, 1 << 16)
            if not data:  # the child closed it
                sources.remove(output)
            if time.monotonic() > period_end:
                period_end, left = time.monotonic() + OUTPUT_SECONDS, OUTPUT_BYTES
                dropped = b""
            _print(clean(decoder.decode(data[:left])).encode())
            if 0 < left <= len(data):
                _print(
                    f"\n[a process printed {OUTPUT_BYTES >> 10} KiB within "
                    f"{OUTPUT_SECONDS:.0f} s; the rest is dropped]\n".encode()
                )
            dropped = (dropped + data[left:])[-LAST_BYTES:]
            left -= min(left, len(data))
        elif status is not None:
            if status:
                _print(clean(dropped.decode(errors="replace")).encode())
            return status


def _reap(child: int) -> int | None:
    """Collect ended processes. Return the child's status once it has ended."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in (0, child):
            return status if pid else None


def _print(data: bytes) -> None:
    with suppress(OSError):  # the disk of the log is full
        os.write(2, data)


def _end_like(status: int) -> None:
    """End as the child did, so that the pool sees its exit code or signal."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        with suppress(OSError, ValueError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _end_with(parent: int) -> None:
    """Make the kernel end this process with its parent."""
    _prctl(_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the parent process has ended")


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value)
