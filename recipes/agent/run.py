"""The whole agent recipe: build a model and data, warm the model up, train it by its program.

    python recipes/agent/run.py [key=value ...]

Overrides go to main_ppo, for example actor_rollout_ref.rollout.name=vllm or
trainer.total_training_steps=20.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from verlite.config.load import compose
from verlite.report.curve import draw, plot, read_curve
from verlite.terminal import console

ROOT = Path(__file__).resolve().parents[2]
BUILD = "recipes/agent/build"
MAKE = ["recipes/agent/make.py"]
WARM_UP = [
    "-m",
    "verlite.main_sft",
    f"data.train_files={BUILD}/warm_up.jsonl",
    "data.train_batch_size=64",
    f"model.path={BUILD}/model",
    "model.enable_gradient_checkpointing=false",
    "optim.lr=1e-3",
    "optim.lr_scheduler_type=constant",
    "trainer.total_training_steps=300",
    f"trainer.default_local_dir={BUILD}/warm_up",
]
TRAIN = ["-m", "verlite.main_ppo", "--config-name", "agent_demo", "trainer.resume_mode=disable"]


def main(argv: list[str]) -> int:
    """Run the three commands and show the curve. Return the first nonzero exit code, else 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override of main_ppo")
    overrides = parser.parse_args(argv).overrides
    start = time.monotonic()
    os.chdir(ROOT)
    out = console()
    commands = {
        "Build a tiny random model and products": MAKE,
        "Supervised warm-up on conversations that mostly guess": WARM_UP,
        "GRPO with the score that the program prints": [*TRAIN, *overrides],
    }
    for number, (title, command) in enumerate(commands.items(), start=1):
        out.rule(f"{number}. {title}", align="left")
        out.print("python " + " ".join(command), style="dim", highlight=False, soft_wrap=True)
        code = subprocess.run([sys.executable, *command]).returncode
        if code:
            return code
    out.rule("Results", align="left")
    run_dir = Path(compose("agent_demo", overrides, check=False).config.trainer.default_local_dir)
    curve = read_curve(run_dir / "metrics.jsonl")
    out.print(f"mean score of each step's samples\n{plot(curve.training)}\n", highlight=False)
    draw(curve, run_dir / "reward_curve.png", "agent: products with a calculator")
    held_out = next(iter(curve.validation.values()))
    line = f"right on held-out products: {held_out[0][1]:.1%} before, {held_out[-1][1]:.1%} after"
    out.print(line, style="bold", highlight=False)
    out.print(f"{time.monotonic() - start:.0f} seconds in all", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
