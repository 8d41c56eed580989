"""How every training command begins for the control, and what it writes when that says SAVE or
EXPORT: a checkpoint, within the failures that are allowed, and at the end the model.

Also what is printed about them, and a run that is already complete.
"""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from verlite.control.commands import Command, Do, Exit, Fail
from verlite.control.exit_codes import STOPPED
from verlite.control.machine import Machine
from verlite.control.policy import Policy
from verlite.files import RetryingWriter, read_text, replace_file
from verlite.trainer import checkpoints
from verlite.trainer.checkpoints import CheckpointError
from verlite.trainer.detectors import WARNINGS
from verlite.trainer.display import Display
from verlite.trainer.errors import AlreadyComplete
from verlite.trainer.run_record import CONFIG
from verlite.trainer.stop import Event, P, Stop
from verlite.trainer.time_limit import deadline, longest
from verlite.trainer.tracking import METRICS, MetricsFile, set_aside

if TYPE_CHECKING:
    from verlite.trainer.metrics import Stopwatch  # it imports torch

STEP_FILE = "training_step.txt"
"""File in huggingface/ with the step of the exported model."""


PRINTED = {
    "metrics": METRICS,
    "samples": "rollouts",
    "warnings": WARNINGS,
    "config": CONFIG,
    "logs": "logs",
}
"""Files and folders of a run directory that are named at the end, by what they have."""


class Saving(Protocol):
    """What saves and ends: a run of main_ppo, or one rank of main_sft."""

    @property
    def run_dir(self) -> Path: ...

    @property
    def step(self) -> int: ...

    @property
    def total_steps(self) -> int: ...

    @property
    def stop(self) -> Stop: ...

    @property
    def display(self) -> Display: ...

    @property
    def stopwatch(self) -> "Stopwatch": ...

    def tell(self, event: Event[P], *values: P.args, **named: P.kwargs) -> Command | None: ...


def begin(run: Saving, policy: Policy, saved: int) -> None:
    """Tell the machine what the run wants, and where it begins. saved: the newest checkpoint in the
    run directory, 0 without one."""
    policy = replace(policy, deadline=deadline(policy.max_runtime))
    run.stop.screen = run.display
    seconds = longest(policy.max_runtime, run.run_dir)
    run.stop.tell(Machine.begins, policy, run.step, saved, seconds)


def save(
    run: Saving,
    write: Callable[[], object],
    keep: int | None,
    agreed: Callable[[Command | None], Command | None] = lambda following: following,
) -> Command | None:
    """Write a checkpoint and delete old ones. Return what the control says then.

    A failed save costs a warning, and training goes on, until as many in a row have failed as the
    policy allows, for two minutes at least; the last step of a run has one try.

    Args:
        write: writes the checkpoint. Raises CheckpointError.
        keep: checkpoints that are kept. None: all, or another rank deletes them.
        agreed: returns what the first of several ranks was told, whose clocks differ.

    Raises:
        CheckpointError: too many failed saves in a row, or the run must end with this one.
    """
    failure = None
    with run.stopwatch("save_checkpoint"), run.display.phase("save_checkpoint"):
        try:
            write()
        except CheckpointError as error:
            failure = error
    if failure is None:
        following = agreed(run.tell(Machine.saved))
        checkpoints.prune(run.run_dir, run.step, keep, run.display.warn)
        return following
    following = agreed(run.tell(Machine.save_failed, str(failure)))
    if isinstance(following, Fail):
        raise CheckpointError(following.reason or str(failure)) from failure
    return following


def check_ranks(folder: Path, ranks: int, reader: str) -> None:
    """Raise OSError unless a role's folder has the files of all its ranks.

    reader: which process looks.
    """
    seen = len(list(folder.glob("rng_rank_*.json")))
    if seen != ranks:
        raise OSError(
            f"{ranks} ranks of the {folder.name} wrote to trainer.default_local_dir, but {reader} "
            f"sees the files of {seen}: it must be one folder that all nodes share"
        )


def finalize(
    run: Saving,
    save: Callable[[], Command | None],
    export: Callable[[], None],
    out: TextIO | None,
) -> int:
    """End a run that did not fail: write the export, print where the results are.

    If the run is to end before its last step, the steps that are not saved yet are saved: the
    request may have come after the step's own save.

    Args:
        save: writes a checkpoint, and returns what the control says then.
        export: writes the model.
        out: where the paths of the results are printed. None: another rank prints them.

    Returns:
        Exit code: 0 if all is done, 75 if the same command goes on.

    Raises:
        CheckpointError: the steps since the last checkpoint, or the model, cannot be written.
    """
    following = run.tell(Machine.loop_ends)
    if following is Do.SAVE:
        following = save()
    if following is Do.EXPORT:
        with run.display.phase("writing Hugging Face export"):
            export()
        following = run.tell(Machine.exported)
    assert isinstance(following, Exit)
    if following.code == STOPPED:
        run.display.info(
            f"stopped by {run.stop.machine.by} after step {run.step} of {run.total_steps}. "
            f"{run.stop.checkpoint()}"
        )
        return STOPPED
    run.display.close()
    if out is not None:
        print_paths(run.run_dir, out)
    return following.code


def exported_step(run_dir: Path) -> int | None:
    """Step of the model in huggingface/. None if nothing was exported."""
    try:
        return int(read_text(run_dir / "huggingface" / STEP_FILE))
    except (OSError, ValueError):
        return None


def install_export(run: Saving, temporary: Path) -> None:
    """Make a finished folder the run's huggingface/, which is the new export, the old one, or
    absent. The export of another run, which had the same directory before, is renamed.

    Raises:
        OSError: a folder cannot be renamed.
    """
    final = run.run_dir / "huggingface"
    old = run.run_dir / ".old_huggingface"
    replace_file(temporary / STEP_FILE, str(run.step))
    shutil.rmtree(old, ignore_errors=True)
    if not run.stop.machine.resumed_step:
        renamed = set_aside(final)
        if renamed:
            run.display.info(f"the export of an earlier run is now {renamed}")
    if final.exists():
        final.rename(old)
    temporary.rename(final)
    shutil.rmtree(old, ignore_errors=True)


def already_complete(
    run_dir: Path, state: dict[str, Any], total_steps: int, is_run: bool = True
) -> AlreadyComplete:
    """Return the exception for a checkpoint of the last step. A run writes its line of
    metrics.jsonl if a kill came before it."""
    step = state["step"]
    lines = [f"already complete: {run_dir} has a checkpoint of step {step} of {total_steps}"]
    if step > total_steps:
        lines = [
            f"already complete: {run_dir} has a checkpoint of step {step}, and this "
            f"configuration trains for {total_steps} steps"
        ]
    lines.append(
        "To train longer, raise trainer.total_training_steps or total_epochs. To start over, use "
        "trainer.resume_mode=disable or another trainer.experiment_name."
    )
    if is_run:
        writer = RetryingWriter(lines.append)
        MetricsFile(run_dir / METRICS, writer, step).write_missing(step, state["metrics"])
        writer.close()
    return AlreadyComplete("\n".join(lines))


def print_paths(run_dir: Path, out: TextIO) -> None:
    """Print the paths of PRINTED, of the newest checkpoint and of the export, as far as they
    exist."""
    saved = run_dir.glob("global_step_*")
    newest = max(saved, key=lambda path: path.stat().st_mtime, default=None)
    paths = [(label, run_dir / name) for label, name in PRINTED.items()]
    paths += [("checkpoint", newest)] if newest else []
    paths += [("Hugging Face", run_dir / "huggingface")]
    for label, path in paths:
        if not path.exists():
            continue
        inside = path.is_relative_to(Path.cwd())
        out.write(f"{label:>13}  {os.path.relpath(path) if inside else path}\n")
