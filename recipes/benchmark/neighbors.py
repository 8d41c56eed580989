"""Steps of a small workload beside processes that keep cores busy, with libgomp's own spinning and
with verlite's setting (verlite/threads.py).

python recipes/benchmark/neighbors.py [wtiny] [--neighbors 0 1 2 4] [--steps 6] [key=value ...]

A neighbor is a loop in one thread, as another user's job. What share of the cores it takes is the
scheduler's choice: Linux may divide them by session.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence

from report import keep
from step import ENGINES, verlite
from workload import model_of

from verlite.threads import SPINS

DEFAULT_SPINS = "300000"
"""libgomp's documented value if neither GOMP_SPINCOUNT nor OMP_WAIT_POLICY is set."""


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep `count` processes in an endless loop."""
    command = [sys.executable, "-c", "while True: pass"]
    loops = [subprocess.Popen(command, start_new_session=True) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def measure(
    name: str, neighbors: Sequence[int], spins: Sequence[str], steps: int, extra: Sequence[str]
) -> list[dict[str, float]]:
    """Return a row per setting and number of neighbors. The first step of a run is not counted."""
    model_of(name)
    rows = []
    for count in neighbors:
        for spin in spins:
            os.environ["GOMP_SPINCOUNT"] = spin
            with busy(count):
                found = verlite(name, steps, ENGINES[name], extra)
            row = {
                "spins": int(spin),
                "neighbors": count,
                "seconds": statistics.median(found["steps"][1:]),
                "start": found["first_step"],
            }
            alone = next((r for r in rows if r["spins"] == int(spin)), row)
            row["slower"] = row["seconds"] / alone["seconds"]
            print(json.dumps(row), flush=True)
            rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workload", nargs="?", default="wtiny", choices=list(ENGINES))
    parser.add_argument("--neighbors", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--spins", nargs="+", default=[DEFAULT_SPINS, SPINS])
    parser.add_argument("--steps", type=int, default=6)
    args, extra = parser.parse_known_args()
    rows = measure(args.workload, args.neighbors, args.spins, args.steps, extra)
    keep(f"neighbors_{args.workload}", {"rows": rows})


if __name__ == "__main__":
    main()
