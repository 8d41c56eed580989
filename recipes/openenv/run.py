"""The whole OpenEnv recipe: build a model and episodes, warm the model up, train it on a server.

    python recipes/openenv/run.py [key=value ...]

Overrides go to main_ppo, for example env.openenv=http://127.0.0.1:8000. It needs the package
openenv in an environment of its own (README.md).
"""

import sys

from recipes import demo

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
    shown = (
        "OpenEnv: column addition",
        "mean reward of each step's episodes",
        "in held-out episodes",
    )
    return demo.run_all(commands, lambda: demo.show("openenv_demo", overrides, *shown))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
