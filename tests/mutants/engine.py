"""Mutants of verlite.engine."""

from tests.mutants import Mutant

MUTANTS: list[Mutant] = []
