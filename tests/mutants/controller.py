"""Mutants of verlite.controller."""

from tests.mutants import Mutant

MUTANTS: list[Mutant] = []
