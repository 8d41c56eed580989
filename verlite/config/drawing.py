"""The placement of a run as a picture: nodes as rows, devices as columns, roles as letters."""

from collections.abc import Mapping, Sequence

from verlite.config.placement import mode, ranges

LETTERS = {"actor": "A", "rollout": "R", "inference": "I", "ref": "F", "critic": "C"}
MODES = {
    "collocated": "collocated: every role on all devices",
    "disaggregated": "disaggregated: {phases} on devices of their own",
    "hybrid": "hybrid: some roles share devices",
}
SHOWN_COLUMNS = 16
"""Nodes with more devices are shown as ranges of devices."""


def draw(
    placement: Mapping[str, Sequence[int]],
    nodes: int,
    per_node: int,
    groups: Mapping[str, Sequence[int]] | None = None,
) -> str:
    """Return the lines of the picture: the mode, a row per run of equal nodes, and the letters.

    Roles on the same devices have one letter, that of the first of them.

    Args:
        placement: devices of each role.
        nodes: nodes of the run.
        per_node: devices of each node.
        groups: node ranks of each node group, by label.
    """
    together: dict[tuple[int, ...], list[str]] = {}
    for role in (role for role in LETTERS if role in placement):
        together.setdefault(tuple(sorted(placement[role])), []).append(role)
    letter_of = {LETTERS[roles[0]]: set(devices) for devices, roles in together.items()}
    rows: list[tuple[list[int], list[str], str]] = []
    for node in range(nodes):
        first = node * per_node
        cells = [
            "".join(letter for letter, devices in letter_of.items() if device in devices) or "-"
            for device in range(first, first + per_node)
        ]
        labels = [label for label, ranks in (groups or {}).items() if node in ranks]
        group = f" ({', '.join(labels)})" if labels else ""
        if rows and rows[-1][1:] == (cells, group):
            rows[-1][0].append(node)
        else:
            rows.append(([node], cells, group))
    names = [ranges(numbers) + group for numbers, _, group in rows]
    bodies = [cells for _, cells, _ in rows]
    if per_node <= SHOWN_COLUMNS:
        lines = _columns(["node", *names], [[str(d) for d in range(per_node)], *bodies])
    else:
        lines = _columns(["node", *names], [["devices"], *([_spans(cells)] for cells in bodies)])
    legend = "   ".join(f"{LETTERS[roles[0]]} {', '.join(roles)}" for roles in together.values())
    return "\n".join([_mode_words(placement), *lines, legend])


def _mode_words(placement: Mapping[str, Sequence[int]]) -> str:
    phases = [role for role in ("actor", "rollout", "inference") if role in placement]
    words = f"{', '.join(phases[:-1])} and {phases[-1]}"
    return MODES[mode(placement)].format(phases=words)


def _columns(names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return aligned lines."""
    side = max(map(len, names))
    width = max(len(cell) for row in rows for cell in row) if len(rows[0]) > 1 else 0
    return [
        f"{name.ljust(side)}   {' '.join(cell.ljust(width) for cell in row)}".rstrip()
        for name, row in zip(names, rows, strict=True)
    ]


def _spans(cells: Sequence[str]) -> str:
    """Return the ranges of devices with the same roles: "R 0-19, I 20-23"."""
    spans: list[tuple[str, list[int]]] = []
    for device, cell in enumerate(cells):
        if spans and spans[-1][0] == cell:
            spans[-1][1].append(device)
        else:
            spans.append((cell, [device]))
    return ", ".join(f"{cell} {ranges(devices)}" for cell, devices in spans)
