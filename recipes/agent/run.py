"""The whole agent recipe: build a model and data, warm the model up, train it by its program.

    python recipes/agent/run.py [key=value ...]

Overrides go to main_ppo, for example actor_rollout_ref.rollout.name=vllm or
trainer.total_training_steps=20.
"""

import sys

from recipes import demo

BUILD = "recipes/agent/build"
MAKE = ["recipes/agent/make.py"]
WARM_UP = demo.warm_up(BUILD, "warm_up.jsonl", steps=600)
TRAIN = demo.train("agent_demo")


def main(argv: list[str]) -> int:
    """Run the three commands and show the curve. Return the first nonzero exit code, else 0."""
    overrides = demo.overrides_of(__doc__, argv)
    commands = {
        "Build a tiny random model and products": MAKE,
        "Supervised warm-up on conversations that mostly guess": WARM_UP,
        "GRPO with the score that the program prints": [*TRAIN, *overrides],
    }
    shown = (
        "agent: products with a calculator",
        "mean score of each step's samples",
        "on held-out products",
    )
    return demo.run_all(commands, lambda: demo.show("agent_demo", overrides, *shown))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
