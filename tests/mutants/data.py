"""Mutants of verlite.data."""

from tests.mutants import Mutant

MUTANTS: list[Mutant] = []
