"""Plant every mutant, one at a time, run its tests, and write docs/mutants.md. A mutant that no
test notices is a failure.

python -m tests.mutants [--new] [--jobs N] [PACKAGE ...]     all packages by default
"""

import argparse
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutants import PACKAGES, Mutant, mutants
from tests.mutants.page import CAUGHT, read_page, write_page
from tests.mutants.plant import run_pytest
from tests.test_gpu_dry import missing


def outcome(package: str, mutant: Mutant, log: Path) -> str:
    """How the tests react: "caught", "hangs" (caught by a time limit), or "**missed**"."""
    code = run_pytest(mutant.tests, f"{package}/{mutant.bug}", log)
    text = log.read_text(errors="replace")
    if code is None or "from pytest-timeout" in text or "+ Timeout +" in text:
        return "hangs"
    # 1 means that a test failed. 2 (import error) and 5 (no tests) do not show that any test looks
    # at the bug.
    return "caught" if code == 1 else "**missed**"


def run_package(package: str, chosen: list[Mutant], folder: Path, jobs: int) -> dict[str, str]:
    """Plant each mutant of a package, once its tests have passed without one. Returns outcomes by
    bug."""
    tests = list(dict.fromkeys(test for mutant in chosen for test in mutant.tests))
    log = folder / f"{package}.log"
    if run_pytest(tests, None, log, limit_s=3600) != 0:
        sys.exit(
            f"{log.read_text(errors='replace')}\n{package}: these tests must pass without a mutant"
        )

    def plant(number: int) -> str:
        mutant = chosen[number]
        log = folder / f"{package}_{number}.log"
        began = time.monotonic()
        seen = outcome(package, mutant, log)
        print(f"{time.monotonic() - began:6.1f} s  {seen:10}  {package}: {mutant.bug}", flush=True)
        if seen not in CAUGHT:
            tail = log.read_text(errors="replace").splitlines()[-15:]
            print("\n".join(["", *mutant.tests, *tail, ""]), flush=True)
        return seen

    with ThreadPoolExecutor(jobs) as pool:
        outcomes = list(pool.map(plant, range(len(chosen))))
    return {mutant.bug: seen for mutant, seen in zip(chosen, outcomes, strict=True)}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", help=", ".join(PACKAGES))
    parser.add_argument(
        "--new", action="store_true", help="only those that docs/mutants.md does not show as caught"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="plant N mutants at a time"
    )
    options = parser.parse_args(arguments)
    if unknown := set(options.packages) - set(PACKAGES):
        parser.error(
            f"unknown package: {', '.join(sorted(unknown))}; packages: {', '.join(PACKAGES)}"
        )
    results = read_page()
    with tempfile.TemporaryDirectory() as folder:
        for package in options.packages or PACKAGES:
            known = results.setdefault(package, {})
            chosen = [
                m for m in mutants(package) if not (options.new and known.get(m.bug) in CAUGHT)
            ]
            if chosen and package == "gpu_dry" and (reason := missing()):
                print(f"gpu_dry: not run: {reason}")
            elif chosen:
                known.update(run_package(package, chosen, Path(folder), options.jobs))
                write_page(
                    results
                )  # after each package, so that --new can continue an interrupted campaign
    write_page(results)
    missed = [
        f"{package}/{m.bug}"
        for package in PACKAGES
        for m in mutants(package)
        if results[package].get(m.bug) not in CAUGHT
    ]
    print(
        "\n".join(["mutants that no test catches:", *missed])
        if missed
        else "every mutant is caught"
    )
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
