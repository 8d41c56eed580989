"""Mutants of verlite.envs."""

from tests.mutants import Mutant

MUTANTS: list[Mutant] = []
