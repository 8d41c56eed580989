"""`python -m verlite.main_dpo data.train_files=FILE model.path=MODEL key=value ...`

Direct preference optimization, in one process or in several:
`torchrun --nproc_per_node 4 -m verlite.main_dpo ...`.

Rows have a prompt, a better response (chosen) and a worse one (rejected). Run directory and exit
codes are those of main_sft.
"""

from typing import TYPE_CHECKING

from verlite.config.commands import DPO
from verlite.main_sft import tune
from verlite.trainer import command

if TYPE_CHECKING:
    from verlite.sft.run import Task


def main(argv: list[str] | None = None) -> int:
    """Check the configuration, train, and return the exit code. SystemExit: --help, wrong keys."""
    return tune(argv, DPO, dpo_task, str(__doc__))


def dpo_task() -> "Task":
    from verlite.sft.dpo import TASK

    return TASK


if __name__ == "__main__":
    command.run_as_program(main)
