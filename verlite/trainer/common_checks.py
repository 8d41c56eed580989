"""Checks of all training commands (rows of `preflight.CHECKS`). Among them: which checkpoint a run
resumes from, and what it must match.

torch is imported in functions: the first of them run before it is loaded.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from verlite import hub
from verlite.config.compile import model_spec
from verlite.config.critical import CONTENT_OF, begin_run
from verlite.config.plan import run_length
from verlite.spec.roles import ModelSpec
from verlite.trainer import checkpoints
from verlite.trainer.checkpoints import STATE, ResumeRefused
from verlite.trainer.errors import HubMissing, RunRefused
from verlite.trainer.opening import lock_run_dir, try_run_dir
from verlite.trainer.preflight import RL, Preflight
from verlite.trainer.run_record import shown_difference
from verlite.trainer.saving import already_complete, exported_step


def run_directory(found: Preflight) -> None:
    """Lock the run directory. `verlite check` tries it only."""
    if found.is_run:
        found.lock = lock_run_dir(found.run_dir)
    else:
        try_run_dir(found.run_dir)


def checkpoint(found: Preflight) -> None:
    """Find the checkpoint to resume from, and compare its settings."""
    begin_run()
    found.checkpoint, found.state = found.on_first_rank(partial(_compared_checkpoint, found))


def _compared_checkpoint(found: Preflight) -> tuple[checkpoints.Checkpoint | None, dict[str, Any]]:
    """Return the checkpoint to resume from, with its state.

    Raises:
        RunRefused: settings differ. CheckpointError: see `checkpoints.find`.
    """
    mode, path = found.config.trainer.resume_mode, found.config.trainer.resume_from_path
    warnings = found.findings.warnings
    saved = checkpoints.find(found.run_dir, mode, path, warnings.append, clean=found.is_run)
    if saved is None and not found.is_run:
        return None, {"step": 0}
    # A run reads the files also without a checkpoint: they may change before the first save.
    now, files = found.settings(), found.code()
    if saved is None:
        return None, {"step": 0}
    state = saved.state()
    warnings += refuse_changes(now, state["critical"])
    warnings += changed_code(files, state.get("code", {}))
    return saved, state


@contextmanager
def reading(model: ModelSpec, section: str) -> Iterator[None]:
    """Convert a ModelError: HubMissing if the hub cannot be reached and no folder here has a
    similar name, else RunRefused. section: what stands before `model.` in its keys."""
    from verlite.engine.folder import HubUnreachable, ModelError

    try:
        yield
    except HubUnreachable as error:
        near = hub.neighbors(model.path) or hub.neighbors(model.tokenizer_path or "")
        raise (RunRefused if near else HubMissing)(f"{section}{error}") from error
    except ModelError as error:
        raise RunRefused(f"{section}{error}") from error


def model_configuration(found: Preflight) -> None:
    """Load the model's config.json: a broken one would take much longer to fail in the workers."""
    from verlite.engine.folder import load_config

    spec = model_spec(found.model)
    with reading(spec, found.section):
        found.described = load_config(spec)


def tokenizer(found: Preflight) -> None:
    """Load the tokenizer."""
    tokenizer_of(found)


def tokenizer_of(found: Preflight) -> Any:
    """Return the tokenizer, which is loaded once. Raises RunRefused, HubMissing."""
    from verlite.engine.folder import load_tokenizer

    if found.tokenizer is None:
        spec = model_spec(found.model)
        with reading(spec, found.section):
            found.tokenizer = load_tokenizer(spec)
    return found.tokenizer


def trainable_model(found: Preflight) -> None:
    """Compare a small copy of the model with transformers, as workers do when they load it."""
    compare_small_copy(found, model_spec(found.model), found.section, "lm")


def compare_small_copy(found: Preflight, model: ModelSpec, section: str, kind: str) -> None:
    """Refuse a model that the engine cannot train. Warn if there is no small copy of it, or if it
    cannot share prefixes."""
    from verlite.engine import family

    with reading(model, section):
        _, unproven = family.check(model, kind)
    if unproven:
        found.findings.warnings.append(f"{section}{unproven}")


def adapters(found: Preflight) -> None:
    """Look for the layers that LoRA adapts in the model, as workers do when they load it."""
    fit_adapters(model_spec(found.model), found.section, "lm")


def fit_adapters(model: ModelSpec, section: str, kind: str) -> None:
    """Refuse adapters that do not fit the model. Nothing of its weights is read."""
    if not model.trains_adapters:
        return
    from verlite.engine import lora
    from verlite.engine.model import load_skeleton

    with reading(model, section):
        lora.add(load_skeleton(model, kind), model)


def position(found: Preflight) -> None:
    """Continue the order of the rows from the checkpoint, if all rows are known, and check which
    of the drawn ones are not trained yet."""
    if found.checkpoint is None or not found.is_whole:
        return
    from verlite.trainer.groups import check_state

    config = found.config
    try:
        if found.command == RL:
            has_groups, prompts = config.trainer.mode != "sync", config.data.train_batch_size
            check_state(found.state, has_groups, prompts, found.sampler.size)
        found.sampler.load_state_dict(found.state["sampler"])
    except ValueError as error:
        raise ResumeRefused(f"{found.checkpoint.path / STATE}: {error}") from error


def steps_left(found: Preflight) -> None:
    """Count the run's steps. Raises AlreadyComplete if it is done: a run that was killed between
    its last checkpoint and the export is opened again to write the export."""
    trainer = found.config.trainer
    epochs, steps = trainer.epochs(), trainer.total_training_steps
    if not found.is_whole and epochs:
        return
    batch = found.config.data.train_batch_size
    _, found.total_steps = run_length(found.sampler.size, batch, epochs, steps)
    step = found.state["step"]
    if step < found.total_steps or found.validates_only:
        return
    if not found.exports or exported_step(found.run_dir) == step:
        arguments = found.run_dir, found.state, found.total_steps, found.is_run
        raise found.on_first_rank(partial(already_complete, *arguments))
    if not found.is_run:
        place = "from" if step == found.total_steps else "beyond"
        found.findings.warnings.append(
            f"{found.checkpoint and found.checkpoint.path} is {place} the last step, "
            f"{found.total_steps}: a run would find nothing left to train, and write the export"
        )


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
    moved, changed = [], []
    for key, line in differing.items():
        if _has_same_contents(CONTENT_OF.get(key), now, saved):
            moved.append(f"{line}; the contents are the same")
        else:
            changed.append(f"  {line}")
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
