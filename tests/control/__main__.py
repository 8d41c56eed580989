"""Simulate runs: python -m tests.control [run | flow | watch] --schedules N --seed S

Each seed is one schedule. run: what a run wants, how long its stages take, and which signals,
failures, outages and full disks come when, and how often `verlite supervise` starts it again. flow:
the same of the prompts, engines and checkpoints of asynchronous training. watch: workers that die,
hang, are frozen or only slow. A schedule that breaks a rule is printed, reduced to what breaks it.
"""

import argparse
import sys
import time

from tests.control.simulate import DRAWS, simulate


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.control", description=__doc__)
    parser.add_argument("what", nargs="?", choices=list(DRAWS), default="run")
    parser.add_argument("--schedules", type=int, default=10_000, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="the first schedule's")
    options = parser.parse_args(arguments)
    began = time.perf_counter()
    failure = simulate(options.schedules, options.seed, options.what)
    seconds = time.perf_counter() - began
    if failure is not None:
        print(f"after {failure.schedules} schedules, {failure}")
        return 1
    rate = options.schedules / seconds
    print(
        f"{options.schedules} schedules from seed {options.seed} in {seconds:.1f} s "
        f"({rate:.0f} a second): no rule was broken"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
