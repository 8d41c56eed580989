"""How OpenMP's threads wait, set before torch loads its OpenMP library (libgomp).

A thread that has finished its part of an operation spins until the slowest one has finished: by
default 300,000 rounds, some milliseconds. While another process has that core, the slowest thread
waits for a spinning one. Two training processes on the same cores then take many times as long as
one after the other (docs/benchmarks.md has measurements). With a short spin a waiting thread sleeps
and leaves its core to whoever has work.
"""

import os

SPINS = "100"
"""Rounds that a waiting thread spins before it sleeps: enough for barriers within an operation."""
CHOICES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
"""Variables of libgomp. If the user has set one of them, it stays."""


def spin_briefly() -> None:
    """Set GOMP_SPINCOUNT for this process and those that it starts.

    It has no effect in a process that has loaded torch already.
    """
    if not any(name in os.environ for name in CHOICES):
        os.environ["GOMP_SPINCOUNT"] = SPINS


def waiting() -> str:
    """Return the variable that decides it, with its value, for `verlite doctor`."""
    name = next(name for name in CHOICES if name in os.environ)
    by = " (verlite's choice)" if os.environ[name] == SPINS else ""
    return f"{name}={os.environ[name]}{by}"
