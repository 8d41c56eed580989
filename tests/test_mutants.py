"""The mutants fit the code, and docs/mutants.md shows each as caught. `make mutants` runs them."""

import importlib
from pathlib import Path

import pytest

from tests.mutants import PACKAGES, mutants, owner_and_name
from tests.mutants.page import CAUGHT, PAGE, page_text, read_page
from tests.mutants.patches import calls

pytestmark = pytest.mark.process  # imports every package, vLLM too

TOP = Path(__file__).parents[1]


def test_a_broken_method_gets_its_object():
    """Otherwise every call would raise TypeError, which any test notices."""

    class Counter:
        def add(self, number):
            return number

    Counter.add = calls(lambda original, self, number: (self, original(self, number)))(Counter.add)
    counter = Counter()
    assert counter.add(2) == (counter, 2)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_mutant_has_a_target_and_a_test_that_exist(package):
    names = [mutant.bug for mutant in mutants(package)]
    assert len(set(names)) == len(names)
    for mutant in mutants(package):
        module, _, path = mutant.target.partition(":")
        owner_and_name(importlib.import_module(module), path)
        assert "|" not in mutant.bug, f"{mutant.bug}: a bar would break the table"
        assert mutant.tests, mutant.bug
        for test in mutant.tests:
            file, _, function = test.partition("::")
            assert (TOP / file).exists(), f"{mutant.bug}: {test} does not exist"
            if function:
                text = (TOP / file).read_text(encoding="utf-8")
                assert f"def {function.split('[')[0]}(" in text, f"{mutant.bug}: {test}"


def test_the_page_shows_every_mutant_as_caught():
    results = read_page()
    missed = [
        f"{package}/{mutant.bug}"
        for package in PACKAGES
        for mutant in mutants(package)
        if results[package].get(mutant.bug) not in CAUGHT
    ]
    assert not missed, f"new or not caught: {missed}; run python -m tests.mutants --new"


def test_the_page_is_up_to_date():
    text = page_text(read_page())
    assert PAGE.read_text(encoding="utf-8") == text, "run python -m tests.mutants --new"
