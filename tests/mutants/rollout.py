"""Mutants of verlite.rollout."""

from tests.mutants import Mutant

MUTANTS: list[Mutant] = []
