"""`python -m verlite.main_ppo key=value ...`: train a policy with PPO, GRPO or a related method.

Exit codes (docs/failures.md):
    0: done.
    1: failed, and the same command would fail again; the first cause is printed.
    2: the configuration or a file is wrong; nothing was trained.
    75: stopped by SIGTERM, SIGUSR1, SIGHUP or trainer.max_runtime; the same command resumes.
    76: a process, a node or Ray was lost; the same command resumes and is likely to succeed.
    130: interrupted (Ctrl-C). Steps since the last checkpoint are lost.
"""

import sys
from typing import TYPE_CHECKING

from verlite.trainer import command

if TYPE_CHECKING:
    from verlite.config.load import Loaded


def main(argv: list[str] | None = None) -> int:
    """Check the configuration, train, and return the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    return command.main(lambda: load(arguments), command.train_rl)


def load(arguments: list[str]) -> "Loaded":
    from verlite.config.load import main_argv

    return main_argv(arguments)


if __name__ == "__main__":
    command.run_as_program(main)
