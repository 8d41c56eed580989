"""Disturb real runs for some minutes, and compare their results with undisturbed runs.

    python -m tests.chaos --minutes 10 --seed 0
    python -m tests.chaos --fault "raylet SIGKILL" --phase update_actor

The first form injects a random fault every 20 s, in a random phase, into one run after the other.
`verlite supervise` starts a run again; what it does not start again, such as a run after Ctrl-C, is
started here. The second form injects the named faults ("all": every one), one after the other,
into a run that is started again here. Prints a table, writes it as JSON, and exits with 1 if
anything was wrong.
"""

import argparse
import os
import shutil
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
from tests.chaos.run import Run, differences, end_at_sigterm
from tests.chaos.workloads import USUAL, WORKLOADS, Workload

EARLY_SHARE = 0.3
"""Share of restarts that are disturbed again before their first step."""
DISK_BYTES = 128 << 20
MOST_ATTEMPTS = 50
SPARE_STEPS = 30
"""A run with fewer steps left than this gets no further named fault."""
PHASE_S = 90.0
"""How long to wait for a phase before another fault is chosen."""


def main() -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="faults are injected so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=float, default=20.0, help="seconds between faults")
    parser.add_argument("--steps", type=int, default=60, help="training steps of a run")
    parser.add_argument("--workload", action="append", choices=[*WORKLOADS])
    parser.add_argument(
        "--fault", action="append", choices=[*FAULTS, "all"], metavar="NAME", help="only these"
    )
    parser.add_argument("--phase", help="inject them in this phase")
    parser.add_argument("--folder", type=Path, help="keep all files there")
    parser.add_argument("--json", type=Path, default=Path("build/chaos.json"))
    options = parser.parse_args()
    end_at_sigterm()
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
    names = options.workload or [*USUAL]
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
            disturb_often(run, random, options.every, until, report, phases_of(reference))
            report.compare(run, differences(run, reference) + run.wait_until_clean())


def one_by_one(options: argparse.Namespace, folder: Path, report: Report) -> None:
    """Inject the named faults into as few runs as have enough steps for them."""
    random = Random(options.seed)
    names = [*FAULTS] if "all" in options.fault else options.fault
    report.begin(None)
    number = 0
    usual = (options.workload or ["sums"])[0]
    kinds: dict[str, list[str]] = {}
    for name in names:
        needs = FAULTS[name].needs or (usual,)
        kinds.setdefault(usual if usual in needs else needs[0], []).append(name)
    for kind, left in kinds.items():
        reference = undisturbed(WORKLOADS[kind](folder / kind, options.steps), folder, report)
        while left:
            number += 1
            # Only a supervisor waits for a lost node.
            supervised = reference.workload.hosts is not None
            with new_run(reference.workload, folder, number, supervised) as run:
                left = [name for name in left if fits(name, run)]
                entered = {options.phase} if options.phase else phases_of(reference)
                last = inject_in_turn(run, left, entered, random, report)
                run_to_the_end(run, last, report)
                report.compare(run, differences(run, reference) + run.wait_until_clean())


def inject_in_turn(
    run: Run, left: list[str], entered: set[str], random: Random, report: Report
) -> Outcome | None:
    """Start a run and inject faults, which are removed from `left`, until it is nearly done.

    Args:
        entered: the phases in which they may come.

    Returns the last fault if it ended the run.
    """
    run.start()
    last: Outcome | None = None
    while left:
        name = left.pop(0)
        phases = [phase for phase in FAULTS[name].phases if phase in entered]
        wanted = random.choice(phases or sorted(entered))
        report.status(f"{name}: waiting for {wanted}")
        is_early = wanted in STARTING
        if is_early and run.phases():
            run.kill()
            start_clean(run, last, report)
        if is_early or wanted in EXPORTING or wait_for_phase(run, "adv", 240):
            wait_for_phase(run, wanted, 240)
        last = disturb(run, name, wanted, random)
        report.add(last)
        if wanted in EXPORTING or run.finished_steps() + SPARE_STEPS > run.workload.steps:
            break
        if run.code() is not None:
            report.ended(run, last)
            start_clean(run, last, report)
    return last


def disturb_often(
    run: Run, random: Random, every_s: float, until: float, report: Report, entered: set[str]
) -> None:
    """Start a run and disturb it every few seconds until a time, then wait until it is done.

    Args:
        entered: the phases in which faults may come.
    """
    deck: list[str] = []
    names = [name for name in FAULTS if fits(name, run)]
    run.start()
    last: Outcome | None = None
    next_time = time.monotonic()
    while time.monotonic() < until and run.starts < MOST_ATTEMPTS:
        if run.code() == 0:
            return
        if run.code() is not None:
            last = start_again(run, last, random, names, report, entered)
        report.status(f"{run.workload.name}: step {run.finished_steps()} of {run.workload.steps}")
        time.sleep(0.2)
        if time.monotonic() < next_time or not run.finished_steps():
            continue
        deck = deck or random.sample(names, len(names))
        name = deck.pop()
        near_end = run.finished_steps() > run.workload.steps - 5
        later = entered & {*(EXPORTING if near_end else STEPPING)}
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
    run: Run,
    last: Outcome | None,
    random: Random,
    names: list[str],
    report: Report,
    entered: set[str],
) -> Outcome | None:
    """Start a run again, with some probability more than once: some starts are disturbed too.

    Args:
        entered: the phases in which faults may come.

    Returns the last fault whose end has no next attempt yet.
    """
    starting = entered & {*STARTING}
    early = [name for name in names if starting & {*FAULTS[name].phases}]
    report.ended(run, last)
    report.left(last, run.wait_until_clean())
    run.start()
    if early and random.random() < EARLY_SHARE:
        name = random.choice(early)
        phase = random.choice([phase for phase in FAULTS[name].phases if phase in starting])
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
        start_clean(run, last, report)
        last = None


def start_clean(run: Run, last: Outcome | None, report: Report) -> None:
    """Start a run again, and note what it left behind and what the last fault cost."""
    report.left(last, run.wait_until_clean())
    run.start()
    note_resumed(run, last)


def undisturbed(workload: Workload, folder: Path, report: Report) -> Run:
    """Return a finished run without faults."""
    report.status(f"{workload.name}: the undisturbed run")
    run = Run(workload, folder / f"{workload.name}-undisturbed")
    try:
        run.start()
        if run.finish() != 0:
            raise SystemExit(f"the undisturbed run failed:\n{run.text()}")
    finally:
        run.stop()
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


def phases_of(run: Run) -> set[str]:
    """Return the phases that a run has entered."""
    return {phase for _, _, phase in run.phases()}


def fits(name: str, run: Run) -> bool:
    """Whether a fault can be injected into a run."""
    fault, workload = FAULTS[name], run.workload
    is_for_it = not fault.needs or workload.name in fault.needs
    is_for_it = is_for_it and (not workload.faults or name in workload.faults)
    return is_for_it and (run.has_disk or not fault.needs_disk)


if __name__ == "__main__":
    sys.exit(main())
