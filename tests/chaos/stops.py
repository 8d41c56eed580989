"""Send SIGTERM at random moments of runs with a long validation, and note how they end.

    python -m tests.chaos.stops --count 50 --seed 0

A run saves every third step and validates for seconds at every second one. After each stop the
same command is started again; a finished run is compared with an undisturbed one. Prints a line per
stop and a table by phase, writes both as JSON, and exits with 1 if anything was wrong.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import median

from tests.chaos.faults import EXPORTING
from tests.chaos.run import Run, differences, end_at_sigterm
from tests.chaos.workloads import long_validation

GRACE_S = 30.0
"""The default of trainer.stop_grace_s."""
STOPPED, LOST = 75, 76
START_SHARE = 0.2
"""Share of signals that come before the first step."""
BEFORE = "before the program's handlers"
START = (BEFORE, "checking", "reading", "starting", "loading")
"""Beginnings of the names of phases before the first weight sync."""


@dataclass
class Stopped:
    """One SIGTERM and what followed. Times are in seconds since the signal."""

    phase: str
    finished: int
    """Finished steps when the signal came."""
    unsaved: bool
    """Whether one of them had no checkpoint."""
    code: int | None
    end_s: float
    saved_step: int
    """Step of the newest checkpoint afterwards."""
    saved_s: float | None
    """Until the checkpoint was complete. None: none was written."""
    message: str
    """What the run said about it."""
    left: list[str]
    problem: str = ""


def main() -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=50, help="signals")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=9, help="training steps of a run")
    parser.add_argument("--folder", type=Path, help="keep all files there")
    parser.add_argument("--json", type=Path, default=Path("build/stops.json"))
    options = parser.parse_args()
    end_at_sigterm()
    os.environ["OMP_NUM_THREADS"] = "1"
    kept = options.folder is not None
    folder = options.folder or Path(tempfile.mkdtemp(prefix="stops-"))
    try:
        problems = stop_runs(options, folder)
        kept = kept or bool(problems)
    finally:
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)
    if problems:
        print(f"all files are in {folder}")
    return 1 if problems else 0


def stop_runs(options: argparse.Namespace, folder: Path) -> list[str]:
    """Stop run after run. Returns what was wrong."""
    random = Random(options.seed)
    workload = long_validation(folder / "data", options.steps)
    undisturbed = Run(workload, folder / "undisturbed")
    try:
        undisturbed.start()
        if undisturbed.finish() != 0:
            raise SystemExit(f"the undisturbed run failed:\n{undisturbed.text()}")
    finally:
        undisturbed.stop()
    durations = span_of(undisturbed)
    print(f"undisturbed: first step after {durations[0]:.0f} s, then {durations[1]:.0f} s")
    stops: list[Stopped] = []
    problems: list[str] = []
    number = 0
    try:
        while len(stops) < options.count:
            number += 1
            run = Run(workload, folder / f"run-{number}")
            try:
                problems += stop_often(run, random, durations, options.count, stops)
                if run.code() == 0:
                    problems += [f"run {number}: {one}" for one in differences(run, undisturbed)]
                    print(f"run {number}: finished after {run.starts} starts", flush=True)
            finally:
                run.stop()
    finally:
        problems += [f"{one.phase}: {one.problem}" for one in stops if one.problem]
        result = {"stops": [asdict(one) for one in stops], "runs": number, "problems": problems}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n")
        print(table(stops), flush=True)
        for problem in problems:
            print(f"problem: {problem}", flush=True)
    return problems


def span_of(run: Run) -> tuple[float, float]:
    """Return how long the run needed to its first validation or step, and from there to its end."""
    times = [float(line.split()[0]) for line in run.trace.read_text().splitlines()]
    phases = [phase for _, _, phase in run.phases()]
    begins = next(i for i, phase in enumerate(phases) if not phase.startswith(START))
    return times[begins] - times[0], times[-1] - times[begins]


def stop_often(
    run: Run, random: Random, durations: tuple[float, float], count: int, stops: list[Stopped]
) -> list[str]:
    """Start a run and stop it again and again until it is done. Returns what else was wrong."""
    problems = []
    while len(stops) < count:
        run.start()
        known = len(run.phases())
        if random.random() < START_SHARE:
            moment = random.uniform(0.2, durations[0])
        else:
            moment = random.uniform(0, durations[1])
            wait_until(run, known)
        deadline = time.monotonic() + moment
        while run.code() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        if run.code() is None:
            one = stop(run, known)
            stops.append(one)
            print(line_of(len(stops), one), flush=True)
        if run.code() == 0:
            return problems
        if run.code() not in (STOPPED, -signal.SIGTERM) and not (stops and stops[-1].problem):
            problems.append(f"start {run.starts} ended with {run.code()}: {run.text()[-500:]}")
            if run.code() != LOST:
                return problems
    return problems


def wait_until(run: Run, known: int) -> None:
    """Wait until the attempt has started all workers."""
    while run.code() is None:
        if any(not phase.startswith(START) for _, _, phase in run.phases()[known:]):
            return
        time.sleep(0.02)


def stop(run: Run, known: int) -> Stopped:
    """Send SIGTERM to a living run and note its end.

    Args:
        known: number of phases before this attempt.
    """
    entered = run.phases()[known:]
    _, finished, phase = entered[-1] if entered else (0, run.finished_steps(), BEFORE)
    # The step whose validation or save is in progress is finished, but not shown as such yet.
    finished += phase in ("testing", "save_checkpoint") and finished > 0
    before = newest(run)
    sent = time.time()
    run.launch.process.send_signal(signal.SIGTERM)
    code = run.finish(180)
    end_s = time.time() - sent
    left = run.wait_until_clean()
    left += [str(path) for path in run.run_dir.glob("**/.tmp*")]
    after = newest(run)
    written = run.run_dir / f"global_step_{after}" / "manifest.json"
    lines = [line for line in run.text().splitlines() if "stopped by SIGTERM" in line]
    one = Stopped(
        phase=phase,
        finished=finished,
        unsaved=finished > before,
        code=code,
        end_s=end_s,
        saved_step=after,
        saved_s=written.stat().st_mtime - sent if after > before else None,
        message=lines[-1] if lines else run.text()[-200:] if code else "",
        left=left,
    )
    one.problem = problem_of(one, run.finished_steps())
    return one


def newest(run: Run) -> int:
    """Return the step of the newest checkpoint that has a manifest, 0 if there is none."""
    found = run.run_dir.glob("global_step_*/manifest.json")
    return max((int(path.parent.name[12:]) for path in found), default=0)


def problem_of(one: Stopped, finished: int) -> str:
    """Return what should not have happened, "" if nothing.

    Args:
        finished: the last step in metrics.jsonl after the stop.
    """
    early = one.phase == BEFORE and one.code == -signal.SIGTERM
    done = one.code == 0 and one.phase in EXPORTING
    if one.code != STOPPED and not early and not done:
        return f"exit code {one.code}"
    if one.left:
        return f"left behind: {one.left[:5]}"
    if one.saved_step < max(one.finished, finished):
        return f"step {max(one.finished, finished)} has no checkpoint"
    names_checkpoint = "heckpoint" in one.message or "Nothing was started" in one.message
    if not early and not done and not names_checkpoint:
        return f"the message does not name the checkpoint: {one.message!r}"
    return ""


def group_of(one: Stopped) -> str:
    """Return the part of a run in which a stop came."""
    if one.phase.startswith(START):
        return "start"
    if one.phase in EXPORTING:
        return "export"
    names = {"gen": "generation", "testing": "validation", "save_checkpoint": "save"}
    return names.get(one.phase, "update and other passes")


def table(stops: Sequence[Stopped]) -> str:
    """Return the stops by part of the run as a Markdown table."""
    rows = [
        "| the signal came in | stops | with an unsaved step | saved within 30 s "
        "| seconds to exit: median, most | exit codes | left behind |",
        "|---|---|---|---|---|---|---|",
    ]
    groups: dict[str, list[Stopped]] = {}
    for one in stops:
        groups.setdefault(group_of(one), []).append(one)
    for name, group in [*groups.items(), ("all", list(stops))] if stops else []:
        unsaved = [one for one in group if one.unsaved]
        saved = [one for one in unsaved if one.saved_s is not None and one.saved_s <= GRACE_S]
        ends = [one.end_s for one in group]
        codes = ", ".join(f"{n} x {code}" for code, n in Counter(x.code for x in group).items())
        rows.append(
            f"| {name} | {len(group)} | {len(unsaved)} | {len(saved)} | "
            f"{median(ends):.1f}, {max(ends):.1f} | {codes} | {sum(bool(x.left) for x in group)} |"
        )
    return "\n".join(rows)


def line_of(number: int, one: Stopped) -> str:
    """Return a stop in one line."""
    saved = "nothing saved" if one.saved_s is None else f"saved after {one.saved_s:.1f} s"
    return (
        f"{number}: {one.phase} after step {one.finished}: code {one.code} after {one.end_s:.1f} s,"
        f" {saved}, checkpoint {one.saved_step}. {one.problem}"
    )


if __name__ == "__main__":
    sys.exit(main())
