"""Mutants of verlite.config."""

from tests.mutants import Mutant

MUTANTS: list[Mutant] = []
