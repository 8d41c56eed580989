"""Run failed tests that start processes once more, alone, after `pytest` ended with a status.

    python -m tests.again STATUS

A test that starts Ray, vLLM or a whole run also depends on the machine: on its load, its disk, its
other processes. It may fail once there without a fault in the code. So `make test` gives such a
test a second try, in one new process and without another test beside it, and names it: a test that
is named here must be made independent of the machine, or removed.

Everything else keeps the status: an error other than failed tests, a failed test that starts no
process, more than three failed tests, or a test that fails again.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

MOST = 3
FAILED = Path(".pytest_cache/v/cache/lastfailed")


def depend_on_the_machine(names: list[str]) -> bool:
    """Say whether all these tests have the mark `process`."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    collected = subprocess.run(
        [*command, "-m", "process", *names], capture_output=True, text=True, check=False
    )
    return collected.returncode == 0 and "deselected" not in collected.stdout


def main(status: int) -> int:
    """Return 0 if each failed test passes now, and the status of the first try otherwise."""
    if status != pytest.ExitCode.TESTS_FAILED:
        return status
    failed = sorted(json.loads(FAILED.read_text()))
    if not 0 < len(failed) <= MOST:
        print(f"No second try: {len(failed)} tests failed, not 1 to {MOST}.")
        return status
    if not depend_on_the_machine(failed):
        print("No second try: a failed test starts no process, or its file is gone.")
        return status
    print(f"\nOnce more, alone: {', '.join(failed)}\n", flush=True)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *failed]
    if subprocess.run(command, check=False).returncode:
        return status
    print(f"\nUNSTABLE: failed beside other tests and passed alone: {', '.join(failed)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[1])))
