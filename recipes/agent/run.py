"""The whole agent recipe: build a model and data, warm the model up, train it by its program.

    python recipes/agent/run.py [key=value ...]

Overrides go to main_ppo, for example actor_rollout_ref.rollout.name=vllm or
trainer.total_training_steps=20.
"""

import sys
from pathlib import Path

from recipes import demo
from verlite.config.load import compose
from verlite.report.curve import draw, plot, read_curve
from verlite.terminal import console

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
    return demo.run_all(commands, lambda: show(overrides))


def show(overrides: list[str]) -> None:
    """Print the curve and the held-out accuracy."""
    out = console()
    run_dir = Path(compose("agent_demo", overrides, check=False).config.trainer.default_local_dir)
    curve = read_curve(run_dir / "metrics.jsonl")
    out.print(f"mean score of each step's samples\n{plot(curve.training)}\n", highlight=False)
    draw(curve, run_dir / "reward_curve.png", "agent: products with a calculator")
    held_out = next(iter(curve.validation.values()))
    line = f"right on held-out products: {held_out[0][1]:.1%} before, {held_out[-1][1]:.1%} after"
    out.print(line, style="bold", highlight=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
