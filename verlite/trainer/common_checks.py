"""Checks of all training commands (rows of `preflight.CHECKS`).

torch is imported in functions: the first of them run before it is loaded.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from verlite import hub
from verlite.config.compile import model_spec
from verlite.config.critical import begin_run
from verlite.config.plan import run_length
from verlite.spec.roles import ModelSpec
from verlite.trainer import resume
from verlite.trainer.checkpoints import STATE, ResumeRefused
from verlite.trainer.errors import HubMissing, RunRefused
from verlite.trainer.opening import lock_run_dir, try_run_dir
from verlite.trainer.preflight import Preflight
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
    found.checkpoint, found.state = found.on_first_rank(
        partial(
            resume.find,
            found.config.trainer,
            found.settings,
            found.code,
            found.findings.warnings.append,
            found.is_run,
        )
    )


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
    """Refuse a model that the engine cannot train. Warn if there is no small copy of it."""
    from verlite.engine import family

    with reading(model, section):
        unproven = family.check(model, kind)
    if unproven:
        found.findings.warnings.append(f"{section}{unproven}")


def position(found: Preflight) -> None:
    """Continue the order of the rows from the checkpoint, if all rows are known."""
    if found.checkpoint is None or not found.is_whole:
        return
    try:
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
    per_epoch = found.sampler.size // found.config.data.train_batch_size
    found.total_steps = run_length(per_epoch, epochs, steps)
    step = found.state["step"]
    if step < found.total_steps or found.validates_only:
        return
    if not found.exports or exported_step(found.run_dir) == step:
        arguments = found.run_dir, found.state, found.total_steps, found.is_run
        raise found.on_first_rank(partial(already_complete, *arguments))
    if not found.is_run:
        found.findings.warnings.append(
            f"{found.checkpoint and found.checkpoint.path} is from the last step, "
            f"{found.total_steps}: a run would find nothing left to train, and write the export"
        )
