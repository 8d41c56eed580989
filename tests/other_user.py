"""Run a short program as the user nobody, to try what another user of the machine could do."""

import os
import subprocess
import sys

import pytest

NOBODY = 65534
PRELUDE = f"""
import json, os, select, socket, stat, sys
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
"""


def as_nobody(program: str, *arguments: str) -> "subprocess.Popen[str]":
    """Start the program with pipes for its input and output. Skips the test without root."""
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", PRELUDE + program, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
