"""The CPU time of heartbeats and watchers in a run of wtiny, and its share of a step.

python recipes/benchmark/watchers.py [--steps 48]

Counts the whole threads of the workers' heartbeats, of the driver's receiver, and of the driver's
looks at Ray's processes and the guardian. Also counts the calls of main threads: the heartbeat that
a worker sends after each call, and the driver's looks at workers and at finished calls.
Two runs with and without them would differ more from each other by the machine than by these.
"""

import argparse
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meter import COST, note, noted
from report import keep
from step import overrides
from workload import BUILD, model_of

WORKLOAD = "wtiny"
WARM_UP = 4
"""The first steps are not counted."""
SITE = "sitecustomize.py"
"""Python imports this file at every start, if its folder is on PYTHONPATH."""


def drive(arguments: Sequence[str]) -> None:
    """Run verlite's command line, and note the CPU times in the metrics of each step."""
    from verlite.control.watch import Watch
    from verlite.controller.heartbeat import Receiver
    from verlite.controller.node_watch import DaemonWatch
    from verlite.controller.supervise import Future, Supervisor
    from verlite.trainer import ppo

    note(Receiver, "receive", "heartbeats")
    note(DaemonWatch, "_look", "daemons")
    note(Supervisor, "_unresponsive")
    note(Future, "exceeds")
    note(Watch, "finished")
    finish = ppo.finish_step

    def finish_step(run: Any, batch: Any) -> None:
        run.metrics["cpu_s"] = cpu_seconds()
        run.metrics["watchers_s"] = noted(Path(os.environ[COST])) / 1e9
        finish(run, batch)

    setattr(ppo, "finish_step", finish_step)  # noqa: B010
    sys.argv[1:] = arguments
    runpy.run_module("verlite.main_ppo", run_name="__main__", alter_sys=True)


def cpu_seconds() -> float:
    """Return the CPU time so far of all processes of the run, which have its variable."""
    import psutil

    total = 0.0
    for process in psutil.process_iter():
        try:
            if process.environ().get(COST) == os.environ[COST]:
                times = process.cpu_times()
                total += times.user + times.system
        except psutil.Error:
            continue
    return total


def shares(lines: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return what a step costs on average, from the metrics of steps.

    The CPU times in them count from the start of the run, so the first line only begins the count.
    """
    steps = len(lines) - 1
    seconds = sum(line["timing_s/step"] for line in lines[1:]) / steps
    cpu = (lines[-1]["cpu_s"] - lines[0]["cpu_s"]) / steps
    watchers = (lines[-1]["watchers_s"] - lines[0]["watchers_s"]) / steps
    return {
        "steps": steps,
        "seconds": seconds,
        "cpu_seconds": cpu,
        "watchers_seconds": watchers,
        "of_seconds": watchers / seconds,
        "of_cpu": watchers / cpu,
    }


def measure(steps: int) -> dict[str, Any]:
    """Run wtiny, and return the shares and the median seconds of a step."""
    model_of(WORKLOAD)
    with tempfile.TemporaryDirectory(dir=BUILD) as scratch:
        folder = Path(scratch)
        here = str(Path(__file__).resolve().parent)
        site = f"import sys\nsys.path.insert(0, {here!r})\n"
        (folder / SITE).write_text(f"{site}import meter\nmeter.install_in_worker()\n")
        (folder / "cost").mkdir()
        paths = [scratch, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            **os.environ,
            COST: str(folder / "cost"),
            "PYTHONPATH": os.pathsep.join(paths),
        }
        command = [sys.executable, __file__, "--drive"]
        command += overrides(WORKLOAD, steps, folder / "run", "hf")
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        text = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()][WARM_UP:]
    median = statistics.median(line["timing_s/step"] for line in lines)
    return {**shares(lines), "median_seconds": median, "load": os.getloadavg()[0]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--drive", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.drive:
        drive(args.drive)
        return
    found = measure(args.steps)
    keep("watchers", found)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
