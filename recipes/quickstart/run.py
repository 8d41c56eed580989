"""The whole quickstart: build a model and data, warm the model up, train it, show the results.

    python recipes/quickstart/run.py [key=value ...]

Overrides go to main_ppo, for example actor_rollout_ref.rollout.name=vllm or
trainer.total_training_steps=50. It takes about three minutes on two CPU cores.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console

from verlite.config.load import compose
from verlite.report.curve import draw, plot, read_curve
from verlite.terminal import console

ROOT = Path(__file__).resolve().parents[2]
BUILD = "recipes/quickstart/build"
MAKE = ["recipes/quickstart/make.py"]
WARM_UP = [
    "-m",
    "verlite.main_sft",
    f"data.train_files={BUILD}/warm_up.parquet",
    "data.train_batch_size=64",
    f"model.path={BUILD}/model",
    "model.enable_gradient_checkpointing=false",
    "optim.lr=1e-3",
    "optim.lr_scheduler_type=constant",
    "trainer.total_training_steps=450",
    f"trainer.default_local_dir={BUILD}/warm_up",
]
# resume_mode: otherwise a second quickstart would find the first one's last checkpoint and stop.
TRAIN = ["-m", "verlite.main_ppo", "--config-name", "quickstart", "trainer.resume_mode=disable"]
SAMPLES_SHOWN = 5


def main(argv: list[str]) -> int:
    """Run the three commands and show the results. Return the first nonzero exit code, else 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override of main_ppo")
    overrides = parser.parse_args(argv).overrides
    start = time.monotonic()
    os.chdir(ROOT)
    out = console()
    commands = {
        "Build a tiny random model and arithmetic data": MAKE,
        "Supervised warm-up on demonstrations that often forget to carry": WARM_UP,
        "GRPO with a reward of 1 for right and 0 for wrong": [*TRAIN, *overrides],
    }
    for number, (title, command) in enumerate(commands.items(), start=1):
        out.rule(f"{number}. {title}", align="left")
        out.print("python " + " ".join(command), style="dim", highlight=False, soft_wrap=True)
        code = subprocess.run([sys.executable, *command]).returncode
        if code:
            return code
    out.rule("Results", align="left")
    config = compose("quickstart", overrides, check=False).config
    show(Path(config.trainer.default_local_dir), out)
    out.print(f"{time.monotonic() - start:.0f} seconds in all", highlight=False)
    return 0


def show(run_dir: Path, out: Console) -> None:
    """Print samples of the first and last step, the reward curve, and the held-out accuracy."""
    curve = read_curve(run_dir / "metrics.jsonl")
    for step in (curve.training[0][0], curve.training[-1][0]):
        texts = "   ".join(samples(run_dir / "rollouts" / f"step_{step}.jsonl"))
        out.print(f"step {step:>3} wrote  {texts}", highlight=False)
    out.print(f"\nmean reward of each step's samples\n{plot(curve.training)}\n", highlight=False)
    draw(curve, run_dir / "reward_curve.png", "quickstart: column addition")
    out.print(f"reward curve  {run_dir / 'reward_curve.png'}", highlight=False)
    held_out = next(iter(curve.validation.values()))
    before = held_out[0][1]
    after = held_out[-1][1]
    line = f"right on held-out sums: {before:.1%} before, {after:.1%} after"
    out.print(line, style="bold", highlight=False)


def samples(file: Path) -> list[str]:
    """Return a random sample of up to five problems, marked right or wrong."""
    by_prompt: dict[str, str] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        sample = json.loads(line)
        if sample["chosen"] not in ("random", "all"):
            continue
        mark = "✓" if sample["score"] else "✗"
        text = f"{sample['prompt']}{sample['response']} {mark}"
        by_prompt.setdefault(sample["prompt"], text)
    return list(by_prompt.values())[:SAMPLES_SHOWN]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
