"""The search recipe: build made-up facts, serve them with a search engine, train a model to search.

    python recipes/search/run.py [key=value ...]

Overrides go to both training runs, for example actor_rollout_ref.rollout.name=vllm or
trainer.total_training_steps=24. The second training run is the same with a search engine that never
finds anything.
"""

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from recipes import demo
from verlite.report.curve import Curve, read_curve
from verlite.terminal import console
from verlite.trainer.tracking import read_lines

BUILD = "recipes/search/build"
PICTURE = "recipes/search/curves.png"
MAKE = ["recipes/search/make.py"]
WARM_UP = demo.warm_up(BUILD, "warm_up.parquet", steps=300)
TRAIN = demo.train("search_demo")
CORPORA = {"with search": "corpus.jsonl", "nothing is ever found": "nothing.jsonl"}
SEARCHES = "val-aux/verlite/facts/number_of_valid_search/mean@1"


def main(argv: list[str]) -> int:
    """Run the commands and show the results. Return the first nonzero exit code, else 0."""
    overrides = demo.overrides_of(__doc__, argv)
    start = time.monotonic()
    code = demo.run("1. Build made-up facts and a tiny random model", MAKE)
    code = code or demo.run("2. Supervised warm-up on demonstrations that mostly guess", WARM_UP)
    for number, (name, corpus) in enumerate(CORPORA.items(), start=3):
        if code:
            return code
        with search_engine(f"{BUILD}/{corpus}") as url:
            command = [*TRAIN, f"retriever.url={url}"]
            command += [f"trainer.default_local_dir={run_dir(name)}", *overrides]
            code = demo.run(
                f"{number}. GRPO, {name}: the reward is 1 for right, 0 for wrong", command
            )
    if code:
        return code
    show_results()
    console().print(f"{time.monotonic() - start:.0f} seconds in all", highlight=False)
    return 0


def show_results() -> None:
    """Draw the curves; print accuracy and searches per question before and after training."""
    out = console()
    out.rule("Results", align="left")
    curves = {name: read_curve(run_dir(name) / "metrics.jsonl") for name in CORPORA}
    draw(curves)
    for name, curve in curves.items():
        lines = read_lines(run_dir(name) / "metrics.jsonl")
        searches = [line[SEARCHES] for line in lines if SEARCHES in line]
        accuracies = [value for _, value in held_out(curve)]
        out.print(
            f"{name}: right on held-out questions "
            f"{accuracies[0]:.1%} before, {accuracies[-1]:.1%} after; "
            f"searches per question {searches[0]:.2f} before, {searches[-1]:.2f} after",
            style="bold",
            highlight=False,
        )
    out.print(f"curves  {PICTURE}", highlight=False)
    out.print(f"samples  verlite show {run_dir('with search')}", highlight=False)


def run_dir(name: str) -> Path:
    return Path(BUILD) / name.replace(" ", "_")


@contextmanager
def search_engine(corpus: str) -> Iterator[str]:
    """Serve a corpus on a free local port; yield the retriever's URL."""
    command = [sys.executable, "-m", "verlite.cli", "serve", "retriever"]
    command += ["--corpus", corpus, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        for line in process.stdout:
            found = re.search(r"http://\S+/retrieve", line)
            if found:
                print(line, end="")
                yield found[0]
                break
        else:
            raise SystemExit(f"the retriever exited with code {process.wait()}")
    finally:
        process.terminate()
        process.wait()


def held_out(curve: Curve) -> list[tuple[int, float]]:
    return next(iter(curve.validation.values()))


def draw(curves: dict[str, Curve]) -> None:
    """Draw the accuracy on held-out questions over the steps, one line per run."""
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
