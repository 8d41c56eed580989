"""`python -m verlite.cli`: the `verlite` command."""

from verlite.cli import app

app(prog_name="verlite")
