"""Mutants of verlite.services."""

from tests.mutants import Mutant

MUTANTS: list[Mutant] = []
