"""Check, train and evaluate in this process, and export a checkpoint.

These functions print what the commands print and raise ordinary exceptions. Signal handlers,
environment variables, sys.path and event loops are afterwards as they were before.
"""

import os
import sys
import tempfile
from asyncio import events
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verlite.api import own_code
from verlite.api.config import RunConfig
from verlite.api.result import Result
from verlite.config.plan import Plan, make_plan
from verlite.config.problems import Note
from verlite.terminal import console


@dataclass(frozen=True)
class Report:
    """What is known about a valid configuration. str(report) is what `verlite check` prints."""

    plan: Plan
    """Sizes, roles and devices that follow from the configuration."""
    notes: list[Note]
    """Renamed keys, keys without effect, and settings that are rarely meant."""
    warnings: list[str]
    """What a run would warn about: tools that do not answer, too little disk space."""
    prompts: list[str]
    """How many prompts there are, and how long, judged by the first rows of each file."""

    def __str__(self) -> str:
        out = console(file=open(os.devnull, "w"), record=True)
        with out.file:
            for note in self.notes:
                out.print(f"note: {note}", soft_wrap=True, highlight=False)
            for warning in self.warnings:
                out.print(f"warning: {warning}", soft_wrap=True, highlight=False)
            table: Any = self.plan.table()  # type: ignore[no-untyped-call]
            out.print(table)
            for line in self.prompts:
                out.print(line, soft_wrap=True, highlight=False)
        return out.export_text().rstrip()


def check(
    config: RunConfig,
    reward: Callable[..., Any] | None = None,
    env: Callable[..., Any] | None = None,
) -> Report:
    """Validate a configuration in seconds, without starting anything; arguments as in `train`.

    Raises:
        ConfigError: `problems` lists every violation, each with key, value, rule and remedy.
        RunRefused: the reward function, the tokenizer or the first prompts cannot be used.
        TypeError: `reward` or `env` cannot be stored for other processes.
    """
    from verlite.trainer.errors import RunRefused
    from verlite.trainer.opening import try_rl

    _refuse_other_types(config)
    with tempfile.TemporaryDirectory() as folder, _no_event_loop():
        with own_code.with_own_code(config, reward, env, Path(folder)) as whole:
            loaded = whole.loaded()
            plan = make_plan(loaded.config)
            found = try_rl(loaded.config)
            if found.errors:
                raise RunRefused("\n".join(found.errors))
            return Report(plan, loaded.notes, found.warnings + found.missing, found.seen)


def train(
    config: RunConfig,
    reward: Callable[..., Any] | None = None,
    env: Callable[..., Any] | None = None,
) -> Result:
    """Train in this process, with workers in processes of their own, and return when all is done.

    Ctrl-C stops the run and raises KeyboardInterrupt. Steps since the last checkpoint are lost.

    Args:
        config: from `load_config`.
        reward: function of the reward, as custom_reward_function names it: it takes data_source,
            solution_str, ground_truth and extra_info by name, and returns a number or a dict with
            "score". Reward processes get it from the run directory (`verlite.api.own_code` has
            the limits).
        env: EnvFactory subclass, or a function that returns an EnvFactory, for samples of several
            turns (max_turns). It gets the entries of env.kwargs.

    Raises:
        ConfigError: the configuration is invalid; nothing was started.
        TypeError: `reward` or `env` cannot be stored for other processes.
        RunRefused: a file or a setting is wrong; nothing was trained. The same holds for
            DataError, FunctionError, UnknownDataSource, ResourcesMissing, NoCluster and
            ResumeRefused.
        WorkerError: the run failed (`verlite.trainer.errors`). The same holds for CheckpointError,
            RewardFailures, RolloutFailures, LogProbGap, TooFewGroups, StuckError, NodeLost and
            RayLost.
        KeyboardInterrupt: Ctrl-C.
    """
    from verlite.config.critical import CODE
    from verlite.control.exit_codes import DONE
    from verlite.trainer import command
    from verlite.trainer.opening import absolute, lock_run_dir
    from verlite.trainer.stop import Stop

    _refuse_other_types(config)
    _refuse_other_ray()
    run_dir = Path(absolute(config["trainer.default_local_dir"]))
    if reward is not None or env is not None:
        lock_run_dir(run_dir).close()  # the files of a running run must not change
    with _no_event_loop(), own_code.with_own_code(config, reward, env, run_dir / CODE) as whole:
        loaded = whole.loaded()
        stop = Stop(embedded=True)
        try:
            with stop:
                code = command.run(loaded, command.train_rl, stop)
        except KeyboardInterrupt:
            if stop.requested in (None, "SIGINT"):
                raise
            code = stop.exit_code
    return Result(run_dir, "finished" if code == DONE else "stopped", code)


def evaluate(
    config: RunConfig,
    reward: Callable[..., Any] | None = None,
    env: Callable[..., Any] | None = None,
) -> dict[str, float]:
    """Validate the model on data.val_files without training; arguments and errors as in `train`.

    If the run directory has checkpoints, trainer.resume_mode decides which one is evaluated.

    Returns:
        The validation metrics, `val-core/...` and `val-aux/...` (docs/metrics.md).
    """
    _refuse_other_types(config)
    result = train(config.override({"trainer.val_only": True}), reward, env)
    return {name: value for name, value in result.metrics[-1].items() if name.startswith("val-")}


def export(
    run: Result | str | Path,
    out: str | Path,
    dtype: str = "float32",
    model: str | None = None,
    trust_remote_code: bool = False,
) -> Path:
    """Write the policy of a checkpoint as a Hugging Face folder, reload it and compare.

    Args:
        run: what `train` returned, a run directory (its newest complete checkpoint) or a
            global_step_N folder.
        out: a new or empty folder.
        dtype: float32, bfloat16 or float16.
        model: folder or hub name of the model that the training began with. Not needed with what
            `train` returned.
        trust_remote_code: run Python code that comes with `model`.

    Raises:
        CheckpointError: there is no complete checkpoint, it cannot be loaded, `model` is missing,
            `out` is not empty or cannot be written, or `dtype` is unknown.
    """
    import warnings

    from verlite.report.export import Base, export_checkpoint, find_checkpoint

    folder = run.run_dir if isinstance(run, Result) else Path(run)
    checkpoint = find_checkpoint(folder, lambda text: warnings.warn(text, stacklevel=3))
    base = Base(model, trust_remote_code=trust_remote_code) if model else None
    if base is None and isinstance(run, Result):  # its settings are those of this process's user
        base = Base.recorded(checkpoint)
    export_checkpoint(checkpoint, Path(out), base, dtype)
    return Path(out)


def _refuse_other_ray() -> None:
    """Refuse to train while this process uses Ray for something else."""
    from verlite.trainer.errors import RunRefused

    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        raise RunRefused(
            "this process is connected to Ray already (ray.is_initialized() is true), and a run "
            "needs its own connection. Call ray.shutdown() before verlite.train"
        )


def _refuse_other_types(config: RunConfig) -> None:
    """Raise TypeError unless `config` is what load_config returns."""
    if not isinstance(config, RunConfig):
        raise TypeError(
            f"config is of the type {type(config).__name__}, not what verlite.load_config returns. "
            'Write verlite.load_config("grpo", {"data.train_batch_size": 64}), for example'
        )


@contextmanager
def _no_event_loop() -> Iterator[None]:
    """Hide the event loop that a notebook runs its cells in: the driver runs loops of its own."""
    loop = events._get_running_loop()
    events._set_running_loop(None)
    try:
        yield
    finally:
        events._set_running_loop(loop)
