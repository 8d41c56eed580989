"""Steps of a workload (`workload.py`) or of the quickstart beside processes that keep cores busy,
with libgomp's own spinning and with verlite's setting (verlite/threads.py).

python recipes/benchmark/neighbors.py [wtiny|w25|quickstart] [--neighbors 0 1 2 4] [--rounds 2]
[--steps 3] [key=value ...]

A neighbor is a loop in one thread, as another user's job. Neighbors come and go within one run, so
that the ratio to the steps alone does not depend on how fast the machine was at another time. A
step in which they came is not counted. What share of the cores a neighbor takes is the scheduler's
choice: Linux may divide them by session.

`others` is the CPU time of all other processes and of other virtual machines meanwhile, in cores.
A measurement with more than a tenth of a core is disturbed.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from report import keep
from step import ENGINES, overrides
from workload import BUILD, model_of

from verlite.threads import SPINS

DEFAULT_SPINS = "300000"
"""libgomp's documented value if neither GOMP_SPINCOUNT nor OMP_WAIT_POLICY is set."""
MARK = "VERLITE_NEIGHBORS"
"""An environment variable that only the processes of the run have."""
POLL_S = 0.05
ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Phase:
    """Steps beside a constant number of neighbors."""

    neighbors: int
    seconds: list[float] = field(default_factory=list)
    """Of each counted step."""
    others: float = 0.0
    """Cores that other processes used."""


@contextmanager
def busy(count: int) -> Iterator[list[psutil.Popen]]:
    """Keep `count` processes in an endless loop."""
    # Ends also if this process is killed.
    loop = f"import os\nwhile os.getppid() == {os.getpid()}:\n for _ in range(10**6): pass"
    command = [sys.executable, "-c", loop]
    loops = [psutil.Popen(command, start_new_session=True) for _ in range(count)]
    try:
        yield loops
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    """Return the CPU time so far of processes and of their children that have ended."""
    total = 0.0
    for process in processes:
        with suppress(psutil.Error):
            total += sum(process.cpu_times()[:4])
    return total


def marked(value: str) -> list[psutil.Process]:
    """Return the processes of the run."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == value:
                found.append(process)
    return found


def machine_seconds() -> float:
    """Return the CPU time so far that was used on this machine, or taken from it by others."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - times.iowait - times.guest - times.guest_nice


def measure_phase(phase: Phase, steps: int, finished: Callable[[int], list[float]]) -> None:
    """Start neighbors, wait for one step and then for `steps` that are counted.

    Args:
        finished: waits until so many steps of the run have finished, and returns the seconds of
            all its steps.
    """
    with busy(phase.neighbors) as loops:
        first = len(finished(0)) + 1
        finished(first)

        def ours() -> float:
            return cpu_seconds([*marked(str(os.getpid())), *loops, psutil.Process()])

        began, machine, own = time.monotonic(), machine_seconds(), ours()
        phase.seconds += finished(first + steps)[first : first + steps]
        elapsed = time.monotonic() - began
        used = (machine_seconds() - machine) - (ours() - own)
        phase.others = max(0.0, used / elapsed)


def measure(
    name: str, phases: Sequence[Phase], spin: str, steps: int, extra: Sequence[str]
) -> list[Phase]:
    """Train in one child process through all phases, and return them."""
    BUILD.mkdir(exist_ok=True)
    total = 2 + len(phases) * (steps + 2)  # a step begins before its neighbors, and another after
    with tempfile.TemporaryDirectory(dir=BUILD) as scratch:
        folder, log = Path(scratch) / "run", Path(scratch) / "log"
        command = [sys.executable, "-m", "verlite.main_ppo"]
        command += [*arguments(name, total, folder), *extra]
        environment = {**os.environ, "GOMP_SPINCOUNT": spin, MARK: str(os.getpid())}

        def finished(count: int) -> list[float]:
            while True:
                lines = []
                with suppress(FileNotFoundError):
                    text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
                    lines = [line for line in text.splitlines(True) if line.endswith("\n")]
                if len(lines) >= count:
                    return [json.loads(line)["timing_s/step"] for line in lines]
                if process.poll() is not None:
                    raise SystemExit(f"{' '.join(command)}\n{log.read_text()}")
                time.sleep(POLL_S)

        with (
            log.open("w") as output,
            subprocess.Popen(command, stdout=output, stderr=output, env=environment) as process,
        ):
            try:
                finished(1)  # the first step of a run takes longer
                for phase in phases:
                    measure_phase(phase, steps, finished)
                    row = {"spins": int(spin), **summary([phase])}
                    print(json.dumps(row), flush=True)
            finally:
                process.terminate()
    return list(phases)


def arguments(name: str, steps: int, folder: Path) -> list[str]:
    """Return the overrides of a run of `steps` steps. Builds the model and the data it needs."""
    if name != "quickstart":
        model_of(name)
        return overrides(name, steps, folder, ENGINES[name])
    subprocess.run([sys.executable, ROOT / "recipes/quickstart/make.py"], cwd=ROOT, check=True)
    build = ROOT / "recipes/quickstart/build"
    return [
        "--config-name=quickstart",
        f"actor_rollout_ref.model.path={build}/model",
        f"data.train_files={build}/train.parquet",
        f"data.val_files={build}/test.parquet",
        f"trainer.total_training_steps={steps}",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        f"trainer.default_local_dir={folder}",
    ]


def summary(phases: Sequence[Phase]) -> dict[str, float]:
    """Return the median step beside one number of neighbors, and the largest `others`."""
    return {
        "neighbors": phases[0].neighbors,
        "seconds": statistics.median(second for phase in phases for second in phase.seconds),
        "others": round(max(phase.others for phase in phases), 3),
    }


def rows(phases: Sequence[Phase], spin: str) -> list[dict[str, float]]:
    """Return a row per number of neighbors, in the order in which they came."""
    counts = dict.fromkeys(phase.neighbors for phase in phases)
    found = [summary([one for one in phases if one.neighbors == count]) for count in counts]
    alone = next(row["seconds"] for row in found if row["neighbors"] == 0)
    return [{"spins": int(spin), **row, "slower": row["seconds"] / alone} for row in found]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workload", nargs="?", default="wtiny", choices=[*ENGINES, "quickstart"])
    parser.add_argument("--neighbors", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--spins", nargs="+", default=[DEFAULT_SPINS, SPINS])
    parser.add_argument("--rounds", type=int, default=2, help="times that all neighbors come")
    parser.add_argument("--steps", type=int, default=3, help="counted steps each time")
    parser.add_argument("--dry", action="store_true", help="print the rows, and keep none")
    args, extra = parser.parse_known_args()
    if 0 not in args.neighbors:
        parser.error("--neighbors needs 0: the others are compared with the steps alone")
    found = []
    for spin in args.spins:
        phases = [Phase(count) for _ in range(args.rounds) for count in args.neighbors]
        found += rows(measure(args.workload, phases, spin, args.steps, extra), spin)
    print(json.dumps(found, indent=1))
    if not args.dry:
        keep(f"neighbors_{args.workload}", {"rows": found})


if __name__ == "__main__":
    main()
