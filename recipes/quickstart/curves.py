"""Does it learn, and for the right reason? Curves of the quickstart task over seeds, as recipes/quickstart/curves.png.

    python recipes/quickstart/curves.py [--seeds 0 1 2]

For each seed: a model, data and warm-up of its own, then GRPO, PPO with a critic, and GRPO with the advantages' sign
turned round, which must unlearn the task. Takes about four minutes a seed on two cores.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from run import BUILD, ROOT, TRAIN, WARM_UP

from verlite.algorithms.advantages import AdvantageInputs, grpo
from verlite.report.curve import read_curve

PICTURE = Path(__file__).with_name("curves.png")
METHODS = {
    "GRPO": [],
    "PPO": ["algorithm.adv_estimator=gae", "critic.optim.lr=1e-3"],
    "GRPO, sign turned round": ["algorithm.adv_estimator=curves:turned_round"],
}


def turned_round(inputs: AdvantageInputs):
    """GRPO that rewards what should be punished. An estimator of one's own, by its dotted path."""
    advantages, returns = grpo(inputs)
    return -advantages, -returns


def measure(seed: int) -> None:
    """Train by each method from one warm-up; what is there already is kept."""
    folder = f"{BUILD}/seed_{seed}"
    warm_up = [argument.replace(BUILD, folder) for argument in WARM_UP]
    commands = [
        ["recipes/quickstart/make.py", "--folder", folder, "--seed", str(seed)],
        [*warm_up, f"trainer.seed={seed}"],
    ]
    if not (ROOT / folder / "warm_up" / "huggingface").is_dir():
        for command in commands:
            subprocess.run([sys.executable, *command], check=True)
    for method, overrides in METHODS.items():
        run_dir = f"{folder}/{slug(method)}"
        if (ROOT / run_dir / "huggingface").is_dir():
            continue
        files = [
            f"data.train_files={folder}/train.parquet",
            f"data.val_files={folder}/test.parquet",
        ]
        model = [
            f"actor_rollout_ref.model.path={folder}/warm_up/huggingface",
            "critic.model.enable_gradient_checkpointing=false",
        ]
        seeds = [f"data.seed={seed}", f"actor_rollout_ref.rollout.seed={seed}"]
        model = model[: 2 if method == "PPO" else 1]
        subprocess.run(
            [
                sys.executable,
                *TRAIN,
                *files,
                *model,
                *seeds,
                *overrides,
                f"trainer.default_local_dir={run_dir}",
            ],
            check=True,
        )


def slug(method: str) -> str:
    return method.lower().replace(", ", "_").replace(" ", "_")


def draw(seeds: list[int]) -> None:
    """A panel for each method, a colour for each seed: samples thin, held-out sums bold."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.6), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(METHODS), sharey=True)
    for panel, method in zip(panels, METHODS, strict=True):
        for number, seed in enumerate(seeds):
            curve = read_curve(ROOT / BUILD / f"seed_{seed}" / slug(method) / "metrics.jsonl")
            (held_out,) = curve.validation.values()
            panel.plot(
                *zip(*curve.training, strict=True), color=f"C{number}", linewidth=0.9, alpha=0.7
            )
            panel.plot(
                *zip(*held_out, strict=True), color=f"C{number}", linewidth=2, label=f"seed {seed}"
            )
            marks = {step: f"{value:.1%}" for step, value in held_out}
            print(
                f"{method}, seed {seed}: held out {marks}; samples {curve.training[0][1]:.1%} -> {curve.training[-1][1]:.1%}"
            )
        panel.set(title=method, xlabel="training step", ylim=(-0.03, 1.03))
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("right (bold: held out, greedy)")
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
