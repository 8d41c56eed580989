"""`python -m verlite.main_ppo key=value ...`: train a policy with PPO, GRPO or a related method.

Exit codes (docs/failures.md):
    0: done.
    1: failed, and the same command would fail again; the first cause is printed.
    2: the configuration or a file is wrong; nothing was trained.
    75: stopped by SIGTERM, SIGUSR1 or trainer.max_runtime; the same command resumes.
    76: a process, a node or Ray was lost; the same command resumes and is likely to succeed.
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
    except KeyboardInterrupt:
        if stop.code is None:
            from verlite.config.show import console

            console(stderr=True).print(stop.message(), soft_wrap=True, highlight=False)
        sys.stdout.flush()
        # sys.exit would wait for the thread that imports torch.
        os._exit(stop.exit_code)


def train_command(argv: list[str], stop: Stop) -> int:
    """Run the whole command. Signals raise KeyboardInterrupt.

    torch, Ray and transformers are imported only after the configuration has passed every check.
    """
    from verlite.config.load import main_argv
    from verlite.config.show import console, notes_text

    loaded = main_argv(argv)
    if loaded.notes:
        console().print(notes_text(loaded.notes), soft_wrap=True)
    from verlite.controller.exit_codes import DONE
    from verlite.trainer.ending import report
    from verlite.trainer.errors import AlreadyComplete
    from verlite.trainer.launch import preflight

    try:
        with preflight(loaded, stop) as checks:
            return run(checks)
    except AlreadyComplete as done:
        console().print(str(done))
        return stop.decide(DONE)
    except Exception as error:
        return report(stop, None, error)


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
        return opened.stop.decide(finalize(opened))


if __name__ == "__main__":
    tolerate_full_disk()
    code = main()
    from verlite.trainer.ending import leave

    leave(code)
