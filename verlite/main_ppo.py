"""`python -m verlite.main_ppo key=value ...`: train a policy with PPO, GRPO or a related method.

Exit codes (docs/failures.md):
    0: done.
    1: failed, and the same command would fail again; the first cause is printed.
    2: the configuration or a file is wrong; nothing was trained.
    75: stopped by SIGTERM, SIGUSR1, SIGHUP or trainer.max_runtime; the same command resumes.
    76: a process, a node or Ray was lost; the same command resumes and is likely to succeed.
    130: interrupted (Ctrl-C). Steps since the last checkpoint are lost.
"""

import os
import sys
from typing import NoReturn

from verlite.controller.stop import Stop
from verlite.files import tolerate_full_disk
from verlite.terminal import clean_output


def main(argv: list[str] | None = None) -> int:
    """Check the configuration, train, and return the exit code."""
    stop = Stop()
    try:
        with stop:  # before the other imports, which take longer than all that comes before them
            try:
                return train_command(sys.argv[1:] if argv is None else argv, stop)
            except KeyboardInterrupt:  # here, so that another signal changes no exit code
                leave_interrupted(stop)
    except KeyboardInterrupt:  # while `stop` was entered
        leave_interrupted(stop)


def leave_interrupted(stop: Stop) -> NoReturn:
    """Say that a signal has ended the command, unless that was said, and end the process."""
    if stop.code is None:
        from verlite.terminal import console

        console(stderr=True).print(stop.message(), soft_wrap=True, highlight=False)
    sys.stdout.flush()
    # sys.exit would wait for the thread that imports torch.
    os._exit(stop.exit_code)


def train_command(argv: list[str], stop: Stop) -> int:
    """Run the whole command. Signals raise KeyboardInterrupt."""
    from verlite.config.load import main_argv

    loaded = main_argv(argv)
    from verlite.api.run import run_to_end
    from verlite.trainer.ending import report

    try:
        return run_to_end(loaded, stop)
    except Exception as error:
        return report(stop, None, error)


if __name__ == "__main__":
    tolerate_full_disk()
    clean_output()
    code = main()
    from verlite.trainer.ending import leave

    leave(code)
