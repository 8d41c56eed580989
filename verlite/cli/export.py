"""`verlite export`: convert a checkpoint to a Hugging Face model folder."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from verlite.cli.common import fail


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
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16")] = "float32",
) -> None:
    """Convert a checkpoint to a Hugging Face model folder, reload it, and compare the log-probs.

    Needs neither Ray nor a GPU.
    """
    from verlite.report.export import export_checkpoint, find_checkpoint
    from verlite.trainer.checkpoints import CheckpointError

    try:
        found = find_checkpoint(Path(checkpoint).expanduser(), partial(typer.echo, err=True))
        difference = export_checkpoint(found, Path(target).expanduser(), dtype)
    except CheckpointError as error:
        fail(error)
    print(f"wrote {found.path} to {target} in {dtype}")
    print(f"largest log-prob difference after reloading: {difference:.1e}")
