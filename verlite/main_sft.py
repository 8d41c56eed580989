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
from typing import TYPE_CHECKING

from verlite.config.commands import SFT, Command
from verlite.config.load import main_argv
from verlite.importing import import_ahead
from verlite.trainer import command
from verlite.trainer.stop import Stop

if TYPE_CHECKING:
    from verlite.config.load import LoadedConfig
    from verlite.config.sft import TuningConfig
    from verlite.sft.run import Task


def main(argv: list[str] | None = None) -> int:
    """Check the configuration, train, and return the exit code. SystemExit: --help, wrong keys."""
    return tune(argv, SFT, sft_task, str(__doc__))


def tune(argv: list[str] | None, keys: Command, task: Callable[[], "Task"], usage: str) -> int:
    """Train on given texts, and return the exit code.

    Args:
        keys: the command's keys.
        task: returns what it trains for. It imports torch.
        usage: what --help prints in front of the keys.
    """
    arguments = sys.argv[1:] if argv is None else argv

    def run_to_end(loaded: "LoadedConfig[TuningConfig]", stop: Stop) -> int:
        import_ahead("verlite.sft.train")
        from verlite.sft import train

        return train.run_to_end(loaded, task(), stop)

    return command.main(
        lambda: main_argv(arguments, command=keys, usage=usage),
        run_to_end,
        is_first=os.environ.get("RANK", "0") == "0",
    )


def sft_task() -> "Task":
    from verlite.sft.train import TASK

    return TASK


if __name__ == "__main__":
    command.run_as_program(main)
