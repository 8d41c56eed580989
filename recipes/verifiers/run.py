"""The whole verifiers recipe: the quickstart's model, tasks of a taskset, training on them.

    python recipes/verifiers/run.py [key=value ...]

Overrides go to main_ppo, for example agent.kwargs.agent.harness.id=bash. It needs the package
verifiers in an environment of its own (README.md).
"""

import os
import sys
from pathlib import Path

from recipes import demo
from recipes.quickstart.run import MAKE, WARM_UP

TASKS = ["-m", "verlite", "tasks", "--force", "--config-name", "verifiers_demo"]
HELD_OUT = ["data.train_files=recipes/verifiers/build/test.parquet"]
HELD_OUT += ["agent.kwargs.taskset.held_out=true"]
TRAIN = demo.train("verifiers_demo")


def main(argv: list[str]) -> int:
    """Run the five commands and show the curve. Return the first nonzero exit code, else 0."""
    overrides = demo.overrides_of(__doc__, argv)
    folders = [str(Path("recipes/verifiers").resolve()), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, folders))  # column_sums.py is there
    commands = {
        "Build the quickstart's model and data": MAKE,
        "Supervised warm-up on demonstrations that often forget to carry": WARM_UP,
        "Write the tasks to train on": TASKS,
        "Write the tasks held out": [*TASKS, *HELD_OUT],
        "GRPO with the reward of the taskset": [*TRAIN, *overrides],
    }
    shown = ("verifiers: column addition", "mean reward of each step's samples", "on held-out sums")
    return demo.run_all(commands, lambda: demo.show("verifiers_demo", overrides, *shown))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
