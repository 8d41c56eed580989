"""`python -m verlite.main_ppo key=value ...`: train a policy with PPO, GRPO or a related method.

Exit codes:
    0: done.
    1: failed; the first cause is printed last.
    2: the configuration or a file is wrong; nothing was trained.
    75: stopped by SIGTERM or SIGUSR1. No finished step is lost; the same command resumes.
    130: interrupted (Ctrl-C). Steps since the last checkpoint are lost.
"""

import os
import sys
from typing import TYPE_CHECKING

from verlite.controller.stop import Stop
from verlite.files import tolerate_full_disk

if TYPE_CHECKING:
    from verlite.trainer.launch import Preflight


def main(argv: list[str] | None = None) -> int:
    """Check the configuration, train, and return the exit code."""
    stop = Stop()
    try:
        with stop:  # before the other imports, which take longer than all that comes before them
            return train_command(sys.argv[1:] if argv is None else argv, stop)
    except KeyboardInterrupt as interrupt:
        from verlite.config.show import console
        from verlite.trainer.errors import failure_before, report_error

        code = stop.exit_code
        failure = failure_before(interrupt)
        if failure is not None:
            code = report_error(failure, console(stderr=True))
        else:
            console(stderr=True).print(stop.message(), soft_wrap=True, highlight=False)
        sys.stdout.flush()
        # sys.exit would wait for the thread that imports torch.
        os._exit(code)


def train_command(argv: list[str], stop: Stop) -> int:
    """Run the whole command. Signals raise KeyboardInterrupt.

    torch, Ray and transformers are imported only after the configuration has passed every check.
    """
    from verlite.config.load import main_argv
    from verlite.config.show import console, notes_text

    loaded = main_argv(argv)
    if loaded.notes:
        console().print(notes_text(loaded.notes), soft_wrap=True)
    from verlite.trainer.errors import AlreadyComplete, report_error
    from verlite.trainer.launch import preflight

    try:
        with preflight(loaded, stop) as checks:
            return run(checks)
    except AlreadyComplete as done:
        console().print(str(done))
        return 0
    except Exception as error:
        return report_error(error, console(stderr=True))


def run(checks: "Preflight") -> int:
    """Build the run, train, and return the exit code."""
    from verlite.trainer.build import finalize, open_run
    from verlite.trainer.errors import StepAborted
    from verlite.trainer.ppo import train

    with open_run(checks) as opened:
        try:
            train(opened)
        except StepAborted:
            opened.undo_step()
        return finalize(opened)


if __name__ == "__main__":
    tolerate_full_disk()
    sys.exit(main())
