"""Checkpoints: complete or absent.

Layout under the run directory (`trainer.default_local_dir`):

    global_step_N/
      actor/ critic/          shards written by the workers (torch.distributed.checkpoint)
      state.json              step, sampler, KL controller, weight version, and the settings that must not change
      manifest.json           size and SHA-256 of every file above; its presence says that the checkpoint is complete
    latest_checkpointed_iteration.txt    the newest step, replaced atomically, last

A checkpoint is written to `.tmp_global_step_N`, synced to disk and renamed. Folders without a valid manifest are told and ignored.
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

POINTER = "latest_checkpointed_iteration.txt"
MANIFEST = "manifest.json"
STATE = "state.json"


class CheckpointError(Exception):
    """A checkpoint that cannot be written or must not be loaded; the message names the file and the remedy."""


class ResumeRefused(CheckpointError):
    """The run cannot be resumed from what is on disk; nothing was started."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    step: int

    def state(self) -> dict[str, Any]:
        return json.loads((self.path / STATE).read_text(encoding="utf-8"))


def write(
    run_dir: Path, step: int, state: dict[str, Any], save_parts: Callable[[Path], None]
) -> Checkpoint:
    """Write one checkpoint atomically.

    Args:
        state: JSON-able driver state.
        save_parts: writes the workers' parts into the folder that it is given.

    Raises:
        CheckpointError: not enough free space, or writing failed; the temporary folder is gone and older checkpoints are untouched.
    """
    final, temporary = run_dir / f"global_step_{step}", run_dir / f".tmp_global_step_{step}"
    _need_space(run_dir)
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        save_parts(temporary)
        (temporary / STATE).write_text(json.dumps(state, indent=1), encoding="utf-8")
        (temporary / MANIFEST).write_text(
            json.dumps(_manifest(temporary), indent=1), encoding="utf-8"
        )
        _sync_tree(temporary)
        if final.exists():  # an incomplete or older folder of the same step
            shutil.rmtree(final)
        os.rename(temporary, final)
        _sync(run_dir)
        replace_file(run_dir / POINTER, str(step))
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        free = shutil.disk_usage(run_dir).free
        raise CheckpointError(
            f"checkpoint of step {step} was not written: {error} ({free / 2**30:.1f} GiB free in {run_dir}). "
            "Older checkpoints are untouched."
        ) from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return Checkpoint(final, step)


def _need_space(run_dir: Path) -> None:
    """Refuse early when the newest checkpoint times 1.1 would not fit."""
    sizes = [
        sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
        for path in run_dir.glob("global_step_*")
    ]
    need, free = int(1.1 * max(sizes, default=0)), shutil.disk_usage(run_dir).free
    if need > free:
        raise CheckpointError(
            f"checkpoint needs about {need / 2**30:.2f} GiB but {run_dir} has {free / 2**30:.2f} GiB free: "
            "free some space, or set trainer.max_actor_ckpt_to_keep"
        )


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _files(folder: Path) -> list[Path]:
    return sorted(f for f in folder.rglob("*") if f.is_file() and f.name != MANIFEST)


def _manifest(folder: Path) -> dict[str, dict[str, Any]]:
    files = _files(folder)
    with ThreadPoolExecutor() as pool:  # hashing releases the interpreter lock
        hashes = list(pool.map(_hash, files))
    return {
        str(f.relative_to(folder)): {"bytes": f.stat().st_size, "sha256": h}
        for f, h in zip(files, hashes, strict=True)
    }


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_tree(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        _sync(path)


def defect(folder: Path) -> str | None:
    """What is wrong with a checkpoint folder, or None when every file is there with its size and hash."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return "no manifest: it was not finished"
    except (OSError, json.JSONDecodeError) as error:
        return f"its manifest cannot be read: {error}"
    for name, entry in manifest.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != entry["bytes"]:
            return (
                f"{name} has {file.stat().st_size} bytes where the manifest says {entry['bytes']}"
            )
        if _hash(file) != entry["sha256"]:
            return f"{name} does not have the hash that the manifest says"
    return None


def step_of(folder: Path) -> int:
    """N of a folder named global_step_N.

    Raises:
        ResumeRefused: another name.
    """
    _, _, number = folder.name.rpartition("global_step_")
    if not number.isdigit():
        raise ResumeRefused(
            f"trainer.resume_from_path={folder}: must be a folder named global_step_N"
        )
    return int(number)


def newest(run_dir: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """The newest complete checkpoint of a run directory. Incomplete ones are told and skipped; the pointer is repaired."""
    steps = sorted(
        (step_of(p) for p in run_dir.glob("global_step_*") if p.name[12:].isdigit()), reverse=True
    )
    found, told_of = None, []
    for step in steps:
        folder = run_dir / f"global_step_{step}"
        if (problem := defect(folder)) is None:
            found = Checkpoint(folder, step)
            break
        told_of.append(f"ignored incomplete checkpoint {folder}: {problem}")
    for leftover in run_dir.glob(".tmp_global_step_*"):
        warn(f"ignored and removed unfinished checkpoint {leftover.name}")
        shutil.rmtree(leftover, ignore_errors=True)
    pointer = run_dir / POINTER
    if found is None:
        if steps:
            raise ResumeRefused(
                "\n  ".join([f"no checkpoint in {run_dir} is complete:", *told_of])
                + "\nRestore one of them, or start from scratch with trainer.resume_mode=disable or another trainer.experiment_name."
            )
        return None
    for line in told_of:
        warn(line)
    told = pointer.read_text(encoding="utf-8").strip() if pointer.exists() else ""
    if told != str(found.step):
        warn(
            f"{POINTER} said {told or 'nothing'!r}, but the newest complete checkpoint is step {found.step}: repaired"
        )
        replace_file(pointer, str(found.step))
    return found


def find(
    run_dir: Path, mode: str, path: str | None, warn: Callable[[str], None]
) -> Checkpoint | None:
    """The checkpoint to resume from, by `trainer.resume_mode`; None: from scratch.

    Raises:
        ResumeRefused: resume_path names a folder that is missing or damaged, or auto finds only damaged ones.
    """
    if mode == "disable":
        return None
    if mode == "auto":
        return newest(run_dir, warn)
    folder = Path(path or "")
    if not folder.is_dir():
        raise ResumeRefused(f"trainer.resume_from_path={path}: no such folder")
    step = step_of(folder)
    if problem := defect(folder):
        raise ResumeRefused(
            f"trainer.resume_from_path={path} is damaged: {problem}. "
            "Name an older global_step_N folder, or let trainer.resume_mode=auto find the newest complete one."
        )
    return Checkpoint(folder, step)


def prune(run_dir: Path, keep: int | None, warn: Callable[[str], None]) -> None:
    """Delete all but the newest `keep` checkpoints, after a save has succeeded; a failed delete is only told."""
    if keep is None:
        return
    steps = sorted(step_of(p) for p in run_dir.glob("global_step_*") if p.name[12:].isdigit())
    for step in steps[: -max(keep, 1)]:
        folder = run_dir / f"global_step_{step}"
        try:
            (folder / MANIFEST).unlink(
                missing_ok=True
            )  # first: a half-deleted folder must not look complete
            shutil.rmtree(folder)
        except OSError as error:
            warn(f"old checkpoint {folder} could not be deleted: {error}")
