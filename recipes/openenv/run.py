"""The whole OpenEnv recipe: build a model and episodes, warm the model up, train it on a server.

    python recipes/openenv/run.py [key=value ...]

Overrides go to main_ppo, for example env.openenv=http://127.0.0.1:8000. It needs the package
openenv in an environment of its own (README.md).
"""

import sys
from pathlib import Path

from recipes import demo
from verlite.config.load import compose
from verlite.report.curve import plot, read_curve
from verlite.terminal import console

BUILD = "recipes/openenv/build"
MAKE = ["recipes/openenv/make.py"]
WARM_UP = demo.warm_up(BUILD, "warm_up.parquet", steps=450)
TRAIN = demo.train("openenv_demo")


def main(argv: list[str]) -> int:
    """Run the three commands and show the curve. Return the first nonzero exit code, else 0."""
    overrides = demo.overrides_of(__doc__, argv)
    commands = {
        "Build a tiny random model and episodes": MAKE,
        "Supervised warm-up on demonstrations that often forget to carry": WARM_UP,
        "GRPO with the rewards of the server": [*TRAIN, *overrides],
    }
    return demo.run_all(commands, lambda: show(overrides))


def show(overrides: list[str]) -> None:
    """Print the curve and the held-out accuracy."""
    out = console()
    run_dir = Path(compose("openenv_demo", overrides, check=False).config.trainer.default_local_dir)
    curve = read_curve(run_dir / "metrics.jsonl")
    out.print(f"mean reward of each step's episodes\n{plot(curve.training)}\n", highlight=False)
    held_out = next(iter(curve.validation.values()))
    line = f"right in held-out episodes: {held_out[0][1]:.1%} before, {held_out[-1][1]:.1%} after"
    out.print(line, style="bold", highlight=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
