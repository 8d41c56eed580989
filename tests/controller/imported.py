"""A module that knows which process has imported it."""

import os

PID = os.getpid()
OMP_NUM_THREADS = os.environ.get("OMP_NUM_THREADS")
