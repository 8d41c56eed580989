"""The whole quickstart: build a model and data, warm the model up, train it, show the results.

    python recipes/quickstart/run.py [key=value ...]

Overrides go to main_ppo, for example actor_rollout_ref.rollout.name=vllm or
trainer.total_training_steps=50. It takes about three minutes on two CPU cores.
"""

import json
import sys
from pathlib import Path

from recipes import demo
from verlite.config.load import compose
from verlite.report.curve import draw, plot, read_curve
from verlite.terminal import console

BUILD = "recipes/quickstart/build"
MAKE = ["recipes/quickstart/make.py"]
WARM_UP = demo.warm_up(BUILD, "warm_up.parquet", steps=450)
TRAIN = demo.train("quickstart")
SAMPLES_SHOWN = 5


def main(argv: list[str]) -> int:
    """Run the three commands and show the results. Return the first nonzero exit code, else 0."""
    overrides = demo.overrides_of(__doc__, argv)
    commands = {
        "Build a tiny random model and arithmetic data": MAKE,
        "Supervised warm-up on demonstrations that often forget to carry": WARM_UP,
        "GRPO with a reward of 1 for right and 0 for wrong": [*TRAIN, *overrides],
    }
    return demo.run_all(commands, lambda: show(overrides))


def show(overrides: list[str]) -> None:
    """Print samples of the first and last step, the reward curve, and the held-out accuracy."""
    out = console()
    run_dir = Path(compose("quickstart", overrides, check=False).config.trainer.default_local_dir)
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
