"""Every function against its naive reference, over all batches of docs/evidence.md."""

import pytest

from tests.algorithms.differential import BATCHES, COMPARISONS, check


@pytest.mark.slow
@pytest.mark.parametrize("section", COMPARISONS)
def test_every_function_agrees_with_its_naive_reference(section: str) -> None:
    for comparison in COMPARISONS[section].values():
        check(comparison, BATCHES)
