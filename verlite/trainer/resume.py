"""Which checkpoint a run resumes from, and what it must match."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from verlite.config.critical import CONTENT_OF
from verlite.trainer import checkpoints
from verlite.trainer.errors import RunRefused
from verlite.trainer.segments import shown_difference


def find(
    trainer: Any,
    settings: Callable[[], dict[str, Any]],
    code: Callable[[], dict[str, str]],
    warn: Callable[[str], None],
    is_run: bool,
) -> tuple[checkpoints.Checkpoint | None, dict[str, Any]]:
    """Find the checkpoint to resume from, and compare its settings. Return it with its state.

    Args:
        trainer: the section of the configuration, with absolute paths.
        settings, code: read the settings that must not change, and the digests of the user's files.
        is_run: leftovers are removed (`checkpoints.newest`), and the files are read also without a
            checkpoint: they may change before the first save.

    Raises:
        RunRefused: settings differ. CheckpointError: see `checkpoints.find`.
    """
    run_dir, mode = Path(trainer.default_local_dir), trainer.resume_mode
    found = checkpoints.find(run_dir, mode, trainer.resume_from_path, warn, clean=is_run)
    if found is None and not is_run:
        return None, {"step": 0}
    now, files = settings(), code()
    if found is None:
        return None, {"step": 0}
    state = found.state()
    for line in (
        *refuse_changes(now, state["critical"]),
        *changed_code(files, state.get("code", {})),
    ):
        warn(line)
    return found, state


MOVED = (
    " This checkpoint does not record the contents of each of these paths. If one has only moved, "
    "make the old path a link to the new one (ln -s NEW OLD) and name the old path."
)


def refuse_changes(now: dict[str, Any], saved: dict[str, Any]) -> list[str]:
    """Refuse to resume with other critical settings than the saved ones.

    Returns:
        A line about each path that has changed while the contents under it are the same.

    Raises:
        RunRefused: lists every setting that differs.
    """
    differing = {
        key: "{}: {} in the checkpoint, {} now".format(
            key, *shown_difference(*_differing_entries(saved[key], now[key]))
        )
        for key in now
        if key in saved and saved[key] != now[key]
    }
    moved = [
        f"{line}; the contents are the same"
        for key, line in differing.items()
        if _has_same_contents(CONTENT_OF.get(key), now, saved)
    ]
    changed = [
        f"  {line}"
        for key, line in differing.items()
        if not _has_same_contents(CONTENT_OF.get(key), now, saved)
    ]
    if changed:
        raise RunRefused(
            "these settings differ from the checkpoint's:\n"
            + "\n".join(changed)
            + "\nSet them back, or start from the beginning with trainer.resume_mode=disable or "
            "another trainer.experiment_name."
            + (MOVED if any(CONTENT_OF.get(key, key) not in saved for key in differing) else "")
        )
    return moved


def _differing_entries(before: Any, now: Any) -> tuple[Any, Any]:
    """Return two values, of dicts the entries that differ."""
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return before, now
    equal = [key for key in before if key in now and before[key] == now[key]]
    first, second = (
        {key: value for key, value in side.items() if key not in equal} for side in (before, now)
    )
    return first, second


def _has_same_contents(key: str | None, now: dict[str, Any], saved: dict[str, Any]) -> bool:
    """Whether both have the same digests under this key, and no file was unreadable."""
    if key is None:
        return False
    found: dict[str, str] | list[str] = now.get(key, [])
    digests = list(found.values()) if isinstance(found, dict) else found
    return bool(digests) and "" not in digests and found == saved.get(key)


def changed_code(now: dict[str, str], saved: Any) -> list[str]:
    """Return a warning about each file of the user's own that has changed since the checkpoint.

    Args:
        now, saved: `code_contents`, of this run and of the checkpoint.
    """
    if not isinstance(saved, dict):
        return []
    return [
        f"the file of {key} has changed since the checkpoint: SHA-256 {saved[key]} before, "
        f"{digest} now. Scores before and after it may not be comparable"
        for key, digest in now.items()
        if key in saved and saved[key] != digest
    ]
