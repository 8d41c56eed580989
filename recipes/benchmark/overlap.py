"""Steps of samples with a slow tool, by trainer.mode, alternating.

python recipes/benchmark/overlap.py [--rounds 2] [--steps 30] [--median 0.05] [--dry]
[key=value ...]

A sample calls a tool once, which takes a lognormal time: in 1% of the calls 50 times the median.
The engine and the actor have a slot each. In all modes all samples are those of wtiny, with the
same lengths on average, and the calls take the same times, so a run has the same work. `verlite
simulate` predicts the steps of all modes from the run with trainer.mode=sync.
"""

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from report import keep
from step import HERE, overrides
from workload import BUILD

from verlite.envs.factory import EnvFactory
from verlite.envs.step import Env, Step

SIGMA = math.log(50) / 2.326
"""Of a lognormal distribution whose 99th percentile is 50 times the median."""
MODES = {
    "sync": ["trainer.mode=sync"],
    "pipelined": ["trainer.mode=pipelined"],
    "async, max_age 1": ["trainer.mode=async", "async_training.max_age=1"],
    "async, max_age 4, depth 2": [
        "trainer.mode=async",
        "async_training.max_age=4",
        "async_training.depth=2",
    ],
}


class SlowTool:
    """Answers the first digit that the model writes, after a while."""

    stop = tuple("0123456789")

    def __init__(self, median_s: float, draw: random.Random) -> None:
        self.median_s, self.draw = median_s, draw

    async def step(self, text: str, last: bool) -> Step:
        import asyncio

        if last:
            return Step(done=True)
        await asyncio.sleep(self.draw.lognormvariate(math.log(self.median_s), SIGMA))
        return Step(obs="=")


class Factory(EnvFactory):
    def __init__(self, median_s: float) -> None:
        self.median_s, self.draw = median_s, random.Random(0)

    def env(self, extra_info: Mapping[str, Any]) -> Env:
        return SlowTool(self.median_s, self.draw)


def train(
    mode: str, steps: int, median_s: float, extra: Sequence[str]
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Train in a child process, and return the metrics of its steps. With trainer.mode=sync also
    return the seconds that `verlite simulate` predicts from the run for a step of each mode."""
    with tempfile.TemporaryDirectory(dir=BUILD) as scratch:
        folder = Path(scratch) / "run"
        command = [
            *(sys.executable, "-m", "verlite.main_ppo"),
            *overrides("wtiny", steps, folder, "hf"),
            "trainer.n_gpus_per_node=2",
            "cluster.component_placement={rollout: 0, actor: 1}",
            "algorithm.rollout_correction.bypass_mode=true",
            "max_turns=1",
            "data.max_start_length=16",
            "data.max_obs_length=4",
            "env.name=overlap:Factory",
            f"env.kwargs.median_s={median_s}",
            "trainer.rollouts_per_step=-1",
            *MODES[mode],
            *extra,
        ]
        output(command)
        text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
        lines = [line for line in map(json.loads, text.splitlines()) if line["step"]]
        if mode != "sync":
            return lines, {}
        found = output([sys.executable, "-m", "verlite.cli", "simulate", str(folder), "--json"])
        return lines, {name_of(one): one["timing_s/step"] for one in json.loads(found)["rows"]}


def output(command: Sequence[str]) -> str:
    """Return what a command prints."""
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(HERE)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def name_of(simulated: Mapping[str, Any]) -> str:
    """Return the name in MODES of a row of `verlite simulate`."""
    settings = simulated["settings"]
    if settings["mode"] != "async":
        return str(settings["mode"])
    name = f"async, max_age {settings['max_age']}"
    return name if settings["depth"] == 1 else f"{name}, depth {settings['depth']}"


def row(mode: str, runs: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Summarize the steps of a mode, without the first two of each run."""
    steps = [line for run in runs for line in run[2:]]

    def mean(key: str) -> float:
        return statistics.fmean(line[key] for line in steps)

    return {
        "mode": mode,
        "seconds": mean("timing_s/step"),
        "waits": mean("timing_s/gen") / mean("timing_s/step"),
        "age": mean("async/age/mean") if "async/age/mean" in steps[0] else 0.0,
        "response_length": mean("response_length/mean"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2, help="runs of each mode")
    parser.add_argument("--steps", type=int, default=30, help="steps of each run")
    parser.add_argument("--median", type=float, default=0.05, help="of the tool, in seconds")
    parser.add_argument("--dry", action="store_true", help="print the rows, and keep none")
    args, extra = parser.parse_known_args()
    runs: dict[str, list[list[dict[str, Any]]]] = {mode: [] for mode in MODES}
    predicted: list[dict[str, float]] = []
    for _ in range(args.rounds):
        for mode, found in runs.items():
            lines, simulated = train(mode, args.steps, args.median, extra)
            found.append(lines)
            predicted += [simulated] if simulated else []
    rows = [row(mode, found) for mode, found in runs.items()]
    for one in rows:
        one["speed"] = rows[0]["seconds"] / one["seconds"]
        one["simulated"] = statistics.fmean(found[one["mode"]] for found in predicted)
    print(json.dumps(rows, indent=1))
    if not args.dry:
        keep("overlap", {"median_s": args.median, "rows": rows})


if __name__ == "__main__":
    main()
