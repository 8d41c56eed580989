"""Show the stacks of a run's processes as text, equal ones once."""

import re
from collections.abc import Iterable
from typing import Any

from verlite.controller.failures import indent


def render(answer: dict[str, Any]) -> str:
    """Return the text of an answer: the driver, the calls it waits for, and the workers."""
    driver = answer["driver"]
    parts = [f"driver: process {driver['pid']} on {driver['host']}", *threads(driver["stacks"])]
    for call in answer["calls"]:
        parts.append(
            f"{call['role']}.{call['method']} has run for {call['seconds']:.0f} s; not finished: "
            f"{ranks_text(call['unfinished'])}"
        )
    if not answer["workers"]:
        parts.append("no worker has started")
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for worker in answer["workers"]:
        text = "\n".join(threads(worker["stacks"]))
        state = "" if text else worker["state"]
        groups.setdefault((worker["role"], text, state), []).append(worker)
    for (role, text, state), workers in groups.items():
        ranks = ranks_text(worker["rank"] for worker in workers)
        parts.append(f"{role} {ranks}: {places(workers)}")
        parts.append(text or indent(f"no answer: the process is {state}"))
    return "\n".join(parts)


def threads(stacks: str) -> list[str]:
    """Return the text of each thread in faulthandler's dump, the main thread first."""
    dumps = re.split(r"^(?:Current thread|Thread) 0x.*$", stacks, flags=re.MULTILINE)[1:]
    return [
        f"  {'another' if number else 'main'} thread, the innermost call first\n"
        + indent(dump.strip("\n"))
        for number, dump in enumerate(reversed(dumps))
    ]


def ranks_text(ranks: Iterable[int]) -> str:
    """Return "rank 3" or "ranks 0-2, 5"."""
    numbers = sorted(ranks)
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'s' if len(numbers) > 1 else ''} {text}"


def places(workers: list[dict[str, Any]]) -> str:
    """Return "processes 11, 12 on gpu-0; process 13 on gpu-1"."""
    by_host: dict[str, list[str]] = {}
    for worker in workers:
        by_host.setdefault(worker["host"] or "an unknown node", []).append(str(worker["pid"]))
    return "; ".join(
        f"process{'es' if len(pids) > 1 else ''} {', '.join(pids)} on {host}"
        for host, pids in by_host.items()
    )
