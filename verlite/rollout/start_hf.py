"""Importing this imports what the hf engine needs, for a process that waits to be told what to build."""

import verlite.rollout.hf  # noqa: F401
