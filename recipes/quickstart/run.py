"""The quickstart, start to end: make a model and sums, warm the model up, train it by GRPO, show what came of it.

    python recipes/quickstart/run.py [key=value ...]

Overrides go to main_ppo: actor_rollout_ref.rollout.name=vllm, trainer.total_training_steps=50, ...
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from verlite.config.load import compose
from verlite.config.show import console
from verlite.report.curve import draw, plot, read_curve

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
# resume_mode: a second quickstart would otherwise find the first one's last checkpoint, and be done.
TRAIN = ["-m", "verlite.main_ppo", "--config-name", "quickstart", "trainer.resume_mode=disable"]
SAMPLES_SHOWN = 5


def main(overrides: list[str]) -> int:
    """Run the three commands, then show the results. Returns the exit code of the first that fails, else 0."""
    began = time.monotonic()
    os.chdir(ROOT)
    out = console()
    titles = {
        "A tiny random model, and sums to learn from": MAKE,
        "Supervised warm-up: learning to add from a pupil who often forgets to carry": WARM_UP,
        "GRPO: only right or wrong is told": [*TRAIN, *overrides],
    }
    for number, (title, command) in enumerate(titles.items(), start=1):
        out.rule(f"{number}. {title}", align="left")
        out.print("python " + " ".join(command), style="dim", highlight=False, soft_wrap=True)
        code = subprocess.run([sys.executable, *command]).returncode
        if code:
            return code
    out.rule("What came of it", align="left")
    show(Path(compose("quickstart", overrides, check=False).config.trainer.default_local_dir), out)
    out.print(f"{time.monotonic() - began:.0f} seconds in all", highlight=False)
    return 0


def show(run_dir: Path, out) -> None:
    """Samples of the first and the last step, the curve, and the accuracies before and after."""
    curve = read_curve(run_dir / "metrics.jsonl")
    for step in (curve.training[0][0], curve.training[-1][0]):
        out.print(
            f"step {step:>3} wrote  {'   '.join(samples(run_dir / 'rollouts' / f'step_{step}.jsonl'))}",
            highlight=False,
        )
    out.print(
        f"\nmean reward of the samples of each step\n{plot(curve.training)}\n", highlight=False
    )
    draw(curve, run_dir / "reward_curve.png", "quickstart: column addition")
    out.print(f"reward curve  {run_dir / 'reward_curve.png'}", highlight=False)
    (_, before), *_, (_, after) = next(iter(curve.validation.values()))
    out.print(
        f"right on held-out sums: {before:.1%} before, {after:.1%} after",
        style="bold",
        highlight=False,
    )


def samples(file: Path) -> list[str]:
    """The first sample of some problems, marked right or wrong."""
    by_prompt: dict[str, str] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        sample = json.loads(line)
        by_prompt.setdefault(
            sample["prompt"],
            f"{sample['prompt']}{sample['response']} {'✓' if sample['score'] else '✗'}",
        )
    return list(by_prompt.values())[:SAMPLES_SHOWN]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
