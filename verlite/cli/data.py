"""`verlite data`: a data file for training from a table of prompts and answers."""

from pathlib import Path
from typing import Annotated

import typer

from verlite.cli.common import fail


def data(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE...",
            help=".csv, .jsonl, .json or .parquet files, also on the hub: "
            "hf://datasets/OWNER/NAME/FILE.",
        ),
    ],
    prompt: Annotated[
        str, typer.Option(help="Column of the prompt: text or chat messages {role, content}.")
    ],
    answer: Annotated[str, typer.Option(help="Column of the ground truth: text or a number.")],
    output: Annotated[str, typer.Option("-o", "--output", help="The parquet file to write.")],
    system: Annotated[
        str | None, typer.Option(help="Text of a system message in front of every prompt.")
    ] = None,
    template: Annotated[
        str | None,
        typer.Option(help="Format of the prompt, with {} for the column's text."),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            help="Name of the data source. It selects a built-in reward function, such as "
            "openai/gsm8k or math. Default: the first file's name."
        ),
    ] = None,
    hold_out: Annotated[
        int,
        typer.Option(min=0, help="Write this many random rows to NAME_test.parquet instead."),
    ] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace files that exist.")] = False,
) -> None:
    """Write a data file for training, and print its first row and statistics.

    The columns that are not named go to extra_info, where a reward function can use them.
    """
    import json

    from verlite.data.dataset import DataError, find_file
    from verlite.data.own import Columns, read_rows, statistics
    from verlite.data.own import hold_out as split
    from verlite.data.preprocess import print_written, write_parquet
    from verlite.spec import catalog

    if template is not None and "{}" not in template:
        fail(f"--template={template!r} must contain {{}} for the prompt's text.")
    target = Path(output).expanduser()
    if target.parent.exists() and not target.parent.is_dir():
        fail(f"--output={output}: {target.parent} is a file, not a folder.")
    if target.suffix != ".parquet":
        fail(f"--output={output} must end with .parquet.")
    test_file = target.with_stem(f"{target.stem}_test")
    name = source or Path(files[0]).stem
    try:
        paths = [find_file(file) for file in files]
        if {target.resolve(), test_file.resolve()} & {path.resolve() for path in paths}:
            raise DataError(f"--output={output} is one of the files that are read")
        for file in (target, test_file) if hold_out else (target,):
            if file.exists() and not force:
                raise DataError(f"{file} exists. Replace it with --force, or choose another -o")
        rows = read_rows(paths, Columns(prompt, answer, system, template, name))
        test: list[dict[str, object]] = []
        if hold_out:
            rows, test = split(rows, hold_out)
            print_written(test_file, test, write_parquet(test, test_file))
        print_written(target, rows, write_parquet(rows, target))
    except (DataError, OSError) as error:
        fail(error)
    for line in statistics([*rows, *test]):
        print(f"  {line}")
    print("the first row:")
    print(json.dumps(rows[0], indent=2, ensure_ascii=False))
    command = f"data.train_files={target}" + (f" data.val_files={test_file}" if test else "")
    if catalog.scorer_for(name) is None:
        print(
            f"No built-in reward function is for data source {name!r}: give your own with "
            "custom_reward_function.path=FILE.py, or choose one with --source."
        )
        command += " custom_reward_function.path=FILE.py"
    else:
        print(f"Rewards come from the built-in function of data source {name!r} (--source).")
    print(f"next: verlite check {command} actor_rollout_ref.model.path=MODEL ...")
