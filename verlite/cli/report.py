"""`verlite report`: a page of one or several runs."""

from pathlib import Path
from typing import Annotated

import typer

from verlite.cli.common import fail


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
    from verlite.report.page.write import write_page
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
