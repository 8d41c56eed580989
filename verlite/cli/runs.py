"""Commands about runs: ls; and about one: curve, show, report, export, stacks, bugreport."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from verlite.cli.common import fail, failing

if TYPE_CHECKING:
    from rich.text import Text

    from verlite.report.runs import RunRow


def stacks(
    run_dir: Annotated[
        str, typer.Argument(help="The run directory (trainer.default_local_dir) of a running job.")
    ],
    wait: Annotated[
        float, typer.Option(metavar="S", min=1, help="How many seconds to wait for the driver.")
    ] = 60.0,
) -> None:
    """Print the Python stacks of the driver and of all workers of a running job.

    Works on any machine that sees the run directory, and while workers hang in native code. Exit
    code 1: a worker did not answer.
    """
    from verlite.controller.stacks import render
    from verlite.report.stacks import StacksError, ask

    with failing(StacksError):
        answer = ask(Path(run_dir), wait)
    typer.echo(render(answer))
    if not all(worker["stacks"] for worker in answer["workers"]):
        raise typer.Exit(1)


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
    with failing(ValueError, OSError):
        rewards = read_curve(Path(run_dir) / "metrics.jsonl")
        draw(rewards, target, run_dir)
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


def report(
    run_dirs: Annotated[
        list[str], typer.Argument(metavar="RUN_DIR...", help="Run directories to show or compare.")
    ],
    output: Annotated[
        str | None,
        typer.Option(
            "-o", "--output", help="The HTML file to write. Default: report.html in the first run."
        ),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Write the page again until the run has ended.")
    ] = False,
    interval: Annotated[
        int, typer.Option(min=1, help="Seconds between two writes with --watch.")
    ] = 20,
) -> None:
    """Write a page with curves, step times, samples and settings of one or several runs.

    The page is one HTML file that needs no network. Open it in a browser.
    """
    import time

    from verlite.files import size_text
    from verlite.report.page import write_page
    from verlite.report.stacks import is_locked

    folders = [Path(name) for name in run_dirs]
    target = Path(output) if output else folders[0] / "report.html"
    if target.is_dir():
        fail(f"--output={target} is a folder. Give the name of the HTML file to write.")
    waits_for = folders if watch else []
    while True:
        running = any(is_locked(folder / ".lock") for folder in waits_for)
        try:
            runs = write_page(folders, target, interval if running else None)
        except (ValueError, OSError) as error:
            if not running:
                fail(error)
            print(f"not written: {error}", flush=True)  # such as a file that is being replaced
        else:
            for run in runs:
                last = f"step {run.steps[-1]}" if run.steps else "no step yet"
                print(f"{run.name}: {last}, {len(run.samples)} samples")
                for note in run.notes:
                    print(f"  {note}")
            print(f"wrote {target} ({size_text(target.stat().st_size)})", flush=True)
        if not running:
            if watch:
                print("no run goes on in these directories, so this is the last page")
            return
        try:
            time.sleep(interval)
        except KeyboardInterrupt:
            return


def export(
    checkpoint: Annotated[
        str,
        typer.Argument(
            help="A global_step_N folder, or a run directory for its newest complete checkpoint."
        ),
    ],
    target: Annotated[
        str, typer.Argument(help="The Hugging Face folder to write. It must be empty or new.")
    ],
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="Folder or hub name of the model that the training began with."
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="TOKENIZER", help="The same of its tokenizer. Default: the model's."),
    ] = None,
    adapter: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="The LoRA adapter that the training began with, if any."),
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with MODEL.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16")] = "float32",
) -> None:
    """Convert a checkpoint to a Hugging Face model folder, reload it, and compare the log-probs.

    Needs neither Ray nor a GPU. A checkpoint may come from someone else, so it chooses neither the
    model nor whether code of the model is run.
    """
    from verlite.report.export import Base, export_checkpoint, find_checkpoint
    from verlite.trainer.checkpoints import CheckpointError

    with failing(CheckpointError):
        found = find_checkpoint(Path(checkpoint).expanduser(), partial(typer.echo, err=True))
        base = Base(model, tokenizer, adapter, trust_remote_code) if model else None
        difference = export_checkpoint(found, Path(target).expanduser(), base, dtype)
    print(f"wrote {found.path} to {target} in {dtype}")
    print(f"largest log-prob difference after reloading: {difference:.1e}")


def bugreport(
    run_dir: Annotated[str, typer.Argument(help="The run directory.")],
    output: Annotated[
        str, typer.Option("-o", "--output", help="The zip file to write.")
    ] = "bugreport.zip",
) -> None:
    """Write a zip file with what a maintainer asks for about a run.

    In it: the output of `verlite doctor`, settings, the last metrics, the error, the ends of logs.

    Secrets are masked. Samples (rollouts/) and weights are left out. Look into it before you send
    it: logs may quote single samples.
    """
    from verlite.files import size_text
    from verlite.report.doctor import write

    target = Path(output)
    if target.is_dir():
        fail(f"--output={target} is a folder. Give the name of the zip file to write.")
    with failing(ValueError, OSError):
        written = write(Path(run_dir), target)
    for name, size in written:
        print(f"{size_text(size):>10}  {name}")
    print(f"wrote {target} ({size_text(target.stat().st_size)})")


STYLES = {
    "running": "cyan",
    "done": "green",
    "validated": "green",
    "stopped": "yellow",
    "failed": "red",
    "killed": "red",
}
NOTE_CHARS = 100
"""Of a note in the table; --json has all of it."""


def ls(
    folder: Annotated[str, typer.Argument(help="The folder.")] = ".",
    depth: Annotated[int, typer.Option(min=0, help="Levels of folders to look into.")] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """List the runs below a folder, newest first: state, step, score, last checkpoint, age.

    The state is running, done, validated (ended well with steps left, as with trainer.val_only),
    stopped, failed, killed (the process recorded no end) or unknown.
    The score is that of the last validation, else that of the last step's samples; for main_sft the
    loss.
    """
    import dataclasses
    import json

    from rich.table import Table
    from rich.text import Text

    from verlite.report.runs import find_runs
    from verlite.terminal import console

    with failing(ValueError):
        found = find_runs(Path(folder), depth)
    for line in found.skipped:
        typer.echo(f"note: {line}", err=True)
    if as_json:
        print(json.dumps([dataclasses.asdict(row) for row in found.rows], indent=1))
        return
    if not found.rows:
        fail(f"{folder} has no run directories.", code=0)
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("run", overflow="fold")
    for name in ("state", "step", "score", "checkpoint", "age"):
        table.add_column(name, no_wrap=True, justify="left" if name == "state" else "right")
    table.add_column("note", overflow="fold")
    for row in found.rows:
        is_inside = Path(row.path) != Path(folder)
        name = str(Path(row.path).relative_to(folder)) if is_inside else folder
        table.add_row(Text(name), *_cells(row))
    console().print(table)


def _cells(row: "RunRow") -> "list[Text]":
    import time

    from rich.text import Text

    from verlite.files import one_line

    planned = "" if row.total_steps is None else f"/{row.total_steps}"
    score = "" if row.score is None else f"{row.score:.4g} {_label(row.score_name)}"
    return [
        Text(row.state, style=STYLES.get(row.state, "")),
        Text("-" if row.step is None else f"{row.step}{planned}"),
        Text(score or "-"),
        Text("-" if row.checkpoint is None else str(row.checkpoint)),
        Text(age(time.time() - row.written)),
        Text(one_line(row.note, NOTE_CHARS), style="dim"),
    ]


def _label(metric: str) -> str:
    """Return what a score is: of held-out prompts or of training, a score or a loss."""
    held_out = "held out" if metric.startswith("val") else ""
    return f"{held_out} loss".strip() if metric.endswith("loss") else held_out


def age(seconds: float) -> str:
    """Return a duration in one unit: 40 s, 5 min, 3 h, 12 d."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def show(
    run_dir: Annotated[
        str, typer.Argument(help="A run directory: the folder that contains rollouts/.")
    ],
    step: Annotated[int | None, typer.Option(help="The step. Default: the newest.")] = None,
    worst: Annotated[
        int | None,
        typer.Option(metavar="K", min=1, help="Only the K samples with the lowest scores."),
    ] = None,
    count: Annotated[int, typer.Option(metavar="K", min=1, help="At most K samples.")] = 4,
    validation: Annotated[
        bool, typer.Option("--val", help="Samples of the validation after the step.")
    ] = False,
    whole: Annotated[bool, typer.Option("--whole", help="Do not shorten long prompts.")] = False,
) -> None:
    """Print a step's samples: turns, tool calls and results, rewards, and the trained text.

    With trainer.mode=async also what became of the prompts that the newest checkpoint has drawn.
    """
    from verlite.files import one_line
    from verlite.report.samples import drawn_prompts, legend, lowest_scores, read_samples, render
    from verlite.terminal import console

    with failing(ValueError):
        path, samples, unreadable = read_samples(Path(run_dir), step, validation)
    shown = lowest_scores(samples, worst) if worst else samples[:count]
    out = console()
    out.print(f"{path}: {len(shown)} of {len(samples)} samples", legend(), highlight=False)
    if unreadable:
        out.print(f"lines that cannot be read: {unreadable}", style="yellow", highlight=False)
    try:
        if line := drawn_prompts(Path(run_dir)):
            out.print(line, highlight=False)
    except ValueError as error:
        out.print(str(error), style="yellow", highlight=False)
    for number, sample in enumerate(shown, start=1):
        try:
            rendered = render(sample, whole)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            cause = one_line(f"{type(error).__name__}: {error}")
            out.print(f"sample {number} is malformed: {cause}", style="yellow")
            continue
        out.print()
        out.print(rendered)
