"""Seconds from the start of the process to the end of the first step of a workload, by phase, for
each engine; and the CPU seconds of commands that end before that.

python recipes/benchmark/startup.py [--rounds 3] [--engines hf vllm] [--before CHECKOUT]
[--workload w25]

vLLM compiles a new model once and caches the result. Its first round has an empty cache and is
reported separately. --before measures another checkout of verlite with the same Python in turns.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from report import keep
from step import MILESTONES, overrides, verlite
from workload import BUILD, WORKLOADS, model_of

WORKLOAD = "wtiny"
PARTS = (
    "configuration",
    "data, reward, Ray and the workers' processes",
    "imports, in all of them",
    "models, engine, first sync",
    "first step",
)


def parts(run: dict) -> dict[str, float]:
    """Return the seconds between the run's milestones. The first step's time is the run's own
    measurement."""
    ready, imported, actor, rollout, end = (run["milestones"][name] for name in MILESTONES)
    started, step = max(actor, rollout), run["steps"][0]
    imported = max(started, imported)  # in the driver; workers take slightly longer
    return dict(
        zip(
            PARTS,
            (ready, started - ready, imported - started, end - step - imported, step),
            strict=True,
        )
    )


def commands(folder: Path) -> dict[str, list[str]]:
    """Return the arguments of Python for each command that is measured."""
    rows = folder / "rows.jsonl"
    rows.write_text('{"prompt": "3+4=", "response": "7"}\n' * 64, encoding="utf-8")
    check = ["-m", "verlite", "check"]
    return {
        "verlite --help": ["-m", "verlite", "--help"],
        "verlite check, a refused key": [*check, "no.such.key=1"],
        "verlite check": [*check, *overrides(WORKLOAD, 1, folder / "run", "hf")],
        "main_sft, one step of 64 short rows, and the export": [
            "-m",
            "verlite.main_sft",
            f"data.train_files={rows}",
            f"model.path={model_of(WORKLOAD)}",
            "data.train_batch_size=64",
            "trainer.total_training_steps=1",
            f"trainer.default_local_dir={folder / 'sft'}",
            "trainer.resume_mode=disable",
        ],
    }


def cpu_seconds(arguments: list[str]) -> float:
    """Return the CPU seconds of a command and its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in (0, 2):
        raise SystemExit(f"{' '.join(arguments)}\n{done.stdout}{done.stderr}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def summary(runs: dict[str, list[dict]]) -> dict:
    """Return the medians of each engine. The first round is left out."""
    return {
        engine: {
            "seconds": statistics.median(run["first_step"] for run in done[1:]),
            "seconds_at_first": done[0]["first_step"],
            "parts": {
                part: statistics.median(parts(run)[part] for run in done[1:]) for part in PARTS
            },
        }
        for engine, done in runs.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engines", nargs="*", choices=("hf", "vllm"), default=["hf", "vllm"])
    parser.add_argument("--before", type=Path, help="checkout of an earlier commit")
    parser.add_argument("--workload", choices=tuple(WORKLOADS), default=WORKLOAD)
    args = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    checkouts = {"now": Path(__file__).resolve().parents[2]}
    if args.before:
        checkouts = {"before": args.before.resolve(), **checkouts}
    model_of(args.workload)
    runs: dict[str, dict[str, list[dict]]] = {}
    cpu: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory(dir=BUILD) as scratch:
        for number in range(args.rounds + 1):
            for which, checkout in checkouts.items():
                os.chdir(checkout)  # `python -m` imports from here, and workers as the driver does
                os.environ["VLLM_CACHE_ROOT"] = f"{scratch}/{which}"
                for name, arguments in commands(Path(scratch)).items():
                    took = cpu_seconds(arguments)
                    cpu.setdefault(which, {}).setdefault(name, []).append(took)
                    print(f"round {number}, {which}, {name}: {took:.2f} s of CPU", flush=True)
                for engine in args.engines:
                    run = verlite(args.workload, 1, engine)
                    runs.setdefault(which, {}).setdefault(engine, []).append(run)
                    took = run["first_step"]
                    print(f"round {number}, {which}, {engine}: {took:.1f} s", flush=True)
    took = {
        which: {name: statistics.median(each[1:]) for name, each in by_name.items()}
        for which, by_name in cpu.items()
    }
    keep("commands", {"rounds": args.rounds, "cpu_seconds": took})
    if runs:
        found = {which: summary(runs[which]) for which in checkouts}
        name = "startup" if args.workload == WORKLOAD else f"startup_{args.workload}"
        keep(name, {"rounds": args.rounds, **found.pop("now"), **found})
    print(json.dumps(took, indent=1))


if __name__ == "__main__":
    main()
