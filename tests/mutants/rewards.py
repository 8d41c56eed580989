"""Mutants of verlite.rewards."""

from tests.mutants import Mutant

MUTANTS: list[Mutant] = []
