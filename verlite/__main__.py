"""`python -m verlite`: the `verlite` command."""

from verlite.cli import program

program()
