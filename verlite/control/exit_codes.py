"""Exit codes of a training command, for whoever starts it again. docs/failures.md explains them."""

DONE = 0
FAILED = 1
"""Failed, and the same command would fail again."""
REFUSED = 2
"""The command line or a file is wrong; nothing was trained."""
STOPPED = 75
"""Stopped by a signal or by trainer.max_runtime; the same command resumes."""
LOST = 76
"""A process, a node or Ray was lost; the same command resumes and is likely to succeed."""
INTERRUPTED = 130
"""Ctrl-C."""
