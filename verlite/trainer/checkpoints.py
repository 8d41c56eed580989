"""Checkpoints on disk. Each one is either complete or ignored.

Layout under the run directory (`trainer.default_local_dir`):

    global_step_N/
      actor/ critic/    shards written by the workers (torch.distributed.checkpoint)
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
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verlite.trainer.tracking import replace_file

PREFIX = "global_step_"
POINTER = "latest_checkpointed_iteration.txt"
MANIFEST = "manifest.json"
STATE = "state.json"
GIB = 2**30


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
        """Read the driver's state."""
        state: dict[str, Any] = json.loads((self.path / STATE).read_text(encoding="utf-8"))
        return state


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
    check_space(run_dir)
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        save_parts(temporary)
        write_json(temporary / STATE, state)
        write_json(temporary / MANIFEST, make_manifest(temporary))
        sync_tree(temporary)
        if final.exists():  # an incomplete or older folder of the same step
            shutil.rmtree(final)
        os.rename(temporary, final)
        sync(run_dir)
        replace_file(run_dir / POINTER, str(step))
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        free = shutil.disk_usage(run_dir).free / GIB
        message = f"checkpoint of step {step} was not written: {error} "
        message += f"({free:.1f} GiB free in {run_dir})."
        if steps_on_disk(run_dir):
            message += " Older checkpoints are unchanged."
        raise CheckpointError(message) from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return Checkpoint(final, step)


def check_space(run_dir: Path) -> None:
    """Raise CheckpointError if 1.1 times the largest checkpoint so far does not fit on the disk."""
    sizes = [folder_bytes(path) for path in run_dir.glob(f"{PREFIX}*")]
    needed = int(1.1 * max(sizes, default=0))
    free = shutil.disk_usage(run_dir).free
    if needed > free:
        raise CheckpointError(
            f"checkpoint needs about {needed / GIB:.2f} GiB but {run_dir} has {free / GIB:.2f} GiB "
            "free. Free some space, or set trainer.max_actor_ckpt_to_keep."
        )


def folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


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
    """What is wrong with a checkpoint folder. None if all files have their size and hash."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return "no manifest: writing it did not finish"
    except (OSError, json.JSONDecodeError) as error:
        return f"its manifest cannot be read: {error}"
    for name, entry in manifest.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        size = file.stat().st_size
        if size != entry["bytes"]:
            return f"{name} has {size} bytes where the manifest says {entry['bytes']}"
        if sha256(file) != entry["sha256"]:
            return f"{name} does not have the hash in the manifest"
    return None


def step_of(folder: Path) -> int:
    """N of a folder named global_step_N.

    Raises:
        ResumeRefused: the folder has another name.
    """
    _, _, number = folder.name.rpartition(PREFIX)
    if not number.isdigit():
        raise ResumeRefused(
            f"trainer.resume_from_path={folder} is not a folder named {PREFIX}N. "
            "Give the folder of one checkpoint."
        )
    return int(number)


def steps_on_disk(run_dir: Path) -> list[int]:
    """Steps of all checkpoint folders, complete or not, in ascending order."""
    names = [path.name.removeprefix(PREFIX) for path in run_dir.glob(f"{PREFIX}*")]
    return sorted(int(name) for name in names if name.isdigit())


def newest(run_dir: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """Find the newest complete checkpoint of a run directory.

    Incomplete ones are skipped with a warning, unfinished temporary folders are deleted, and the
    pointer file is repaired.

    Raises:
        ResumeRefused: there are checkpoints, but none is complete.
    """
    steps = steps_on_disk(run_dir)
    found = None
    ignored: list[str] = []
    for step in reversed(steps):
        folder = run_dir / f"{PREFIX}{step}"
        problem = defect(folder)
        if problem is None:
            found = Checkpoint(folder, step)
            break
        ignored.append(f"ignored incomplete checkpoint {folder}: {problem}")
    for leftover in run_dir.glob(f".tmp_{PREFIX}*"):
        warn(f"ignored and removed unfinished checkpoint {leftover.name}")
        shutil.rmtree(leftover, ignore_errors=True)
    if found is None and not steps:
        return None
    if found is None:
        lines = [f"no checkpoint in {run_dir} is complete:", *ignored]
        raise ResumeRefused(
            "\n  ".join(lines) + "\nRestore one of them, or start from the beginning with "
            "trainer.resume_mode=disable or another trainer.experiment_name."
        )
    for line in ignored:
        warn(line)
    repair_pointer(run_dir / POINTER, found.step, warn)
    return found


def repair_pointer(pointer: Path, step: int, warn: Callable[[str], None]) -> None:
    """Make the pointer file name this step, with a warning if it did not."""
    text = pointer.read_text(encoding="utf-8").strip() if pointer.exists() else ""
    if text == str(step):
        return
    warn(
        f"{POINTER} contained {text or 'nothing'!r}, but the newest complete checkpoint is "
        f"step {step}: repaired"
    )
    replace_file(pointer, str(step))


def find(
    run_dir: Path, mode: str, path: str | None, warn: Callable[[str], None]
) -> Checkpoint | None:
    """Find the checkpoint to resume from.

    Args:
        mode: trainer.resume_mode: disable, auto or resume_path.
        path: trainer.resume_from_path.

    Returns:
        None to start from the beginning.

    Raises:
        ResumeRefused: path is missing or damaged, or auto finds only damaged ones.
    """
    if mode == "disable":
        return None
    if mode == "auto":
        return newest(run_dir, warn)
    folder = Path(path or "")
    if not folder.is_dir():
        problem = "is not a directory" if folder.exists() else "does not exist"
        raise ResumeRefused(f"trainer.resume_from_path={path} {problem}")
    step = step_of(folder)
    damage = defect(folder)
    if damage:
        raise ResumeRefused(
            f"trainer.resume_from_path={path} is damaged: {damage}. "
            f"Name an older {PREFIX}N folder, "
            "or let trainer.resume_mode=auto find the newest complete one."
        )
    return Checkpoint(folder, step)


def prune(run_dir: Path, keep: int | None, warn: Callable[[str], None]) -> None:
    """Delete all but the newest `keep` checkpoints, after a successful save.

    At least one is kept. A failed delete is a warning.
    """
    if keep is None:
        return
    for step in steps_on_disk(run_dir)[: -max(keep, 1)]:
        folder = run_dir / f"{PREFIX}{step}"
        try:
            # The manifest goes first, so that a half-deleted folder does not look complete.
            (folder / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(folder)
        except OSError as error:
            warn(f"old checkpoint {folder} could not be deleted: {error}")
