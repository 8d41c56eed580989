"""Write docs/evidence.md: `python -m tests.evidence` measures everything again."""

import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch

from tests.algorithms.differential import (
    BATCHES,
    COMPARISONS,
    SMALL,
    Comparison,
    Largest,
    largest_differences,
    reference_of,
)
from tests.algorithms.reference import random_case
from tests.engine import matrix
from tests.engine.ranks import Ranks
from tests.models import tiny_model
from verlite.algorithms.aggregation import AGGREGATION_MODES
from verlite.engine.process_group import single_process_group

PAGE = Path(__file__).parents[1] / "docs" / "evidence.md"
HEAD = """\
# Evidence

Measured differences between what verlite computes and what it should compute. `make evidence`
measures them again and writes this page. The tests named in [proofs.md](proofs.md) assert the
tolerances given here.

All numbers are float32 on a CPU, which rounds to 6e-8.
"""
MATRIX = """\

## The gradient does not depend on how rows are arranged

The actor's whole loss (clipped PPO, entropy bonus, KL to the reference) through the training
engine: a 2-layer Qwen2, 8 rows of 1 to 9 response tokens, one with tool text inside, one that is
excluded, NaN wherever the mask is 0. Each entry is |g - g0| / |g0|, norms over all parameters. g0
is the gradient of one pass over all rows on one rank, packed. Each column changes one thing. "All
{others}" is the largest value over every combination of 6 splits, 2 orders, packed or padded, 1 or
2 ranks. "Closed form" is the largest difference of all {every} from the float64 gradient of the
formulas, with transformers' own forward pass.

The test asserts for each of them, against the closed form: below {tolerance:g}, and each parameter
within 1e-5 of its largest entry
(`tests/engine/test_update.py::test_actor_gradient_equals_closed_form_for_every_arrangement`).
"""
DIFFERENTIAL = """\

## The algorithms agree with loops over tokens

Each function and its reference, plain loops in float64 that share no code with it
([tests/algorithms/reference.py](../tests/algorithms/reference.py)), on {batches} random batches.
Padding and tool text hold NaN, and so do the rewards of some failed rows. Of the {batches} batches,

{contents}

Entries are the largest absolute / the largest relative difference of all numbers in all batches.
Relative is to the reference's number. A number smaller than {small:g} counts as {small:g}, a loss
is compared with the sum of its terms' sizes, and a metric below 1 counts as 1. The tolerance
applies to the relative difference; the tests in `tests/algorithms` assert it. A large absolute
difference belongs to a large number: log-ratios are clamped to 20, so a squared ratio can be 2e17,
and a token of probability 0 has a log-prob of -1e4.
"""
HAZARDS = {
    "have rows of different lengths": lambda c: len(set(c.mask.sum(1).tolist())) > 1,
    "have tool text between trained tokens": lambda c: any(
        0 in row[row.index(1) : len(row) - row[::-1].index(1)]
        for row in c.mask.tolist()
        if 1 in row
    ),
    "have a row without a trained token": lambda c: bool((~c.mask.bool().any(1)).any()),
    "have an invalid row": lambda c: not bool(c.valid.all()),
    "have a group of one": lambda c: 1 in Counter(c.uid).values(),
    "have a group of several with equal scores": lambda c: any(
        len(c.group(i)) > 1 and len({c.score(j) for j in c.group(i)}) == 1 for i in c.counted_rows()
    ),
    "have a sampled token of probability 0 under the policy": lambda c: bool(
        (c.log_prob == -torch.inf).any()
    ),
    "have one of probability 0 under the reference": lambda c: bool(
        (reference_of(c)[c.mask.bool()] == -torch.inf).any()
    ),
    "have a log-ratio beyond 20": lambda c: bool(((c.log_prob - c.old).abs() > 20).any()),
}


def table(head: list[str], rows: list[list[str]]) -> Iterator[str]:
    yield ""
    for row in (head, ["---"] * len(head), *rows):
        yield f"| {' | '.join(row)} |"


def short(x: float) -> str:
    return f"{x:.1e}" if x else "0"


def matrix_rows(path: str, ranks: Ranks) -> Iterator[list[str]]:
    given = matrix.columns(path)
    for mode in AGGREGATION_MODES:
        found = {
            key: gradients
            for key, (_, gradients) in matrix.arrangements(path, [mode], given, ranks)[mode].items()
        }
        base = found["1 rank", "packed", "all rows at once, in order"]
        _, exact = matrix.closed_form(path, mode, given)
        away = {key: matrix.difference(gradients, base) for key, gradients in found.items()}
        closed = max(matrix.difference(gradients, exact) for gradients in found.values())
        yield [
            mode,
            *(short(away[key]) for key in COLUMNS.values()),
            short(max(away.values())),
            short(closed),
        ]


COLUMNS: dict[str, matrix.Key] = {
    **{
        split: ("1 rank", "packed", f"{split}, in order")
        for split in matrix.SPLITS
        if split != "all rows at once"
    },
    "shuffled": ("1 rank", "packed", "all rows at once, shuffled"),
    "padded": ("1 rank", "padded", "all rows at once, in order"),
    "2 ranks": ("2 ranks", "packed", "all rows at once, in order"),
}
ARRANGEMENTS = len(matrix.SPLITS) * len(matrix.ORDERS) * len(matrix.LAYOUTS) * 2


def contents() -> str:
    cases = [random_case(seed) for seed in range(BATCHES)]
    return "\n".join(f"- {sum(map(hazard, cases))} {what}" for what, hazard in HAZARDS.items())


def section_rows(
    comparisons: dict[str, Comparison], found: dict[str, dict[str, Largest]], results: list[str]
) -> Iterator[list[str]]:
    for name, comparison in comparisons.items():
        cells = [
            f"{short(one.absolute)} / {short(one.relative)}"
            if (one := found[name].get(what))
            else ""
            for what in results
        ]
        yield [f"`{name}`", str(BATCHES), *cells, f"{comparison.tolerance:g}"]


def page() -> Iterator[str]:
    yield HEAD.rstrip("\n")
    yield MATRIX.format(
        others=ARRANGEMENTS - 1, every=ARRANGEMENTS, tolerance=matrix.TOLERANCE
    ).rstrip("\n")
    with tempfile.TemporaryDirectory() as folder, single_process_group():
        ranks = Ranks(Path(folder))
        try:
            rows = list(matrix_rows(tiny_model(Path(folder) / "qwen2"), ranks))
        finally:
            ranks.close()
    yield from table(["loss_agg_mode", *COLUMNS, f"all {ARRANGEMENTS - 1}", "closed form"], rows)
    yield DIFFERENTIAL.format(batches=BATCHES, contents=contents(), small=SMALL).rstrip("\n")
    for section, comparisons in COMPARISONS.items():
        found = {name: largest_differences(comparison) for name, comparison in comparisons.items()}
        results = list(dict.fromkeys(what for one in found.values() for what in one))
        yield f"\n### {section}"
        yield from table(
            ["function", "batches", *results, "tolerance"],
            list(section_rows(comparisons, found, results)),
        )
        for name, one in found.items():
            if any(not f.relative <= comparisons[name].tolerance for f in one.values()):
                raise SystemExit(f"{section}, {name}: {one}")


def main() -> None:
    torch.set_num_threads(1)
    PAGE.write_text("\n".join(page()) + "\n", encoding="utf-8")
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    sys.exit(main())
