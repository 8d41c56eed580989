"""`python -m verlite.main_ppo key=value ...`: train a policy by PPO, GRPO or a relative.

Exit codes: 0 done; 1 failed, with the first cause as the last thing printed; 2 the configuration or a file is wrong, nothing was
trained; 75 stopped by SIGTERM or SIGUSR1 with a checkpoint, the same command resumes; 130 interrupted.
"""

import sys
from typing import TYPE_CHECKING

from verlite.config.load import Loaded, main_argv
from verlite.config.show import console, notes_text

if TYPE_CHECKING:
    from verlite.trainer.begin import Begun


def main(argv: list[str] | None = None) -> int:
    """Check the configuration, run, and return the exit code."""
    loaded = main_argv(sys.argv[1:] if argv is None else argv)
    if loaded.notes:
        console().print(notes_text(loaded.notes), soft_wrap=True)
    # torch, ray and transformers are imported only for a configuration that can run.
    from verlite.trainer.begin import begin
    from verlite.trainer.errors import AlreadyComplete

    try:
        with begin(loaded.config) as begun:
            return run(loaded, begun)
    except AlreadyComplete as done:
        console().print(str(done))
        return 0
    except KeyboardInterrupt:
        console(stderr=True).print("interrupted")
        return 130
    except Exception as error:
        from verlite.trainer.errors import report_error

        return report_error(error, console(stderr=True))


def run(loaded: Loaded, begun: "Begun") -> int:
    """Train, and return the exit code."""
    from verlite.trainer.errors import StepAborted
    from verlite.trainer.ppo import train
    from verlite.trainer.setup import finished, open_run

    with open_run(loaded, begun) as opened:
        try:
            train(opened)
        except StepAborted:
            opened.undo_step()
        return finished(opened)


if __name__ == "__main__":
    sys.exit(main())
