"""The lists of bugs to plant fit the code, and docs/mutants.md shows all of them as seen. `make mutants` plants them."""

from pathlib import Path

import pytest

from tests.mutants import _page, mark, mutants, rooms
from tests.mutants._classic import CLASSIC

TOP = Path(_page.TOP)


@pytest.mark.parametrize("room", rooms())
def test_each_bug_has_one_place_and_a_test_that_exists(room):
    names = [mutant[0] for mutant in mutants(room)]
    assert len(set(names)) == len(names)
    for name, file, old, new, test in mutants(room):
        assert (TOP / file).read_text().count(old) == 1, f"{room}: {name}: {old!r} must stand once in {file}"
        assert old != new
        assert "|" not in name + file + test, f"{room}: {name}: a bar would break the page's table"
        for node in test.split():
            path, _, function = node.partition("::")
            assert (TOP / path).exists(), f"{room}: {name}: {path}"
            if function:
                assert f"def {function.split('[')[0]}(" in (TOP / path).read_text(), f"{room}: {name}: {node}"


def test_the_classic_twenty_are_planted():
    assert len(CLASSIC) == 20
    for bug, planted in CLASSIC.items():
        assert planted, bug
        for room, name in planted:
            assert name in [mutant[0] for mutant in mutants(room)], f"{bug}: no mutant of {room} is called {name!r}"


@pytest.mark.parametrize("room", rooms())
def test_the_page_shows_every_bug_as_seen(room):
    results = _page.read()
    unseen = [row[0] for row in mutants(room) if results.get(mark(row)) not in _page.SEEN]
    assert not unseen, f"new, changed, or not seen: {unseen}; run python -m tests.mutants --new {room}"


def test_the_page_shows_nothing_else():
    assert _page.PAGE.read_text() == _page.page(_page.read()), "run python -m tests.mutants --new"
