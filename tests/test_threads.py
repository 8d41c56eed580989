"""How OpenMP's threads wait, as the OpenMP library itself prints it."""

import os
import subprocess
import sys

import pytest

from verlite import threads

LIBRARY = "OMP_DISPLAY_ENV"
"""With VERBOSE, libgomp prints its settings when it is loaded."""


@pytest.mark.skipif(sys.platform != "linux", reason="torch's libgomp is Linux's")
def test_the_library_reads_the_setting():
    """It reads the variables once, when torch is imported."""
    # vLLM sets LD_PRELOAD, with which the library is loaded before Python starts.
    left_out = (*threads.CHOICES, "LD_PRELOAD")
    environment = {k: v for k, v in os.environ.items() if k not in left_out}
    printed = subprocess.run(
        [sys.executable, "-c", "import verlite.algorithms.losses"],
        env=environment | {LIBRARY: "VERBOSE"},
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    assert f"GOMP_SPINCOUNT = '{threads.SPINS}'" in printed


@pytest.mark.parametrize("name", threads.CHOICES)
def test_the_users_choice_stays(monkeypatch, name):
    for other in threads.CHOICES:
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, "own")
    threads.spin_briefly()
    assert {k: os.environ[k] for k in threads.CHOICES if k in os.environ} == {name: "own"}
    assert threads.waiting() == f"{name}=own"
