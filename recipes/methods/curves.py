"""Every recipe of conf/ on the quickstart's task: curves over seeds, as recipes/methods/curves.png, and a table.

    python -m recipes.methods.curves [--seeds 0 1 2] [--methods dapo rloo]

A seed is one of data, model, warm-up and sampling. What is already trained below recipes/quickstart/build is kept. Takes about
a quarter of an hour a seed on two cores.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import yaml
from rich.progress import track

from recipes.quickstart.run import BUILD, ROOT, WARM_UP
from verlite.report.curve import read_curve

PICTURE = Path(__file__).with_name("curves.png")
METHODS: dict[str, list[str]] = {
    "ppo": ["critic.optim.lr=1e-3", "critic.model.enable_gradient_checkpointing=false"],
    "grpo": [],
    "dr_grpo": [],
    "dapo": [],
    "gspo": [
        "actor_rollout_ref.actor.ppo_mini_batch_size=16"
    ],  # its ratio is 1 in a step's first update
    "rloo": [],
    "reinforce_plus_plus": [],
    "remax": [],
}
"""Recipe, and what it needs on this task beyond the recipe and `task_settings`."""


def task_settings() -> list[str]:
    """conf/quickstart.yaml without its choice of method: sizes, lengths and the learning rate of the task."""
    settings = yaml.safe_load((ROOT / "conf" / "quickstart.yaml").read_text())
    del (
        settings["defaults"],
        settings["actor_rollout_ref"]["actor"]["use_kl_loss"],
        settings["trainer"]["save_freq"],
    )
    return [f"{key}={value}" for key, value in leaves(settings)]


def leaves(node: dict, prefix: str = ""):
    for key, value in node.items():
        yield from (
            leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else [(prefix + key, value)]
        )


def run_dir(method: str, seed: int) -> str:
    return f"{BUILD}/seed_{seed}/recipe_{method}"


def warm_up(seed: int) -> None:
    """Model, data and warm-up of a seed, shared by all methods."""
    folder = f"{BUILD}/seed_{seed}"
    if not (ROOT / folder / "warm_up" / "huggingface").is_dir():
        subprocess.run(
            [sys.executable, "recipes/quickstart/make.py", "--folder", folder, "--seed", str(seed)],
            check=True,
        )
        command = [argument.replace(BUILD, folder) for argument in WARM_UP]
        subprocess.run([sys.executable, *command, f"trainer.seed={seed}"], check=True)


def measure(method: str, seed: int) -> None:
    """Train by one recipe from the seed's warm-up."""
    folder = f"{BUILD}/seed_{seed}"
    if (ROOT / run_dir(method, seed) / "huggingface").is_dir():
        return
    own = [
        f"data.train_files={folder}/train.parquet",
        f"data.val_files={folder}/test.parquet",
        f"data.seed={seed}",
        f"actor_rollout_ref.model.path={folder}/warm_up/huggingface",
        f"actor_rollout_ref.rollout.seed={seed}",
        f"trainer.default_local_dir={run_dir(method, seed)}",
    ]
    command = [
        "-m",
        "verlite.main_ppo",
        "--config-name",
        method,
        *task_settings(),
        *own,
        *METHODS[method],
    ]
    log = ROOT / folder / f"recipe_{method}.log"
    with log.open("w") as out:
        code = subprocess.run(
            [sys.executable, *command], stdout=out, stderr=subprocess.STDOUT
        ).returncode
    if code:
        sys.exit(f"{method}, seed {seed}: exit code {code}, see {log}")


def draw(methods: list[str], seeds: list[int]) -> None:
    """A panel for each method, a colour for each seed: samples thin, held-out sums bold."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 6.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 4, sharex=True, sharey=True).flatten()
    print(
        "| recipe | held out, greedy: before | step 4 | step 8 | step 24 |\n|---|---|---|---|---|"
    )
    for panel, method in zip(panels, methods, strict=False):
        rows = []
        for number, seed in enumerate(seeds):
            curve = read_curve(ROOT / run_dir(method, seed) / "metrics.jsonl")
            (held_out,) = curve.validation.values()
            panel.plot(
                *zip(*held_out, strict=True), color=f"C{number}", linewidth=2, label=f"seed {seed}"
            )
            panel.plot(
                *zip(*samples(method, seed), strict=True),
                color=f"C{number}",
                linewidth=0.9,
                alpha=0.7,
            )
            rows.append(dict(held_out))
        cells = [
            ", ".join(f"{100 * row[step]:.0f}" for row in rows) + "%" for step in (0, 4, 8, 24)
        ]
        print(f"| {method} | {' | '.join(cells)} |")
        panel.set(title=method, ylim=(-0.03, 1.03))
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in panels[4:]:
        panel.set_xlabel("training step")
    for panel in panels[::4]:
        panel.set_ylabel("right (bold: held out, greedy)")
    panels[0].legend(frameon=False, loc="lower right")
    figure.savefig(PICTURE)
    print(PICTURE)


def samples(method: str, seed: int) -> list[tuple[int, float]]:
    """(step, share of its samples that were right), before KL and length penalty, and before dynamic sampling chooses among them."""
    lines = (ROOT / run_dir(method, seed) / "metrics.jsonl").read_text().splitlines()
    points = [point for point in map(json.loads, lines) if "reward/raw_score/mean" in point]
    return [
        (point["step"], point.get("filter_groups/score/mean", point["reward/raw_score/mean"]))
        for point in points
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    chosen = parser.parse_args()
    os.chdir(ROOT)
    for one in chosen.seeds:
        warm_up(one)
    for method_, seed_ in track(
        [(m, s) for s in chosen.seeds for m in chosen.methods], description="training"
    ):
        measure(method_, seed_)
    draw(chosen.methods, chosen.seeds)
