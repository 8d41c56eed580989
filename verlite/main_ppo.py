"""`python -m verlite.main_ppo key=value ...`: train a policy by PPO, GRPO or a relative.

Exit codes: 0 done; 1 failed, with the first cause as the last thing printed; 2 the configuration or a file is wrong, nothing was
started; 75 stopped by SIGTERM or SIGUSR1 with a checkpoint, the same command resumes; 130 interrupted.
"""

import sys

from verlite.config.load import main_argv
from verlite.config.show import console, notes_text


def main(argv: list[str] | None = None) -> int:
    """Check the configuration, run, and return the exit code."""
    loaded = main_argv(sys.argv[1:] if argv is None else argv)
    if loaded.notes:
        console().print(notes_text(loaded.notes), soft_wrap=True)
    # torch, ray and transformers are imported only for a configuration that can run.
    from verlite.trainer.errors import explain
    from verlite.trainer.ppo import train
    from verlite.trainer.setup import AlreadyComplete, finished, open_run
    from verlite.trainer.stages import StepUnmade

    try:
        with open_run(loaded) as run:
            try:
                train(run)
            except StepUnmade:
                run.undo_step()
            return finished(run)
    except AlreadyComplete as done:
        console().print(str(done))
        return 0
    except KeyboardInterrupt:
        console(stderr=True).print("interrupted")
        return 130
    except Exception as error:
        return explain(error, console(stderr=True))


if __name__ == "__main__":
    sys.exit(main())
