"""`python -m verlite.cli`: the `verlite` command."""

from verlite.cli import program

program()
