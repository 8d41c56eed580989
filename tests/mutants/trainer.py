"""Mutants of verlite.trainer."""

from tests.mutants import Mutant

MUTANTS: list[Mutant] = []
