"""Learning curves of the quickstart task over several seeds: recipes/quickstart/curves.png.

    python recipes/quickstart/curves.py [--seeds 0 1 2]

For each seed: its own model, data and warm-up, then GRPO, PPO with a critic, and GRPO with the sign
of the advantages flipped, which must unlearn the task. Takes about four minutes per seed on two
CPU cores.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from torch import Tensor

from recipes.demo import ROOT
from recipes.quickstart.run import BUILD, TRAIN, WARM_UP
from verlite.algorithms.advantages import AdvantageInputs, grpo
from verlite.report.curve import read_curve

PICTURE = Path(__file__).with_name("curves.png")
METHODS = {
    "GRPO": [],
    "PPO": [
        "algorithm.adv_estimator=gae",
        "critic.optim.lr=1e-3",
        "critic.model.enable_gradient_checkpointing=false",
    ],
    "GRPO, flipped sign": ["algorithm.adv_estimator=curves:flipped_sign"],
}


def flipped_sign(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Return GRPO's advantages with the opposite sign: a custom estimator, named by its path."""
    advantages, returns = grpo(inputs)
    return -advantages, -returns


def measure(seed: int) -> None:
    """Train with each method from the same warm-up. Skip what is already trained."""
    folder = f"{BUILD}/seed_{seed}"
    if not (ROOT / folder / "warm_up" / "huggingface").is_dir():
        run_python("recipes/quickstart/make.py", "--folder", folder, "--seed", str(seed))
        warm_up = [argument.replace(BUILD, folder) for argument in WARM_UP]
        run_python(*warm_up, f"trainer.seed={seed}")
    for method, overrides in METHODS.items():
        run_dir = f"{folder}/{slug(method)}"
        if (ROOT / run_dir / "huggingface").is_dir():
            continue
        run_python(
            *TRAIN,
            f"data.train_files={folder}/train.parquet",
            f"data.val_files={folder}/test.parquet",
            f"data.seed={seed}",
            f"actor_rollout_ref.model.path={folder}/warm_up/huggingface",
            f"actor_rollout_ref.rollout.seed={seed}",
            f"trainer.default_local_dir={run_dir}",
            *overrides,
        )


def run_python(*arguments: str) -> None:
    subprocess.run([sys.executable, *arguments], check=True)


def slug(method: str) -> str:
    return method.lower().replace(", ", "_").replace(" ", "_")


def draw(seeds: list[int]) -> None:
    """Draw one panel per method and one color per seed: samples thin, held-out sums thick."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.6), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(METHODS), sharey=True)
    for panel, method in zip(panels, METHODS, strict=True):
        for number, seed in enumerate(seeds):
            curve = read_curve(ROOT / BUILD / f"seed_{seed}" / slug(method) / "metrics.jsonl")
            (held_out,) = curve.validation.values()
            color = f"C{number}"
            steps, scores = zip(*curve.training, strict=True)
            panel.plot(steps, scores, color=color, linewidth=0.9, alpha=0.7)
            steps, scores = zip(*held_out, strict=True)
            panel.plot(steps, scores, color=color, linewidth=2, label=f"seed {seed}")
            accuracies = {step: f"{value:.1%}" for step, value in held_out}
            first = curve.training[0][1]
            last = curve.training[-1][1]
            print(
                f"{method}, seed {seed}: samples {first:.1%} -> {last:.1%}; held out {accuracies}"
            )
        panel.set(title=method, xlabel="training step", ylim=(-0.03, 1.03))
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("right (thick: held out, greedy)")
    panels[0].legend(frameon=False, loc="lower right")
    figure.savefig(PICTURE)
    print(PICTURE)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    chosen = parser.parse_args().seeds
    os.chdir(ROOT)
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    for each in chosen:
        measure(each)
    draw(chosen)
