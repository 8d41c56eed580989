"""Disturb real runs for some minutes, and compare their results with undisturbed runs.

    python -m tests.chaos --minutes 10 --seed 0
    python -m tests.chaos --fault "raylet SIGKILL" --phase update_actor

The first form injects a random fault every 20 s, in a random phase, into one run after the other.
`verlite supervise` starts a run again; what it does not start again, such as a run after Ctrl-C, is
started here. The second form injects each named fault ("all": every one) into a run of its own,
which is started again here. Prints a table, writes it as JSON, and exits with 1 if
anything was wrong.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random

from tests.chaos.disturb import Outcome, disturb, note_resumed, wait_for_phase
from tests.chaos.faults import EXPORTING, FAULTS, STARTING, STEPPING
from tests.chaos.report import Report
from tests.chaos.run import Run, differences
from tests.chaos.workloads import WORKLOADS, Workload

EARLY_SHARE = 0.3
"""Share of restarts that are disturbed again before their first step."""
DISK_BYTES = 128 << 20
MOST_ATTEMPTS = 50
PHASE_S = 90.0
"""How long to wait for a phase before another fault is chosen."""


def main() -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="faults are injected so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=float, default=20.0, help="seconds between faults")
    parser.add_argument("--steps", type=int, default=60, help="training steps of a run")
    parser.add_argument("--workload", action="append", choices=[*WORKLOADS], help="default: all")
    parser.add_argument(
        "--fault", action="append", choices=[*FAULTS, "all"], metavar="NAME", help="only these"
    )
    parser.add_argument("--phase", help="inject them in this phase")
    parser.add_argument("--folder", type=Path, help="keep all files there")
    parser.add_argument("--json", type=Path, default=Path("build/chaos.json"))
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # end the runs, too
    os.environ["OMP_NUM_THREADS"] = "1"  # sums must not depend on the number of workers
    kept = options.folder is not None
    folder = options.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    report = Report(options.json, vars(options))
    try:
        with report:
            if options.fault:
                one_by_one(options, folder, report)
            else:
                soak(options, folder, report)
        kept = kept or bool(report.problems)
    finally:
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)
    if report.problems:
        print(f"all files are in {folder}")
    return 1 if report.problems else 0


def soak(options: argparse.Namespace, folder: Path, report: Report) -> None:
    """Disturb run after run until the time is over."""
    random = Random(options.seed)
    names = options.workload or [*WORKLOADS]
    references = {}
    for name in names:
        workload = WORKLOADS[name](folder / name, options.steps)
        references[name] = undisturbed(workload, folder, report)
    report.begin(options.minutes * 60)
    until = time.monotonic() + options.minutes * 60
    number = 0
    while time.monotonic() < until:
        reference = references[names[number % len(names)]]
        number += 1
        with new_run(reference.workload, folder, number, supervised=True) as run:
            disturb_often(run, random, options.every, until, report)
            report.compare(run, differences(run, reference) + run.wait_until_clean())


def one_by_one(options: argparse.Namespace, folder: Path, report: Report) -> None:
    """Inject each named fault into a run of its own."""
    random = Random(options.seed)
    names = [*FAULTS] if "all" in options.fault else options.fault
    references = {}
    report.begin(None)
    for number, name in enumerate(names):
        kind = FAULTS[name].needs or (options.workload or ["sums"])[0]
        if kind not in references:
            workload = WORKLOADS[kind](folder / kind, options.steps)
            references[kind] = undisturbed(workload, folder, report)
        with new_run(references[kind].workload, folder, number) as run:
            if not fits(name, run):
                continue
            phase = options.phase or random.choice(FAULTS[name].phases)
            run.start()
            report.status(f"{name}: waiting for {phase}")
            if phase in STARTING or phase in EXPORTING or wait_for_phase(run, "adv", 240):
                wait_for_phase(run, phase, 240)
            outcome = disturb(run, name, phase, random)
            report.add(outcome)
            run_to_the_end(run, outcome, report)
            report.compare(run, differences(run, references[kind]) + run.wait_until_clean())


def disturb_often(run: Run, random: Random, every_s: float, until: float, report: Report) -> None:
    """Start a run and disturb it every few seconds until a time, then wait until it is done."""
    deck: list[str] = []
    names = [name for name in FAULTS if fits(name, run)]
    run.start()
    last: Outcome | None = None
    next_time = time.monotonic()
    while time.monotonic() < until and run.starts < MOST_ATTEMPTS:
        if run.code() == 0:
            return
        if run.code() is not None:
            last = start_again(run, last, random, names, report)
        report.status(f"{run.workload.name}: step {run.finished_steps()} of {run.workload.steps}")
        time.sleep(0.2)
        if time.monotonic() < next_time or not run.finished_steps():
            continue
        deck = deck or random.sample(names, len(names))
        name = deck.pop()
        near_end = run.finished_steps() > run.workload.steps - 5
        later = EXPORTING if near_end else STEPPING
        phases = [phase for phase in FAULTS[name].phases if phase in later]
        if not phases:
            continue
        phase = random.choice(phases)
        report.status(f"{run.workload.name}: {name}: waiting for {phase}")
        if wait_for_phase(run, phase, PHASE_S):
            next_time = time.monotonic() + every_s
            last = disturb(run, name, phase, random)
            report.add(last)
    run_to_the_end(run, last, report)


def start_again(
    run: Run, last: Outcome | None, random: Random, names: list[str], report: Report
) -> Outcome | None:
    """Start a run again, with some probability more than once: some starts are disturbed too.

    Returns the last fault whose end has no next attempt yet.
    """
    early = [name for name in names if set(FAULTS[name].phases) & set(STARTING)]
    report.ended(run, last)
    report.left(last, run.wait_until_clean())
    run.start()
    if early and random.random() < EARLY_SHARE:
        name = random.choice(early)
        phase = random.choice([phase for phase in FAULTS[name].phases if phase in STARTING])
        report.status(f"{run.workload.name}: {name}: waiting for {phase}")
        if wait_for_phase(run, phase, PHASE_S):
            outcome = disturb(run, name, phase, random)
            report.add(outcome)
            if outcome is not None and outcome.code is not None:
                return outcome
    report.status(f"{run.workload.name}: starting again")
    note_resumed(run, last)
    return None


def run_to_the_end(run: Run, last: Outcome | None, report: Report) -> None:
    """Start a run again until it is done."""
    while run.starts < MOST_ATTEMPTS:
        report.status(f"{run.workload.name}: step {run.finished_steps()}, without further faults")
        code = run.finish()
        if code == 0:
            return
        report.ended(run, last)
        report.left(last, run.wait_until_clean())
        run.start()
        note_resumed(run, last)
        last = None


def undisturbed(workload: Workload, folder: Path, report: Report) -> Run:
    """Return a finished run without faults."""
    report.status(f"{workload.name}: the undisturbed run")
    run = Run(workload, folder / f"{workload.name}-undisturbed")
    run.start()
    if run.finish() != 0:
        raise SystemExit(f"the undisturbed run failed:\n{run.text()}")
    return run


@contextmanager
def new_run(
    workload: Workload, folder: Path, number: int, supervised: bool = False
) -> Iterator[Run]:
    """A run in a new folder, with a small disk of its own if this process may mount one."""
    run = Run(workload, folder / f"{workload.name}-{number}", supervised)
    run.run_dir.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "chaos", str(run.run_dir)]
    with suppress(OSError):
        run.has_disk = subprocess.run(mount, stderr=subprocess.DEVNULL).returncode == 0
    try:
        yield run
    finally:
        run.stop()
        if run.has_disk:
            run.keep_small_files()
            subprocess.run(["umount", "--lazy", str(run.run_dir)])


def fits(name: str, run: Run) -> bool:
    """Whether a fault can be injected into a run."""
    fault = FAULTS[name]
    return fault.needs in ("", run.workload.name) and (run.has_disk or not fault.needs_disk)


if __name__ == "__main__":
    sys.exit(main())
