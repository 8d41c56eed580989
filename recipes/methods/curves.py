"""Learning curves of every recipe in conf/ on the quickstart task: recipes/methods/curves.png, or
recipes/quickstart/build/curves.png for some of them.

    python -m recipes.methods.curves [--seeds 0 1 2] [--methods dapo rloo]

Also prints the results as a table. A seed sets the data, model, warm-up and sampling. Finished runs
in recipes/quickstart/build are kept. Takes about a quarter of an hour per seed on two CPU cores.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from rich.progress import track

from recipes.demo import ROOT
from recipes.quickstart.run import BUILD, WARM_UP
from verlite.report.curve import read_curve

PICTURE = Path(__file__).with_name("curves.png")
METHODS: dict[str, list[str]] = {
    "ppo": ["critic.optim.lr=1e-3", "critic.model.enable_gradient_checkpointing=false"],
    "grpo": [],
    "gdpo": [
        "custom_reward_function.path=recipes/gdpo/reward.py",
        "algorithm.gdpo_reward_keys=[accuracy,right_digits]",
        "algorithm.gdpo_reward_weights=[1,0.5]",
    ],
    "dr_grpo": [],
    "dapo": [],
    # Several updates per step: GSPO's ratio is 1 in the first.
    "gspo": ["actor_rollout_ref.actor.ppo_mini_batch_size=16"],
    "rloo": [],
    "reinforce_plus_plus": [],
    "remax": [],
}
"""Recipe -> overrides for this task, in addition to `task_settings`."""


def task_settings() -> list[str]:
    """Return conf/quickstart.yaml as overrides, without the settings that choose a method."""
    settings = yaml.safe_load((ROOT / "conf" / "quickstart.yaml").read_text())
    del settings["defaults"]
    del settings["actor_rollout_ref"]["actor"]["use_kl_loss"]
    del settings["trainer"]["save_freq"]
    return [f"{key}={value}" for key, value in leaves(settings)]


def leaves(node: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of nested mappings."""
    for key, value in node.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def run_dir(method: str, seed: int) -> str:
    return f"{BUILD}/seed_{seed}/recipe_{method}"


def warm_up(seed: int) -> None:
    """Build the model and data of a seed and warm the model up, for all methods."""
    folder = f"{BUILD}/seed_{seed}"
    if (ROOT / folder / "warm_up" / "huggingface").is_dir():
        return
    make = ["recipes/quickstart/make.py", "--folder", folder, "--seed", str(seed)]
    subprocess.run([sys.executable, *make], check=True)
    train = [argument.replace(BUILD, folder) for argument in WARM_UP]
    subprocess.run([sys.executable, *train, f"trainer.seed={seed}"], check=True)


def measure(method: str, seed: int) -> None:
    """Train one recipe from the seed's warm-up, unless that run is finished."""
    folder = f"{BUILD}/seed_{seed}"
    if (ROOT / run_dir(method, seed) / "huggingface").is_dir():
        return
    command = [
        "-m",
        "verlite.main_ppo",
        "--config-name",
        method,
        *task_settings(),
        f"data.train_files={folder}/train.parquet",
        f"data.val_files={folder}/test.parquet",
        f"data.seed={seed}",
        f"actor_rollout_ref.model.path={folder}/warm_up/huggingface",
        f"actor_rollout_ref.rollout.seed={seed}",
        f"trainer.default_local_dir={run_dir(method, seed)}",
        *METHODS[method],
    ]
    log = ROOT / folder / f"recipe_{method}.log"
    with log.open("w") as out:
        done = subprocess.run([sys.executable, *command], stdout=out, stderr=subprocess.STDOUT)
    if done.returncode:
        sys.exit(f"{method}, seed {seed}: exit code {done.returncode}, see {log}")


def draw(methods: list[str], seeds: list[int]) -> None:
    """Draw one panel per method and one color per seed: samples thin, held-out sums thick."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 9.3), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(3, 3, sharex=True, sharey=True).flatten()
    print("| recipe | held out, greedy: before | step 4 | step 8 | step 24 |")
    print("|---|---|---|---|---|")
    for panel, method in zip(panels, methods, strict=False):
        accuracies = []
        for number, seed in enumerate(seeds):
            curve = read_curve(ROOT / run_dir(method, seed) / "metrics.jsonl")
            (held_out,) = curve.validation.values()
            color = f"C{number}"
            steps, values = zip(*held_out, strict=True)
            panel.plot(steps, values, color=color, linewidth=2, label=f"seed {seed}")
            steps, values = zip(*samples(method, seed), strict=True)
            panel.plot(steps, values, color=color, linewidth=0.9, alpha=0.7)
            accuracies.append(dict(held_out))
        cells = []
        for step in (0, 4, 8, 24):
            cells.append(", ".join(f"{100 * row[step]:.0f}" for row in accuracies) + "%")
        print(f"| {method} | {' | '.join(cells)} |")
        panel.set(title=method, ylim=(-0.03, 1.03))
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in panels[-3:]:
        panel.set_xlabel("training step")
    for panel in panels[::3]:
        panel.set_ylabel("right (thick: held out, greedy)")
    panels[0].legend(frameon=False, loc="lower right")
    picture = PICTURE if methods == list(METHODS) else ROOT / BUILD / PICTURE.name
    figure.savefig(picture)
    print(picture)


def samples(method: str, seed: int) -> list[tuple[int, float]]:
    """Return (step, fraction of its samples that were right).

    This is before KL and length penalties, and before dynamic sampling.
    """
    lines = (ROOT / run_dir(method, seed) / "metrics.jsonl").read_text().splitlines()
    points = []
    for metrics in map(json.loads, lines):
        if "reward/raw_score/mean" in metrics:
            score = metrics["reward/raw_score/mean"]
            points.append((metrics["step"], metrics.get("filter_groups/score/mean", score)))
    return points


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    chosen = parser.parse_args()
    os.chdir(ROOT)
    for seed in chosen.seeds:
        warm_up(seed)
    runs = [(method, seed) for seed in chosen.seeds for method in chosen.methods]
    for method, seed in track(runs, description="training"):
        measure(method, seed)
    draw(chosen.methods, chosen.seeds)


if __name__ == "__main__":
    main()
