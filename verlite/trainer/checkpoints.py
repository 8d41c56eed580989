"""Checkpoints on disk. Each one is either complete or ignored.

Layout under the run directory (`trainer.default_local_dir`):

    global_step_N/
      actor/ critic/    shards written by the workers (torch.distributed.checkpoint)
      groups/           finished samples that are not trained yet (trainer.mode=async)
      state.json        step, sampler, KL controller, weight version, settings that must not change
      manifest.json     size and SHA-256 of every file above
    latest_checkpointed_iteration.txt    the newest step, replaced atomically at the end

A checkpoint is written to `.tmp_global_step_N`, synced to disk and renamed. The manifest is written
last, so its presence means that the checkpoint is complete. Folders without a valid manifest are
ignored with a warning.
"""

import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verlite.controller import supervisor_file
from verlite.files import free_text, one_line, read_json, read_text, replace_file, size_text

PREFIX = "global_step_"
STEP = re.compile(PREFIX + "([1-9][0-9]{0,14})")
POINTER = "latest_checkpointed_iteration.txt"
MANIFEST = "manifest.json"
STATE = "state.json"
STATE_TYPES = {
    "step": int,
    "version": int,
    "sampler": dict,
    "kl_controller": dict,
    "metrics": dict,
    "critical": dict,
    "model": dict,
}
"""Entries of state.json."""


class CheckpointError(Exception):
    """A checkpoint cannot be written or must not be loaded. The message has the file and remedy."""


class ResumeRefused(CheckpointError):
    """The run cannot resume from what is on disk. Nothing was started."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    step: int

    def state(self) -> dict[str, Any]:
        """Read the driver's state.

        Raises:
            CheckpointError: it was damaged since the checkpoint was found.
        """
        try:
            return read_state(self.path)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.path / STATE} cannot be read: {error}") from error

    def files(self, role: str) -> list[str]:
        """Names of a role's files in the manifest, relative to the role's folder. Only these are
        read.

        Raises:
            CheckpointError: the manifest was damaged since the checkpoint was found.
        """
        try:
            names = list(read_manifest(self.path))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.path / MANIFEST} cannot be read: {error}") from error
        return [name.removeprefix(f"{role}/") for name in names if name.startswith(f"{role}/")]


def write(
    run_dir: Path, step: int, state: dict[str, Any], save_parts: Callable[[Path], None]
) -> Checkpoint:
    """Write one checkpoint atomically.

    Args:
        state: the driver's state, as JSON values.
        save_parts: writes the workers' parts into the folder that it is given.

    Raises:
        CheckpointError: too little free space, or a write failed. The temporary folder is deleted
            and older checkpoints are unchanged.
    """
    final = run_dir / f"{PREFIX}{step}"
    temporary = run_dir / f".tmp_{PREFIX}{step}"
    needed = check_space(run_dir, step)
    try:
        remove(temporary)
        temporary.mkdir(parents=True)
        save_parts(temporary)
        replace_file(temporary / STATE, json.dumps(state, indent=1))
        replace_file(temporary / MANIFEST, json.dumps(make_manifest(temporary), indent=1))
        sync_tree(temporary)
        remove(final)  # an incomplete or older folder of the same step
        os.rename(temporary, final)
        sync(run_dir)
    except OSError as error:
        needs = f"more than {size_text(folder_bytes(temporary))}"
        if needed:
            needs = f"about {size_text(needed)}"
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(failed_text(run_dir, step, needs, str(error))) from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    # Resuming does not need the pointer, and repairs it with a warning.
    with suppress(OSError):
        replace_file(run_dir / POINTER, str(step))
    return Checkpoint(final, step)


def check_space(run_dir: Path, step: int) -> int:
    """Return 1.1 times the size of the largest checkpoint so far, in bytes; 0 for the first.

    Raises:
        CheckpointError: it does not fit on the disk.
    """
    needed = int(1.1 * max(map(folder_bytes, run_dir.glob(f"{PREFIX}*")), default=0))
    try:
        free = shutil.disk_usage(run_dir).free
    except OSError:
        return needed  # writing reports what is wrong
    if needed > free:
        needs = f"about {size_text(needed)}"
        raise CheckpointError(failed_text(run_dir, step, needs, "too little space is free"))
    return needed


def failed_text(run_dir: Path, step: int, needs: str, why: str) -> str:
    """Return the message about a checkpoint that was not written."""
    text = (
        f"checkpoint of step {step} was not written: {one_line(why)}. It needs {needs}; "
        f"{run_dir} has {free_text(run_dir)} free. Free some space, or set "
        "trainer.max_actor_ckpt_to_keep (main_sft: trainer.max_ckpt_to_keep)."
    )
    return f"{text} Older checkpoints are unchanged." if steps_on_disk(run_dir) else text


def folder_bytes(folder: Path) -> int:
    """Return the size of a folder's files, leaving out those that cannot be read."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(path, name)).st_size
    return total


def remove(path: Path) -> None:
    """Delete a file, link or folder, if it exists. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def make_manifest(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of every file in a checkpoint folder, by relative path."""
    files = sorted(f for f in folder.rglob("*") if f.is_file() and f.name != MANIFEST)
    with ThreadPoolExecutor() as pool:  # hashing releases the interpreter lock
        hashes = list(pool.map(sha256, files))
    return {
        str(file.relative_to(folder)): {"bytes": file.stat().st_size, "sha256": digest}
        for file, digest in zip(files, hashes, strict=True)
    }


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Flush a file or a folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        sync(path)


def defect(folder: Path) -> str | None:
    """What is wrong with a checkpoint folder, in one line. None if it is complete.

    Complete: its manifest can be read, every file in it has its size and hash, and the state is
    that of the step in the folder's name. Files that are not in the manifest do not count.
    """
    try:
        step = step_of(folder)
        check_files(folder, read_manifest(folder))
        saved_step = read_state(folder)["step"]
    except (OSError, ValueError) as error:
        return one_line(error)
    if saved_step != step:
        return f"{STATE} is of step {saved_step}"
    return None


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return size and SHA-256 of every file of a checkpoint.

    Raises:
        OSError, ValueError: it cannot be read, or is not a manifest.
    """
    try:
        manifest = read_json(folder / MANIFEST)
    except FileNotFoundError as error:
        raise ValueError("no manifest: writing it did not finish") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"its manifest cannot be read: {error}") from error
    if not isinstance(manifest, dict) or STATE not in manifest:
        raise ValueError(f"its manifest is damaged: it does not list {STATE}")
    return manifest


def check_files(folder: Path, manifest: dict[str, Any]) -> None:
    """Raise ValueError or OSError unless every file of the manifest has its size and hash."""
    # Only names that are found here are opened, whatever the manifest says.
    present = {
        str(Path(path, name).relative_to(folder)): Path(path, name)
        for path, _, names in os.walk(folder)
        for name in names
    }
    for name, entry in manifest.items():
        file = present.get(name)
        if file is None or not file.is_file():
            raise ValueError(f"{name} is missing, or not a file")
        size = file.stat().st_size
        wanted = entry.get("bytes") if isinstance(entry, dict) else None
        if size != wanted:
            raise ValueError(f"{name} has {size} bytes where the manifest says {wanted!r:.40}")
        if sha256(file) != entry.get("sha256"):
            raise ValueError(f"{name} does not have the hash in the manifest")


def read_state(folder: Path) -> dict[str, Any]:
    """Return the driver's state in a checkpoint folder.

    Raises:
        OSError, ValueError: it cannot be read, or has entries of another type.
    """
    state = read_json(folder / STATE)
    if not isinstance(state, dict):
        raise ValueError(f"{STATE} is not a JSON object")
    wrong = [name for name, kind in STATE_TYPES.items() if type(state.get(name)) is not kind]
    if wrong:
        raise ValueError(f"{STATE} has no {wrong[0]}, or one of another type")
    numbers = [state["kl_controller"].get("value"), *state["metrics"].values()]
    if not all(type(number) in (int, float) for number in numbers):
        raise ValueError(f"{STATE} has metrics or a kl_controller that are not numbers")
    return state


def step_of(folder: Path) -> int:
    """N of a folder named global_step_N.

    Raises:
        ValueError: the folder has another name.
    """
    match = STEP.fullmatch(folder.name)
    if match is None:
        raise ValueError(f"its name is not {PREFIX}N")
    return int(match[1])


def steps_on_disk(run_dir: Path) -> list[int]:
    """Steps of all checkpoint folders, complete or not, in ascending order."""
    names = (STEP.fullmatch(path.name) for path in run_dir.glob(f"{PREFIX}*"))
    return sorted(int(match[1]) for match in names if match)


def last_saved(run_dir: Path, since: float = 0.0) -> int | None:
    """The newest step whose folder has a manifest, without looking at its files.

    since: leaves out what was saved before, in seconds since the epoch.
    """
    steps = reversed(steps_on_disk(run_dir))
    return next((n for n in steps if _is_saved_since(run_dir / f"{PREFIX}{n}", since)), None)


def complete(run_dir: Path, since: float = 0.0) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest complete checkpoint, and a line about each folder that was passed over.

    since: leaves out what was saved before, in seconds since the epoch.
    """
    ignored = [
        f"ignored checkpoint {path}: its name is not {PREFIX}N"
        for path in run_dir.glob(f"{PREFIX}*")
        if not STEP.fullmatch(path.name)
    ]
    for step in reversed(steps_on_disk(run_dir)):
        folder = run_dir / f"{PREFIX}{step}"
        if since and not _is_saved_since(folder, since):
            continue
        problem = defect(folder)
        if problem is None:
            return Checkpoint(folder, step), ignored
        ignored.append(f"ignored incomplete checkpoint {folder}: {problem}")
    return None, ignored


def _is_saved_since(folder: Path, since: float) -> bool:
    """Whether a folder has a manifest that was written after this time, in seconds since the
    epoch."""
    try:
        status = (folder / MANIFEST).stat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_mtime >= since


def newest(
    run_dir: Path, warn: Callable[[str], None], clean: bool = True, since: float = 0.0
) -> Checkpoint | None:
    """Find the newest complete checkpoint of a run directory.

    Others are skipped with a warning. With `clean`, unfinished temporary folders are deleted and
    the pointer file is repaired; otherwise the disk is only read.

    Args:
        since: pass over checkpoints that were saved before, in seconds since the epoch.

    Raises:
        ResumeRefused: there are checkpoints, but none is complete.
    """
    found, ignored = complete(run_dir, since)
    if found is None and not since and steps_on_disk(run_dir):
        lines = [f"no checkpoint in {run_dir} is complete:", *ignored]
        raise ResumeRefused(
            "\n  ".join(lines) + "\nRestore one of them, or start from the beginning with "
            "trainer.resume_mode=disable or another trainer.experiment_name."
        )
    for line in ignored:
        warn(line)
    if not clean:
        return found
    for leftover in run_dir.glob(f".tmp_{PREFIX}*"):
        warn(f"ignored and removed unfinished checkpoint {leftover.name}")
        with suppress(OSError):
            remove(leftover)
    if found is not None:
        repair_pointer(run_dir / POINTER, found.step, warn)
    return found


def repair_pointer(pointer: Path, step: int, warn: Callable[[str], None]) -> None:
    """Make the pointer file name this step, with a warning if it did not."""
    try:
        text = read_text(pointer).strip() if os.path.lexists(pointer) else ""
    except (OSError, ValueError):
        text = "something unreadable"
    if text == str(step):
        return
    found = f"{POINTER} contained {one_line(text, 40) or 'nothing'!r}"
    try:
        replace_file(pointer, str(step))
    except OSError as error:
        warn(f"{found} and cannot be repaired: {error}. Resuming does not need it")
    else:
        warn(f"{found}, but the newest complete checkpoint is step {step}: repaired")


def find(
    run_dir: Path, mode: str, path: str | None, warn: Callable[[str], None], clean: bool = True
) -> Checkpoint | None:
    """Find the checkpoint to resume from.

    With `disable`, a command that `verlite supervise` has started again resumes from what it has
    saved itself.

    Args:
        mode: trainer.resume_mode: disable, auto or resume_path.
        path: trainer.resume_from_path.
        clean: as in `newest`.

    Returns:
        None to start from the beginning.

    Raises:
        ResumeRefused: path is missing or damaged, or auto finds only damaged ones.
    """
    if mode == "disable":
        since = supervisor_file.restarted_since()
        found = None if since is None else newest(run_dir, warn, clean, since)
        if found is not None:
            warn(
                "trainer.resume_mode=disable counts for the first start: verlite supervise has "
                f"started this command again, which resumes from its own checkpoint {found.path}"
            )
        return found
    if mode == "auto":
        return newest(run_dir, warn, clean)
    folder = Path(path or "")
    if not os.path.isdir(folder):
        problem = "is not a directory" if os.path.exists(folder) else "does not exist"
        raise ResumeRefused(f"trainer.resume_from_path={path} {problem}")
    damage = defect(folder)
    if damage:
        raise ResumeRefused(
            f"trainer.resume_from_path={path} is damaged: {damage}. "
            f"Name an older {PREFIX}N folder, "
            "or let trainer.resume_mode=auto find the newest complete one."
        )
    return Checkpoint(folder, step_of(folder))


def prune(run_dir: Path, step: int, keep: int | None, warn: Callable[[str], None]) -> None:
    """Delete all but the newest `keep` checkpoints up to `step`, after that step was saved.

    At least one is kept. Folders of later steps were passed over when the run resumed. A failed
    delete is a warning.
    """
    if keep is None:
        return
    older = [saved for saved in steps_on_disk(run_dir) if saved <= step]
    for saved in older[: -max(keep, 1)]:
        folder = run_dir / f"{PREFIX}{saved}"
        try:
            # The manifest goes first, so that a half-deleted folder does not look complete.
            (folder / MANIFEST).unlink(missing_ok=True)
            remove(folder)
        except OSError as error:
            warn(f"old checkpoint {folder} could not be deleted: {error}")
