"""`python -m verlite.main_sft data.train_files=FILE model.path=MODEL key=value ...`

Supervised fine-tuning, in one process or in several:
`torchrun --nproc_per_node 4 -m verlite.main_sft ...`.

The run directory gets config.yaml, metrics.jsonl, checkpoints, and the trained model in
huggingface/.

Exit codes:
  0    finished
  1    failed, and the same command would fail again; the first cause is printed
  2    the configuration or a file is wrong; nothing was trained
  75   stopped by SIGTERM, SIGUSR1 or trainer.max_runtime, after a checkpoint; the same command
       resumes
  130  interrupted (Ctrl-C); steps since the last checkpoint are lost
torchrun has exit codes of its own: 1 for all but 0.
"""

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from verlite.config import load
from verlite.config.command import Command
from verlite.config.problems import ConfigError
from verlite.config.sft import SFT
from verlite.config.show import notes_text
from verlite.controller.stop import Stop
from verlite.files import tolerate_full_disk
from verlite.terminal import clean_output, console

if TYPE_CHECKING:
    from verlite.sft.run import Task


def sft_task() -> "Task":
    """Return what main_sft trains for. It imports torch."""
    from verlite.sft.train import TASK

    return TASK


def main(
    argv: list[str] | None = None,
    command: Command = SFT,
    task: Callable[[], "Task"] = sft_task,
    usage: str = str(__doc__),
) -> int:
    """Validate the configuration, train, and return the exit code.

    command, task, usage: those of another command that trains on given texts.
    """
    stop = Stop()
    try:
        with stop:
            try:
                arguments = sys.argv[1:] if argv is None else argv
                config_name, config_dir, overrides, help_wanted = load.parse_argv(arguments)
                if help_wanted:
                    print(help_text(usage, command))
                    return 0
                loaded = load.compose(config_name, overrides, config_dir, command=command)
                if loaded.notes and is_first_rank():
                    console().print(notes_text(loaded.notes, command), soft_wrap=True)
                return run(loaded, task, stop)
            except ConfigError as error:
                console(stderr=True).print(error.text(), soft_wrap=True, end="")
                return 2
            except KeyboardInterrupt:  # here, so that another signal changes no exit code
                leave_interrupted(stop)
    except KeyboardInterrupt:  # while `stop` was entered
        leave_interrupted(stop)


def leave_interrupted(stop: Stop) -> NoReturn:
    """Say that a signal has ended the command, unless that was said, and end the process."""
    if stop.code is None and is_first_rank():
        console(stderr=True).print(stop.message(), soft_wrap=True, highlight=False)
    sys.stdout.flush()
    # sys.exit would wait for threads, such as one in a collective.
    os._exit(stop.exit_code)


def run(loaded: Any, task: Callable[[], "Task"], stop: Stop) -> int:
    """Train, and return the exit code. torch is imported only for a valid configuration."""
    from verlite.control.exit_codes import DONE
    from verlite.sft.run import finalize, open_run
    from verlite.sft.train import train
    from verlite.trainer.ending import report
    from verlite.trainer.errors import REFUSED, AlreadyComplete, exit_code

    try:
        with open_run(loaded, task(), stop) as opened:
            train(opened)
            return stop.decide(finalize(opened))
    except AlreadyComplete as done:
        if is_first_rank():
            console().print(str(done), markup=False, soft_wrap=True)
        return stop.decide(DONE)
    except Exception as error:
        if isinstance(error, REFUSED) and not is_first_rank():
            return stop.decide(exit_code(error))  # rank 0 says it
        return report(stop, None, error)


def is_first_rank() -> bool:
    """Whether this process is the only one, or torchrun's first."""
    return os.environ.get("RANK", "0") == "0"


def help_text(usage: str, command: Command) -> str:
    """Return the usage and a description of every key."""
    lines = [usage.strip(), ""]
    for key in command.keys.values():
        if not key.section:
            default = "" if key.default == "???" else f" (default {key.default})"
            lines.append(f"{key.name}: {key.type}{default}")
            lines.append(f"    {key.doc}")
    return "\n".join(lines)


if __name__ == "__main__":
    tolerate_full_disk()
    clean_output()
    code = main()
    from verlite.trainer.ending import leave

    leave(code)
