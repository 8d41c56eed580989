"""The search recipe, start to end: a world of facts, a search engine over it, a model that learns to search and to copy what it finds.

    python recipes/search/run.py [key=value ...]

Overrides go to both trainings: actor_rollout_ref.rollout.name=vllm, trainer.total_training_steps=24, ... The second training is the
same with a search engine that never finds anything.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from verlite.config.show import console
from verlite.report.curve import Curve, read_curve
from verlite.trainer.tracking import read_lines

ROOT = Path(__file__).resolve().parents[2]
BUILD = "recipes/search/build"
PICTURE = "recipes/search/curves.png"
MAKE = ["recipes/search/make.py"]
WARM_UP = [
    "-m",
    "verlite.main_sft",
    f"data.train_files={BUILD}/warm_up.parquet",
    "data.train_batch_size=64",
    f"model.path={BUILD}/model",
    "model.enable_gradient_checkpointing=false",
    "optim.lr=1e-3",
    "optim.lr_scheduler_type=constant",
    "trainer.total_training_steps=300",
    f"trainer.default_local_dir={BUILD}/warm_up",
]
TRAIN = ["-m", "verlite.main_ppo", "--config-name", "search_world", "trainer.resume_mode=disable"]
CORPORA = {"with search": "corpus.jsonl", "nothing is ever found": "nothing.jsonl"}
SEARCHES = "val-aux/verlite/facts/number_of_valid_search/mean@1"


def main(overrides: list[str]) -> int:
    """Run the commands, then show the results. Returns the exit code of the first that fails, else 0."""
    began = time.monotonic()
    os.chdir(ROOT)
    out = console()

    def run(title: str, command: list[str]) -> int:
        out.rule(title, align="left")
        out.print("python " + " ".join(command), style="dim", highlight=False, soft_wrap=True)
        return subprocess.run([sys.executable, *command]).returncode

    if code := run("1. A world of facts, and a tiny random model", MAKE):
        return code
    if code := run(
        "2. Supervised warm-up: how a search looks, shown by a pupil who mostly guesses", WARM_UP
    ):
        return code
    for number, (name, corpus) in enumerate(CORPORA.items(), start=3):
        with search_engine(f"{BUILD}/{corpus}") as url:
            train = [
                *TRAIN,
                f"retriever.url={url}",
                f"trainer.default_local_dir={run_dir(name)}",
                *overrides,
            ]
            if code := run(f"{number}. GRPO, {name}: only right or wrong is told", train):
                return code
    out.rule("What came of it", align="left")
    draw({name: read_curve(run_dir(name) / "metrics.jsonl") for name in CORPORA})
    for name in CORPORA:
        lines = [line for line in read_lines(run_dir(name) / "metrics.jsonl") if SEARCHES in line]
        (_, before), *_, (_, after) = held_out(read_curve(run_dir(name) / "metrics.jsonl"))
        searches = f"searches per question {lines[0][SEARCHES]:.2f} before, {lines[-1][SEARCHES]:.2f} after"
        out.print(
            f"{name}: right on held-out questions {before:.1%} before, {after:.1%} after; {searches}",
            style="bold",
            highlight=False,
        )
    out.print(f"curves  {PICTURE}\nsamples  verlite show {run_dir('with search')}", highlight=False)
    out.print(f"{time.monotonic() - began:.0f} seconds in all", highlight=False)
    return 0


def run_dir(name: str) -> Path:
    return Path(BUILD) / name.replace(" ", "_")


@contextmanager
def search_engine(corpus: str) -> Iterator[str]:
    """A retriever over a corpus, on a free port of this machine; its address."""
    command = [
        sys.executable,
        "-m",
        "verlite.cli",
        "serve",
        "retriever",
        "--corpus",
        corpus,
        "--port",
        "0",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        for line in process.stdout:
            if found := re.search(r"http://\S+/retrieve", line):
                print(line, end="")
                yield found[0]
                break
        else:
            raise SystemExit(f"the retriever ended with code {process.wait()}")
    finally:
        process.terminate()
        process.wait()


def held_out(curve: Curve) -> list[tuple[int, float]]:
    return next(iter(curve.validation.values()))


def draw(curves: dict[str, Curve]) -> None:
    """Accuracy on held-out questions over the steps, a line each."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for name, curve in curves.items():
        steps, values = zip(*held_out(curve), strict=True)
        axes.plot(steps, values, marker="o", markersize=3, label=name)
    axes.set(
        xlabel="step", ylabel="right on held-out questions", ylim=(0, 1), title="learning to search"
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=130)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
