"""`verlite curve`: plot a run's reward, or the loss of main_sft."""

from pathlib import Path
from typing import Annotated

import typer

from verlite.cli.common import fail


def curve(
    run_dir: Annotated[
        str, typer.Argument(help="A run directory: the folder that contains metrics.jsonl.")
    ],
    picture: Annotated[
        str, typer.Option(help="The image file to write. Its suffix selects the format.")
    ] = "RUN_DIR/reward_curve.png",
) -> None:
    """Plot a run's mean reward per step in the terminal and as an image; for main_sft the loss.

    Works during the run.
    """
    from verlite.report.curve import draw, plot, read_curve

    target = Path(picture.replace("RUN_DIR", run_dir))
    try:
        rewards = read_curve(Path(run_dir) / "metrics.jsonl")
        draw(rewards, target, run_dir)
    except (ValueError, OSError) as error:
        fail(error)
    is_loss = rewards.value == "loss"
    curves = {"of each step" if is_loss else "of each step's samples": rewards.training}
    for source, points in rewards.validation.items():
        name = "on held-out examples" if is_loss else f"on held-out prompts of {source}"
        curves[name] = points
    for name, points in curves.items():
        if points:
            first_step, first = points[0]
            last_step, last = points[-1]
            print(
                f"{rewards.value} {name}: "
                f"{first:.3f} at step {first_step}, {last:.3f} at step {last_step}"
            )
            print(f"{plot(points)}\n")
    if rewards.left_out:
        print(f"data sources without a curve, because there are many: {rewards.left_out}")
    if rewards.unreadable:
        print(f"lines of metrics.jsonl that cannot be read: {rewards.unreadable}")
    print(f"wrote {target}")
