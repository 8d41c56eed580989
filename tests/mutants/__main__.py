"""Plant each bug in a copy of the project, run its test, and write docs/mutants.md: a bug that no test sees is a failing result.

python -m tests.mutants [--new] [--jobs N] [ROOM ...]      ROOM: algorithms, config, data, engine, rollout, ...; none: all of them
"""

import argparse
import queue
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutants import Mutant, _page, _plant, mark, mutants, rooms


def campaign(room: str, rows: list[Mutant], copies: list[Path], tell: Callable[[Mutant, str], None]) -> None:
    """Plant the room's bugs, one in each copy at a time, once its tests pass without one."""
    nodes = dict.fromkeys(node for row in rows for node in row[4].split())
    began = time.monotonic()
    code, output = _plant.run_pytest(copies[0], list(nodes), limit_s=3600)
    print(f"{room}: {len(nodes)} tests without a bug, {time.monotonic() - began:.1f} s", flush=True)
    if code != 0:
        sys.exit(f"{output}\n{room}: its tests must pass without a bug, or they would seem to see any")
    free: queue.Queue[Path] = queue.Queue()
    for copy in copies:
        free.put(copy)

    def one(mutant: Mutant) -> tuple[str, str, float]:
        copy, started = free.get(), time.monotonic()
        try:
            return *_plant.result(copy, mutant), time.monotonic() - started
        finally:
            free.put(copy)

    with ThreadPoolExecutor(len(copies)) as pool:
        for mutant, (seen, output, seconds) in zip(rows, pool.map(one, rows), strict=True):
            tell(mutant, seen)
            print(f"{seconds:6.1f} s  {seen:6}  {room}: {mutant[0]}", flush=True)
            if seen not in _page.SEEN:
                print("\n".join(["", mutant[4], *output.splitlines()[-15:], ""]), flush=True)
    print(f"{room}: {time.monotonic() - began:.0f} s", flush=True)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("rooms", nargs="*", metavar="ROOM")
    parser.add_argument("--new", action="store_true", help="only bugs that the page does not show as seen")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="plant N bugs at a time, each in a copy of its own")
    chosen = parser.parse_args(arguments)
    if unknown := set(chosen.rooms) - set(rooms()):
        parser.error(f"no such room: {', '.join(sorted(unknown))}; there are {', '.join(rooms())}")
    results, failed = _page.read(), 0

    def tell(mutant: Mutant, seen: str) -> None:
        nonlocal failed
        failed += seen not in _page.SEEN
        results[mark(mutant)] = seen
        _page.write(results)  # at once, so that a campaign that is stopped can go on with --new

    with tempfile.TemporaryDirectory() as folder:
        copies = [_plant.copy_project(_page.TOP, Path(folder, f"copy{i}")) for i in range(chosen.jobs)]
        for room in chosen.rooms or rooms():
            rows = [row for row in mutants(room) if not (chosen.new and results.get(mark(row)) in _page.SEEN)]
            if rows:
                campaign(room, rows, copies, tell)
    _page.write(results)
    print(f"{failed} planted bugs not seen" if failed else "every planted bug was seen")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
