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

    try:
        found = find_checkpoint(Path(checkpoint).expanduser(), partial(typer.echo, err=True))
        base = Base(model, tokenizer, adapter, trust_remote_code) if model else None
        difference = export_checkpoint(found, Path(target).expanduser(), base, dtype)
    except CheckpointError as error:
        fail(error)
    print(f"wrote {found.path} to {target} in {dtype}")
    print(f"largest log-prob difference after reloading: {difference:.1e}")
