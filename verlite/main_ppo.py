"""`python -m verlite.main_ppo key=value ...`: train a policy with PPO, GRPO or a related method.

Exit codes:
    0: done.
    1: failed; the first cause is printed last.
    2: the configuration or a file is wrong; nothing was trained.
    75: stopped by SIGTERM or SIGUSR1 with a checkpoint; the same command resumes.
    130: interrupted (Ctrl-C).
"""

import sys
from typing import TYPE_CHECKING

from verlite.config.load import main_argv
from verlite.config.show import console, notes_text

if TYPE_CHECKING:
    from verlite.trainer.launch import Preflight


def main(argv: list[str] | None = None) -> int:
    """Check the configuration, train, and return the exit code.

    torch, Ray and transformers are imported only after the configuration has passed every check.
    """
    loaded = main_argv(sys.argv[1:] if argv is None else argv)
    if loaded.notes:
        console().print(notes_text(loaded.notes), soft_wrap=True)
    from verlite.trainer.errors import AlreadyComplete, report_error
    from verlite.trainer.launch import interrupted_text, preflight

    try:
        with preflight(loaded) as checks:
            return run(checks)
    except AlreadyComplete as done:
        console().print(str(done))
        return 0
    except KeyboardInterrupt:
        console(stderr=True).print(interrupted_text(loaded.config), soft_wrap=True)
        return 130
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
    sys.exit(main())
