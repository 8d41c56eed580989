"""How a run of any training command opens: its directory, where it begins, its outputs.

Like the first checks, this file does not import torch.
"""

import copy
import fcntl
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TextIO

import yaml

from verlite.config import debug
from verlite.config.critical import VERL_FILES, code_contents, critical_settings
from verlite.config.plan import make_plan
from verlite.config.schema import Config
from verlite.config.sft import TuningConfig
from verlite.controller import supervisor_file
from verlite.files import RetryingWriter, free_text
from verlite.importing import import_ahead, names_a_file
from verlite.trainer import checkpoints
from verlite.trainer.errors import RunRefused
from verlite.trainer.preflight import DIRECTORY, PHASES, RL, ROWS, Findings, Preflight, walk
from verlite.trainer.run_record import changed_keys, write_config
from verlite.trainer.stop import Stop
from verlite.trainer.tracking import METRICS, Tracking


def rl_preflight(config: Config, first: int | None = None) -> Preflight:
    """Return what the checks of main_ppo are given. first: as in `Preflight`."""
    config = absolutize_paths(config)
    if debug.debugger(config):
        config = debug.without_limits(config)
    return Preflight(
        RL,
        config,
        Path(config.trainer.default_local_dir),
        model=config.actor_rollout_ref.model,
        section="actor_rollout_ref.",
        settings=partial(critical_settings, config),
        code=partial(code_contents, config),
        exports=config.trainer.export_hf,
        validates_only=config.trainer.val_only,
        first=first,
        plan=make_plan(config),
    )


def try_rl(config: Config) -> Findings:
    """Collect the findings of all checks of main_ppo, without Ray, as `verlite check` does."""
    found = rl_preflight(config, ROWS)
    import_ahead("verlite.engine.family")
    with environment(config.ray_kwargs.ray_init.runtime_env.env_vars):
        walk(found, *PHASES)
    return found.findings


@contextmanager
def in_run_directory(found: Preflight, stop: Stop) -> Iterator[None]:
    """Lock the run directory, and begin the run's log there. What ends the block is reported before
    the contexts around it are closed. Only the first of several processes does so."""
    if not found.is_first:
        yield
        return
    walk(found, DIRECTORY)
    with found.lock:
        stop.begin(found.run_dir)
        stop.checkpoint = partial(checkpoint_text, found.config, time.time())
        with stop.reported_first():
            yield


def newest_saved(found: Preflight) -> int:
    """Return the step of the newest checkpoint in the run directory. 0: there is none, or the run
    resumes from another run's."""
    own = found.checkpoint and found.checkpoint.path.parent.resolve() == found.run_dir.resolve()
    return found.state["step"] if own else 0


def resumed_text(found: Preflight) -> str:
    """Return the line about the checkpoint that a run continues from."""
    path = found.checkpoint and found.checkpoint.path
    return f"resumed from {path} (step {found.state['step']} of {found.total_steps})"


@contextmanager
def replacing_outputs(found: Preflight) -> Iterator[None]:
    """Refuse a run that can neither use nor rename a file of an earlier run."""
    try:
        yield
    except OSError as error:
        raise RunRefused(
            f"trainer.default_local_dir={found.run_dir}: a file of an earlier run cannot be "
            f"renamed: {error}. Choose another directory."
        ) from error


def record_config(
    found: Preflight, text: str, writer: RetryingWriter, say: Callable[[str], None]
) -> None:
    """Write config.yaml, and say which keys changed since the checkpoint. Raises RunRefused.

    text: the configuration as YAML, with the origin of each value.
    """
    if found.checkpoint:
        for line in changed_keys(found.checkpoint.path.parent, text):
            say(f"changed since the checkpoint's run: {line}")
    with replacing_outputs(found):
        write_config(found.run_dir, text, found.state["step"], writer)


def open_tracking(
    found: Preflight, text: str, writer: RetryingWriter, say: Callable[[str], None]
) -> Tracking:
    """Open metrics.jsonl and the trackers. Raises RunRefused.

    A checkpoint is written before its step's line, so a kill may have come between the two. The
    line is then written from the checkpoint.
    """
    trainer = found.config.trainer
    with replacing_outputs(found):
        tracking = Tracking(
            trainer.logger,
            found.run_dir,
            trainer.project_name,
            trainer.experiment_name,
            yaml.safe_load(text),
            writer,
            resumed_step=found.state["step"],
            say=say,
        )
    if found.checkpoint:
        tracking.file.write_missing(found.state["step"], found.state["metrics"])
    return tracking


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables of this process until the context ends.

    Folders of PYTHONPATH are also added to sys.path: this process has read the variable already.
    """
    before = {name: os.environ.get(name) for name in variables}
    folders = [folder for folder in variables.get("PYTHONPATH", "").split(os.pathsep) if folder]
    os.environ.update(variables)
    sys.path[:0] = folders
    try:
        yield
    finally:
        sys.path[:] = [folder for folder in sys.path if folder not in folders]
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def absolutize_paths(config: Config) -> Config:
    """Return a copy with absolute paths, because workers may run in another directory.

    Names on the Hugging Face hub stay as they are.
    """
    config = copy.deepcopy(config)
    for model in (config.actor_rollout_ref.model, config.critic.model):
        for key in ("path", "tokenizer_path", "lora_adapter_path"):
            value = getattr(model, key)
            if value and os.path.isdir(os.path.expanduser(value)):
                setattr(model, key, absolute(value))
    teacher = config.distillation.teacher_models.teacher_model
    if teacher.model_path and os.path.isdir(os.path.expanduser(teacher.model_path)):
        teacher.model_path = absolute(teacher.model_path)
    for section, key in (
        (config.custom_reward_function, "path"),
        (config.data.custom_cls, "path"),
        (config.data.sampler, "class_path"),
    ):
        place = getattr(section, key)
        if place and names_a_file(place):
            setattr(section, key, absolute(place))
    for name in VERL_FILES:
        file = config.env.kwargs.get(name)
        if isinstance(file, str):
            config.env.kwargs[name] = absolute(file)
    config.trainer.default_local_dir = absolute(config.trainer.default_local_dir)
    return config


def absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


def lock_run_dir(run_dir: Path) -> TextIO:
    """Create the run directory and lock it for this process.

    The kernel releases the lock when the returned file is closed, or when the process ends for
    whatever reason.

    Raises:
        RunRefused: the directory is not writable, or another run has locked it.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        # Not through a link, because the next lines truncate the file.
        descriptor = os.open(run_dir / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        lock = os.fdopen(descriptor, "r+", encoding="utf-8", errors="replace")
    except OSError as error:
        raise RunRefused(unwritable(run_dir, error)) from error
    _take(lock, run_dir)
    try:
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
    except OSError as error:  # such as a full disk
        raise RunRefused(unwritable(run_dir, error)) from error
    return lock


def try_run_dir(run_dir: Path) -> None:
    """Raise RunRefused if another run has locked the directory. Nothing is created or changed."""
    try:
        descriptor = os.open(run_dir / ".lock", os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunRefused(unwritable(run_dir, error)) from error
    with os.fdopen(descriptor, "r+", encoding="utf-8", errors="replace") as lock:
        _take(lock, run_dir)


def _take(lock: TextIO, run_dir: Path) -> None:
    """Lock the file. Raises RunRefused."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = lock.read(20).strip()
        raise RunRefused(
            f"trainer.default_local_dir={run_dir} is in use by process "
            f"{owner if owner.isdecimal() else 'unknown'}. "
            "End that run, or choose another trainer.default_local_dir or trainer.experiment_name."
        ) from None
    except OSError as error:  # such as a file system without locks
        raise RunRefused(unwritable(run_dir, error)) from error


def unwritable(run_dir: Path, error: OSError) -> str:
    """Return the message about a run directory that cannot be written or locked."""
    return (
        f"trainer.default_local_dir={run_dir} cannot be written or locked: {error.strerror} "
        f"({free_text(run_dir)} free). Choose another directory."
    )


def checkpoint_text(config: Config | TuningConfig, started: float) -> str:
    """Return what to print about the last checkpoint after a signal: where it is, how to resume.

    started: when this process started, in seconds since the epoch. A command that resumes from its
        own checkpoints only does not name earlier ones.
    """
    run_dir = Path(absolute(config.trainer.default_local_dir))
    is_auto = config.trainer.resume_mode == "auto"
    since = 0.0 if is_auto else min(supervisor_file.started() or started, started)
    step = checkpoints.last_saved(run_dir, since)
    files = [name for name in (METRICS, "rollouts", "logs") if (run_dir / name).exists()]
    kept = f" Files: {', '.join(files)} in {run_dir}." if files else ""
    if step is None:
        return f"No checkpoint was saved (trainer.save_freq sets how often).{kept}"
    folder = run_dir / f"{checkpoints.PREFIX}{step}"
    command = "the same command"
    if not is_auto:
        command += " with trainer.resume_mode="
        is_newest = step == checkpoints.last_saved(run_dir)
        command += "auto" if is_newest else f"resume_path trainer.resume_from_path={folder}"
    return f"Last checkpoint: {folder}. To resume, run {command}.{kept}"
