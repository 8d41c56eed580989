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
from verlite.config.load import compose
from verlite.report.curve import draw, plot, read_curve
from verlite.terminal import console

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
    return demo.run_all(commands, lambda: show(overrides))


def show(overrides: list[str]) -> None:
    """Print the curve and the held-out accuracy."""
    out = console()
    config = compose("verifiers_demo", overrides, check=False).config
    run_dir = Path(config.trainer.default_local_dir)
    curve = read_curve(run_dir / "metrics.jsonl")
    out.print(f"mean reward of each step's samples\n{plot(curve.training)}\n", highlight=False)
    draw(curve, run_dir / "reward_curve.png", "verifiers: column addition")
    held_out = next(iter(curve.validation.values()))
    line = f"right on held-out sums: {held_out[0][1]:.1%} before, {held_out[-1][1]:.1%} after"
    out.print(line, style="bold", highlight=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
