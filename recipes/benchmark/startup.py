"""Seconds from the start of the process to the end of the first step of the small workload, by
phase, for each engine.

python recipes/benchmark/startup.py [--rounds 3] [--engines hf vllm]

vLLM compiles a new model once and caches the result. Its first round has an empty cache and is
reported separately.
"""

import argparse
import json
import os
import statistics
import tempfile

from report import keep
from step import MILESTONES, verlite
from workload import BUILD, model_of

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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engines", nargs="+", choices=("hf", "vllm"), default=["hf", "vllm"])
    args = parser.parse_args()
    model_of(WORKLOAD)
    runs: dict[str, list[dict]] = {engine: [] for engine in args.engines}
    with tempfile.TemporaryDirectory(dir=BUILD) as cache:
        os.environ["VLLM_CACHE_ROOT"] = cache
        for number in range(args.rounds + 1):
            for engine in args.engines:
                runs[engine].append(verlite(WORKLOAD, 1, engine))
                print(
                    f"round {number}, {engine}: {runs[engine][-1]['first_step']:.1f} s", flush=True
                )
    found = {
        engine: {
            "seconds": statistics.median(run["first_step"] for run in done[1:]),
            "seconds_at_first": done[0]["first_step"],
            "parts": {
                part: statistics.median(parts(run)[part] for run in done[1:]) for part in PARTS
            },
        }
        for engine, done in runs.items()
    }
    keep("startup", {"rounds": args.rounds, **found})
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
