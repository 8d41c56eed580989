"""The faults, as one table of plain functions.

Each function disturbs a run and returns a function that ends the disturbance, or None.
"""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

import psutil

from tests.chaos.driver import CHECKING, STARTING_RAY
from tests.chaos.run import Run
from tests.chaos.workloads import Service
from tests.trainer.runs import Launch

STARTING = (CHECKING, STARTING_RAY, "starting workers")
STEPPING = (
    "gen",
    "old_log_prob",
    "ref",
    "values",
    "adv",
    "update_critic",
    "update_actor",
    "update_weights",
    "save_checkpoint",
    "testing",
)
EXPORTING = ("writing Hugging Face export",)
LOST = (76,)
NATIVE = (76, 1)
"""The raylet was killed, or ended itself after one of its agents. Ray's native client may then end
the driver with 1, also before it could report: docs/failures.md."""
STOPPED = 75
INTERRUPTED = 130
KILLED = -signal.SIGKILL
GOES_ON = None
"""In `Fault.ends`: the attempt does not end."""
FIND_S = 30.0
"""How long to wait for the process that a fault aims at."""

Undo = Callable[[], None]
Inject = Callable[[Run, Random], Undo | None]


class NoTarget(Exception):
    """The process or file that a fault aims at does not exist."""


@dataclass(frozen=True)
class Fault:
    """One way to disturb a run.

    Attributes:
        inject: see above.
        ends: exit codes that the attempt may have. GOES_ON: it may also go on. Both are right where
            the fault may come when nothing uses its target any more.
        phases: in which of the run's phases.
        lasts_s: how long until it is undone.
        needs: names of the workloads that it fits. (): all.
        needs_disk: whether the run needs a disk of its own.
        lost_steps: most finished steps that are computed again.
    """

    inject: Inject
    ends: tuple[int | None, ...]
    phases: tuple[str, ...] = STEPPING
    lasts_s: float = 0.0
    needs: tuple[str, ...] = ()
    needs_disk: bool = False
    lost_steps: int = 0


def processes(run: Run, role: str) -> list[psutil.Process]:
    """Return the processes of a role, waiting until there is one. Raises NoTarget."""
    deadline = time.monotonic() + FIND_S
    while not (found := run.find(role)):
        if time.monotonic() > deadline or run.code() is not None:
            raise NoTarget(role)
        time.sleep(0.05)
    return found


def send(role: str, *numbers: signal.Signals) -> Inject:
    """Send signals to one process of a role, 2 s apart."""

    def inject(run: Run, random: Random) -> None:
        process = random.choice(processes(run, role))
        for position, number in enumerate(numbers):
            time.sleep(2.0 if position else 0.0)
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    return inject


def pause(role: str) -> Inject:
    """Stop all processes of a role, and continue them."""

    def inject(run: Run, random: Random) -> Undo:
        stopped = processes(run, role)
        for process in stopped:
            process.suspend()

        def undo() -> None:
            for process in stopped:
                with suppress(psutil.NoSuchProcess):
                    process.resume()

        return undo

    return inject


def lose_machine(run: Run, random: Random) -> None:
    """End all processes of the run at once, and remove its temporary files as a restart does."""
    for process in run.launch.processes():
        with suppress(psutil.NoSuchProcess):
            process.kill()
    run.launch.process.wait()
    for folder in run.temporary_folders():
        shutil.rmtree(folder, ignore_errors=True)


def send_all(number: signal.Signals) -> Inject:
    """Send a signal to all processes of the run, as a batch system and systemd do."""

    def inject(run: Run, random: Random) -> None:
        for process in run.launch.processes():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    return inject


def damage(change: Callable[[Run, Random], None]) -> Inject:
    """Kill the driver, and change files of the run before it starts again."""

    def inject(run: Run, random: Random) -> None:
        newest_checkpoint(run)
        run.kill()
        run.wait_until_clean()
        change(run, random)

    return inject


def newest_checkpoint(run: Run) -> Path:
    """Return the folder of the newest checkpoint, if there is an older one. Raises NoTarget."""
    found = sorted(run.run_dir.glob("global_step_*"), key=lambda path: int(path.name[12:]))
    if len(found) < 2:
        raise NoTarget("two checkpoints")
    return found[-1]


def a_shard(run: Run, random: Random) -> Path:
    """Return a file of the workers' part of the newest checkpoint."""
    shards = [path for path in newest_checkpoint(run).glob("*/**/*") if path.is_file()]
    return random.choice(sorted(shards))


def truncate_shard(run: Run, random: Random) -> None:
    """Cut the end of a shard off."""
    shard = a_shard(run, random)
    os.truncate(shard, shard.stat().st_size // 2)


def flip_shard(run: Run, random: Random) -> None:
    """Change one byte of a shard."""
    shard = a_shard(run, random)
    content = bytearray(shard.read_bytes())
    content[random.randrange(len(content))] ^= 0x20
    shard.write_bytes(content)


def spoil_manifest(run: Run, random: Random) -> None:
    """Write something else in place of the newest manifest."""
    wrong = random.choice([b"", b"{}", b"[]", b"\xff\xfe", b"[" * 10_000, b"null"])
    (newest_checkpoint(run) / "manifest.json").write_bytes(wrong)


def spoil_pointer(run: Run, random: Random) -> None:
    """Let the pointer name no checkpoint, or an old one."""
    wrong = random.choice([b"", b"999", b"1", b"\xff", b"-3", b"x" * 100_000])
    (run.run_dir / "latest_checkpointed_iteration.txt").write_bytes(wrong)


def spoil_metrics(run: Run, random: Random) -> None:
    """Add a line that cannot be read, repeat a line, or cut the last one off.

    It is only cut if the newest checkpoint is of its step, as when a machine is lost in the write.
    """
    path = run.run_dir / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    place = random.randrange(len(lines) + 1)
    kind = random.choice(["bad", "blank", "number", "repeated", "cut"])
    if kind == "cut" and not (run.run_dir / f"global_step_{run.finished_steps() + 1}").exists():
        lines[-1] = lines[-1][: len(lines[-1]) // 2]
    elif kind == "repeated":
        lines.insert(place, random.choice(lines))
    else:
        lines.insert(place, {"blank": b"\n", "number": b"12\n"}.get(kind, b'{"step": \xff}\n'))
    path.write_bytes(b"".join(lines))


def spoil_state(run: Run, random: Random) -> None:
    """Change the step in the newest state.json, keeping valid JSON."""
    path = newest_checkpoint(run) / "state.json"
    state = json.loads(path.read_text())
    path.write_text(json.dumps({**state, "step": state["step"] + 1}))


def stray_checkpoints(run: Run, random: Random) -> None:
    """Leave folders and files that look like checkpoints."""
    for name in ("global_step_9999", "global_step_²", ".tmp_global_step_7"):
        (run.run_dir / name).mkdir(exist_ok=True)
    (run.run_dir / "global_step_old").write_text("a file")


def full_disk(run: Run, random: Random) -> Undo:
    """Fill the run's disk."""
    filler = run.run_dir / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(b"\0" * (1 << 16))
    return partial(filler.unlink, missing_ok=True)


def read_only(run: Run, random: Random) -> Undo:
    """Make the run directory read-only."""
    folder = str(run.run_dir)
    subprocess.run(["mount", "--bind", folder, folder], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)
    return partial(subprocess.run, ["umount", "--lazy", folder], check=True)


def second_start(run: Run, random: Random) -> None:
    """Start the same command in the same directory. It has to be refused."""
    other = Launch(run.run_dir, run.workload.options, run.folder / "second.log")
    code = other.wait(120)
    if code != 2 or "is in use by process" not in other.text():
        raise AssertionError(f"the second run ended with code {code}:\n{other.text()}")


def retriever_down(run: Run, random: Random) -> Undo:
    """Shut the retriever down."""
    service = service_of(run)
    service.stop()
    return service.start


def retriever_answers(status: int, content: bytes) -> Inject:
    """Let the retriever answer something else."""

    def inject(run: Run, random: Random) -> Undo:
        server = service_of(run).server
        usual = server.answer
        server.answer = lambda body: (status, content)
        return partial(setattr, server, "answer", usual)

    return inject


def retriever_slow(run: Run, random: Random) -> Undo:
    """Let the retriever answer after the client's deadline."""
    server = service_of(run).server
    server.delay = 4.0
    return partial(setattr, server, "delay", 0.0)


def service_of(run: Run) -> Service:
    """Return the run's retriever."""
    assert run.workload.retriever is not None
    return run.workload.retriever


def lose_second_node(run: Run, random: Random) -> None:
    """Kill the raylet of the second node. The node joins again up to a minute after its end."""
    assert run.workload.hosts is not None
    run.workload.hosts.lose_second(random.uniform(0, 60))


KILL, TERM, INT = signal.SIGKILL, signal.SIGTERM, signal.SIGINT
STOP, USR1 = signal.SIGSTOP, signal.SIGUSR1
ANY = (*STARTING, *STEPPING, *EXPORTING)
DAEMON = (STARTING_RAY, "starting workers", *STEPPING)
TRAINED = ("update_critic", "update_actor", "update_weights", "save_checkpoint")

PPO = ("sums", "vllm")
ONE_NODE = (*PPO, "search")

FAULTS: dict[str, Fault] = {
    # The driver and its signals.
    "driver SIGKILL": Fault(send("driver", KILL), (KILLED,), ANY),
    "driver SIGTERM": Fault(send("driver", TERM), (STOPPED,), ANY),
    "driver SIGUSR1": Fault(send("driver", USR1), (STOPPED,), ANY),
    "driver SIGINT": Fault(send("driver", INT), (INTERRUPTED,), ANY),
    "driver SIGTERM twice": Fault(send("driver", TERM, TERM), (STOPPED,), ANY),
    "driver SIGTERM, SIGKILL": Fault(send("driver", TERM, KILL), (KILLED, STOPPED), ANY),
    "all SIGTERM": Fault(send_all(TERM), (STOPPED,), DAEMON, needs=ONE_NODE),
    "driver paused": Fault(pause("driver"), (GOES_ON,), lasts_s=5),
    "machine lost": Fault(lose_machine, (KILLED,), ANY),
    # Workers.
    "actor SIGKILL": Fault(send("actor", KILL), LOST),
    "actor SIGTERM": Fault(send("actor", TERM), LOST),
    "actor SIGINT": Fault(send("actor", INT), (*LOST, GOES_ON)),
    "actor SIGUSR1": Fault(send("actor", USR1), (GOES_ON,)),
    "actor frozen": Fault(send("actor", STOP), LOST),
    "actor paused": Fault(pause("actor"), (GOES_ON,), lasts_s=5),
    "critic SIGKILL": Fault(send("critic", KILL), LOST, needs=PPO),
    "critic frozen": Fault(send("critic", STOP), LOST, needs=PPO),
    "ref SIGKILL": Fault(send("ref", KILL), LOST, needs=PPO),
    "ref paused": Fault(pause("ref"), (GOES_ON,), lasts_s=5, needs=PPO),
    "rollout SIGKILL": Fault(send("rollout", KILL), (*LOST, GOES_ON)),
    "rollout SIGTERM": Fault(send("rollout", TERM), (*LOST, GOES_ON)),
    "rollout frozen": Fault(send("rollout", STOP), (*LOST, GOES_ON)),
    "rollout paused": Fault(pause("rollout"), (GOES_ON,), lasts_s=5),
    # Ray's daemons, and the processes around the workers.
    "raylet SIGKILL": Fault(send("raylet", KILL), NATIVE, DAEMON),
    "raylet frozen": Fault(send("raylet", STOP), LOST),
    "raylet paused": Fault(pause("raylet"), (GOES_ON,), lasts_s=3),
    "gcs SIGKILL": Fault(send("gcs", KILL), LOST, DAEMON),
    "gcs SIGTERM": Fault(send("gcs", TERM), (*LOST, GOES_ON), DAEMON),
    "gcs frozen": Fault(send("gcs", STOP), LOST),
    "gcs paused": Fault(pause("gcs"), (GOES_ON,), lasts_s=3),
    "dashboard agent SIGKILL": Fault(send("dashboard agent", KILL), NATIVE, DAEMON),
    "environment agent SIGKILL": Fault(send("environment agent", KILL), NATIVE, DAEMON),
    "guardian SIGKILL": Fault(send("guardian", KILL), (GOES_ON,), lasts_s=4),
    "guardian frozen": Fault(send("guardian", STOP), (GOES_ON,), lasts_s=12),
    "guardian paused": Fault(pause("guardian"), (GOES_ON,), lasts_s=3),
    "forks SIGKILL": Fault(send("forks", KILL), (GOES_ON,), ("starting workers", *STEPPING)),
    "reward SIGKILL": Fault(send("reward", KILL), (GOES_ON,), TRAINED, needs=PPO),
    "reward frozen": Fault(pause("reward"), (GOES_ON,), lasts_s=5, needs=PPO),
    # Files and the disk.
    "shard truncated": Fault(damage(truncate_shard), (KILLED,), TRAINED, lost_steps=1),
    "shard flipped": Fault(damage(flip_shard), (KILLED,), TRAINED, lost_steps=1),
    "manifest spoiled": Fault(damage(spoil_manifest), (KILLED,), TRAINED, lost_steps=1),
    "state spoiled": Fault(damage(spoil_state), (KILLED,), TRAINED, lost_steps=1),
    "pointer spoiled": Fault(damage(spoil_pointer), (KILLED,), TRAINED),
    "metrics spoiled": Fault(damage(spoil_metrics), (KILLED,), TRAINED),
    "stray checkpoints": Fault(damage(stray_checkpoints), (KILLED,), TRAINED),
    "disk full": Fault(full_disk, (GOES_ON,), lasts_s=10, needs_disk=True),
    "disk read-only": Fault(read_only, (GOES_ON,), lasts_s=10, needs_disk=True),
    "second start": Fault(second_start, (GOES_ON,)),
    # The second node of two.
    "second node: actor SIGKILL": Fault(send("actor_1", KILL), LOST, needs=("hosts",)),
    "second node: rollout SIGKILL": Fault(
        send("rollout_1", KILL), (*LOST, GOES_ON), needs=("hosts",)
    ),
    "second node lost": Fault(lose_second_node, LOST, needs=("hosts",)),
    # The retriever.
    "retriever down": Fault(retriever_down, (GOES_ON,), lasts_s=8, needs=("search",)),
    "retriever 500": Fault(retriever_answers(500, b"no"), (GOES_ON,), lasts_s=8, needs=("search",)),
    "retriever garbage": Fault(
        retriever_answers(200, b'{"result": 7'), (GOES_ON,), lasts_s=8, needs=("search",)
    ),
    "retriever slow": Fault(retriever_slow, (GOES_ON,), lasts_s=8, needs=("search",)),
}
