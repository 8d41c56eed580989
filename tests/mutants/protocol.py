"""Mutants of verlite.protocol."""

from tests.mutants import Mutant

MUTANTS: list[Mutant] = []
