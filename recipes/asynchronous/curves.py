"""Learning curves of the quickstart task with samples of different ages, by steps and by seconds:
recipes/asynchronous/curves.png.

    python -m recipes.asynchronous.curves [--seeds 0 1 2]

Also prints the results as a table. A seed sets the data, model, warm-up and sampling. Finished runs
in recipes/quickstart/build are kept. Takes about four minutes per seed on two CPU cores.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.progress import track

from recipes.demo import ROOT
from recipes.methods.curves import warm_up
from recipes.quickstart.run import BUILD

PICTURE = Path(__file__).with_name("curves.png")
STEPS = 32
AGES = (0, 1, 4)
"""async_training.max_age and depth. 0 is trainer.mode=sync."""
RIGHT = 0.95
"""Share of the held-out sums, of which the table says when it was reached."""


def run_dir(age: int, seed: int) -> str:
    return f"{BUILD}/seed_{seed}/age_{age}"


def measure(age: int, seed: int) -> None:
    """Train from the seed's warm-up, unless that run is finished."""
    folder = f"{BUILD}/seed_{seed}"
    if (ROOT / run_dir(age, seed) / "huggingface").is_dir():
        return
    command = [
        *("-m", "verlite.main_ppo", "--config-name", "quickstart_async"),
        f"async_training.max_age={age}",
        f"async_training.depth={age}",
        f"data.train_files={folder}/train.parquet",
        f"data.val_files={folder}/test.parquet",
        f"data.seed={seed}",
        f"actor_rollout_ref.model.path={folder}/warm_up/huggingface",
        f"actor_rollout_ref.rollout.seed={seed}",
        f"trainer.total_training_steps={STEPS}",
        "trainer.save_freq=-1",
        f"trainer.default_local_dir={run_dir(age, seed)}",
    ]
    log = ROOT / folder / f"age_{age}.log"
    with log.open("w") as out:
        done = subprocess.run([sys.executable, *command], stdout=out, stderr=subprocess.STDOUT)
    if done.returncode:
        sys.exit(f"max_age {age}, seed {seed}: exit code {done.returncode}, see {log}")


def lines(age: int, seed: int) -> list[dict[str, Any]]:
    """Return the metrics of a run, with `seconds` since its first validation."""
    text = (ROOT / run_dir(age, seed) / "metrics.jsonl").read_text()
    found = [json.loads(line) for line in text.splitlines()]
    return [{**line, "seconds": line["time"] - found[0]["time"]} for line in found]


def held_out(metrics: list[dict[str, Any]], by: str) -> tuple[list[float], list[float]]:
    """Return where (`by`: step or seconds) and what the validations measured."""
    (key,) = {key for line in metrics for key in line if key.startswith("val-core/")}
    found = [(line[by], line[key]) for line in metrics if key in line]
    return [x for x, _ in found], [y for _, y in found]


def first(metrics: list[dict[str, Any]], by: str) -> float:
    """Return the first validation with RIGHT sums right; infinity if there is none."""
    return min((x for x, y in zip(*held_out(metrics, by), strict=True) if y >= RIGHT), default=1e9)


def mean(runs: list[list[dict[str, Any]]], key: str, skip: int = 5) -> float:
    """Return the mean of a metric over the steps of the runs but the first ones."""
    return statistics.fmean(
        line[key] for metrics in runs for line in metrics if line["step"] > skip and key in line
    )


def draw(seeds: list[int]) -> None:
    """Draw a panel by steps and one by seconds, one color per age, and print the table."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, sharey=True)
    print("| max_age | mean age | steps | seconds | s a step | trainer waits | engines idle |"
          " effective sample size | length distance |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|")
    for number, age in enumerate(AGES):
        runs = [lines(age, seed) for seed in seeds]
        for panel, by in zip(panels, ("step", "seconds"), strict=True):
            for metrics in runs:
                label = f"max_age {age}" if metrics is runs[0] else None
                panel.plot(*held_out(metrics, by), color=f"C{number}", linewidth=1.2, label=label)
        reached = [[f"{first(metrics, by):.0f}" for metrics in runs] for by in ("step", "seconds")]
        print(
            f"| {age} | {mean(runs, 'async/age/mean'):.2f} "
            f"| {' | '.join(map(', '.join, reached))} "
            f"| {mean(runs, 'timing_s/step'):.2f} "
            f"| {mean(runs, 'fully_async/trainer/idle_ratio'):.0%} "
            f"| {mean(runs, 'fully_async/rollouter/idle_ratio'):.0%} "
            f"| {mean(runs, 'training/rollout_eff_sample_size_token'):.3f} "
            f"| {mean(runs, 'async/length_distance'):.3f} |"
        )
    for panel, by in zip(panels, ("training step", "seconds"), strict=True):
        panel.set(xlabel=by, ylim=(-0.03, 1.03))
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("right (held out, greedy)")
    panels[0].legend(frameon=False, loc="lower right")
    figure.savefig(PICTURE)
    print(PICTURE)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    seeds = parser.parse_args().seeds
    os.chdir(ROOT)
    for seed in seeds:
        warm_up(seed)
    for age, seed in track([(age, seed) for seed in seeds for age in AGES], description="training"):
        measure(age, seed)
    draw(seeds)


if __name__ == "__main__":
    main()
