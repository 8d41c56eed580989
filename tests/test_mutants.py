"""The list of bugs to plant fits the code. `make mutants` plants them."""

from pathlib import Path

import pytest

from tests.mutants.__main__ import TOP, mutants, rooms


@pytest.mark.parametrize("room", rooms())
def test_each_bug_has_one_place_and_a_test_that_exists(room):
    for name, file, old, new, test in mutants(room):
        assert (TOP / file).read_text().count(old) == 1, f"{room}: {name}: {old!r} must stand once in {file}"
        assert old != new
        for node in test.split():
            path, _, function = node.partition("::")
            assert Path(TOP / path).exists(), f"{room}: {name}: {path}"
            if function:
                assert f"def {function.split('[')[0]}(" in (TOP / path).read_text(), f"{room}: {name}: {node}"
