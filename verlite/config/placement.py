"""`cluster.component_placement`: which role runs on which devices.

The grammar is a subset of RLinf's, with one rank per device. Names separated by commas share a
placement. A placement is `all`, or a list of device numbers and ranges (`0-3,6`). A range may be
followed by `:` and the process ranks on it (`4-7:0-3`). Devices are numbered over the whole
cluster, node after node.
"""

import re
from collections.abc import Iterable, Mapping, Sequence


def parse(
    spec: Mapping[str, object] | None, roles: Sequence[str], n_devices: int
) -> dict[str, list[int]]:
    """Return the devices of each role, in rank order.

    Args:
        spec: role names to placements. None: all roles share all devices. Roles that it does not
            name use the devices of the first role, the actor.
        roles: every role, the actor first.
        n_devices: devices of the cluster.

    Raises:
        ValueError: with every problem, one per line.
    """
    everything = list(range(n_devices))
    if spec is None:
        return {role: list(everything) for role in roles}
    placed: dict[str, list[int]] = {}
    wrong: list[str] = []
    for names, text in spec.items():
        for name in (part.strip() for part in names.split(",")):
            if name not in roles:
                wrong.append(
                    f"{name!r} is not a role of this run; its roles are {', '.join(roles)}"
                )
            elif name in placed:
                wrong.append(f"{name!r} is placed twice")
            else:
                try:
                    placed[name] = devices(str(text), n_devices)
                except ValueError as error:
                    placed[name] = []
                    wrong.append(f"{names}: {error}")
    if roles[0] not in placed:
        wrong.append(f"{roles[0]!r} is not placed")
    if wrong:
        raise ValueError("\n".join(dict.fromkeys(wrong)))
    return {role: placed.get(role, placed[roles[0]]) for role in roles}


def devices(text: str, n_devices: int) -> list[int]:
    """Return the device numbers of one placement such as "0-3,6" or "all".

    Raises:
        ValueError: the placement is invalid.
    """
    result: list[int] = []
    next_rank = 0
    for segment in (part.strip() for part in text.split(",")):
        if not segment:
            continue
        where, colon, ranks = segment.partition(":")
        if where.strip().lower() == "all":
            first, last = 0, n_devices - 1
        else:
            first, last = _range(where, segment)
        if last >= n_devices:
            raise ValueError(
                f"{segment!r} names device {last}, but there are {n_devices}: 0-{n_devices - 1}"
            )
        if result and first <= result[-1]:
            raise ValueError(f"{text!r} must name devices once and in ascending order")
        count = last - first + 1
        if colon:
            rank_first, rank_last = _range(ranks, segment)
            if rank_first != next_rank:
                raise ValueError(
                    f"{segment!r} starts at process {rank_first}, but the next process is "
                    f"{next_rank}"
                )
            if rank_last - rank_first + 1 != count:
                raise ValueError(
                    f"{segment!r} puts {rank_last - rank_first + 1} processes on {count} devices; "
                    "one process per device"
                )
        next_rank += count
        result.extend(range(first, last + 1))
    if not result:
        raise ValueError(f"{text!r} names no device")
    return result


def ranges(numbers: Iterable[int]) -> str:
    """Return device numbers in the grammar: [0, 1, 2, 5] -> "0-2,5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _range(text: str, segment: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
    if not match:
        raise ValueError(f"{segment!r} is neither a number, a range such as 0-3, nor all")
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise ValueError(f"{segment!r} runs backwards")
    return first, last
