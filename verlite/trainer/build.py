"""Build a run and tear it down: everything of the launch that needs torch.

`open_run` turns the result of `launch.preflight` into a `Run`; `finalize` writes the Hugging Face
export after the last step and chooses the exit code.
"""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO

import psutil
import yaml
from transformers import PreTrainedTokenizerBase

from verlite.algorithms.kl import AdaptiveKLController, FixedKLController
from verlite.config import catalog
from verlite.config.catalog import ESTIMATORS, POLICY_LOSSES, resolve
from verlite.config.debug import DEBUGGERS, LIFTED
from verlite.config.plan import Plan, engine_settings
from verlite.config.schema import AlgorithmConfig, Config, ModelConfig
from verlite.controller.breakpoints import show_stops
from verlite.controller.exit_codes import DONE, STOPPED
from verlite.controller.placement import Placement
from verlite.controller.worker_group import ready, spawn
from verlite.data.dataset import PromptDataset, overlap_note
from verlite.data.sampler import PromptSampler
from verlite.engine.folder import ModelError, load_config, load_tokenizer
from verlite.envs.chat import TemplateError
from verlite.envs.factory import EnvFactory, build_env_factory, encoder
from verlite.envs.step import Step
from verlite.files import RetryingWriter, free_text, read_text, replace_file
from verlite.trainer.checkpoints import STATE, Checkpoint, CheckpointError, ResumeRefused
from verlite.trainer.detectors import Detectors
from verlite.trainer.display import Display
from verlite.trainer.ending import reported_first
from verlite.trainer.errors import AlreadyComplete, RunRefused
from verlite.trainer.finish import WARNINGS, forget_warnings, save
from verlite.trainer.launch import Preflight, connect_ray, plan_on, reserve_devices
from verlite.trainer.reference import check_shape, check_weights
from verlite.trainer.run import Run, StepState
from verlite.trainer.time_limit import TimeLimit, deadline
from verlite.trainer.tracking import METRICS, MetricsFile, Tracking, read_lines, set_aside
from verlite.workers.roles import ROLES

EARLIER_STEPS = 20
"""Steps of an earlier run in this directory that show how long steps and saves take."""
STEP_FILE = "training_step.txt"
"""File in huggingface/ with the step of the exported policy."""


@contextmanager
def open_run(checks: Preflight) -> Iterator[Run]:
    """Build everything, in the order that fails earliest: tokenizer, prompts, Ray cluster, workers.

    Trackers, display and Ray are closed when the context ends.

    Raises:
        RunRefused: the model, the environment or a function of the algorithm cannot be loaded.
        AlreadyComplete: the checkpoint to resume from is from the last step.
        CheckpointError, DataError: before any worker is built.
    """
    config = checks.config
    plan = checks.plan
    run_dir = Path(config.trainer.default_local_dir)
    state: dict[str, Any] = {"step": 0}
    if checks.checkpoint:
        state = checks.checkpoint.state()
    with ExitStack() as stack, reported_first(checks.stop, run_dir):
        check_functions(config)
        tokenizer = load_policy_tokenizer(config.actor_rollout_ref.model)
        if checks.service:
            model = config.actor_rollout_ref.model
            check_shape(checks.service, load_config(model), model.path)
        env_factory = load_environment(config, plan, tokenizer)
        train_data, val_data = load_datasets(checks, tokenizer, env_factory)
        sampler = PromptSampler(
            len(train_data),
            plan.gen_prompts,
            config.data.seed,
            config.data.shuffle,
            plan.gen_prompts_key,
        )
        if checks.checkpoint:
            try:
                sampler.load_state_dict(state["sampler"])
            except ValueError as error:
                raise ResumeRefused(f"{checks.checkpoint.path / STATE}: {error}") from error
        _, total_steps = plan.steps(len(train_data))
        stop_if_complete(config, run_dir, state, total_steps)

        display = Display(total_steps, state["step"], log=checks.stop.log)
        stack.callback(display.close)
        stop = checks.stop
        stop.where = lambda: f"while {display.current_phase or 'starting'}"
        show_data(display, train_data, val_data)
        for text in checks.warnings:
            display.warn(text)
        writer = RetryingWriter(display.warn)
        stack.callback(writer.close)
        writer.replace(run_dir / "config.yaml", checks.config_yaml.encode())

        with display.phase("starting workers"):
            placement = checks.placement
            if placement is None:
                address = config.ray_kwargs.ray_init.address
                cluster = stack.enter_context(connect_ray(config, plan, address, checks.stop))
            if placement is None:
                plan = plan_on(cluster, config, plan)
                placement = reserve_devices(cluster, config, plan)
            display.show_plan(plan)
            placement.cluster.supervisor.ranks.warn = display.warn
            if config.trainer.debug:
                display.info(debug_text(placement.cluster.debugger))
                stack.enter_context(show_stops(placement.cluster, display.info))
            workers = start_workers(placement, config, plan, total_steps, checks.checkpoint)

        tracking = open_tracking(checks, state, writer)
        stack.callback(tracking.finish)
        run = Run(
            config=config,
            plan=plan,
            run_dir=run_dir,
            tokenizer=tokenizer,
            train_data=train_data,
            val_data=val_data,
            sampler=sampler,
            total_steps=total_steps,
            workers=workers,
            kl=kl_controller(config.algorithm),
            writer=writer,
            tracking=tracking,
            display=display,
            stop=stop,
            limit=time_limit(config, run_dir),
            env_factory=env_factory,
            detectors=Detectors(
                config.trainer.detect,
                earlier_metrics(run_dir, state["step"]),
                compares=catalog.compares(config.algorithm.adv_estimator),
            ),
            service=checks.service,
        )
        if checks.service:
            step = state["step"]
            check_weights(config, checks.service, run_dir, step, run.actor.describe)
        if checks.checkpoint:
            restore(run, checks.checkpoint, state)
        stop.where = lambda: run.where
        stop.must_save = lambda: run.must_save
        stop.on_defer = lambda name: display.info(
            f"{name}: step {run.finished_step} is not saved yet; the run stops once it is"
        )
        supervisor = placement.cluster.supervisor
        supervisor.before_poll = run.obey_stop
        if config.actor_rollout_ref.rollout.max_restarts and plan.rollout_name != "server":
            supervisor.restartable = {"rollout"}
        yield run


def debug_text(debugger: str) -> str:
    """Say what a run with a debugger does differently."""
    return (
        f"debugging with {DEBUGGERS[debugger]}: breakpoint() in a worker, an environment or a "
        "reward function waits for it. Reward functions run in the rollout workers, without the "
        f"check on ground-truth answers. Time limits are lifted: {', '.join(LIFTED)}, and those of "
        "collectives"
    )


def check_functions(config: Config) -> None:
    """Look up the estimator and the policy loss, which may be the user's own, before workers start.

    Raises:
        RunRefused: one of them does not exist.
    """
    loss_mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
    try:
        resolve(config.algorithm.adv_estimator, ESTIMATORS, "algorithm.adv_estimator")
        resolve(loss_mode, POLICY_LOSSES, "actor_rollout_ref.actor.policy_loss.loss_mode")
    except ValueError as error:
        raise RunRefused(str(error)) from error


def load_policy_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the policy's tokenizer, after checking its config.json.

    A broken config.json fails here in a second; in the workers it would take many.

    Raises:
        RunRefused: either cannot be loaded.
    """
    try:
        load_config(model)
        return load_tokenizer(model)
    except ModelError as error:
        raise RunRefused(f"actor_rollout_ref.{error}") from error


def load_environment(
    config: Config, plan: Plan, tokenizer: PreTrainedTokenizerBase
) -> EnvFactory | None:
    """Build the environment factory and encode one observation. None for single-turn runs.

    Raises:
        RunRefused: the environment does not exist, the chat template does not support its tools, or
            `data.max_obs_length` leaves no room for an observation.
    """
    if not plan.max_turns:
        return None
    limit = config.data.max_obs_length
    try:
        factory = build_env_factory(config)
        encode = encoder(factory, tokenizer, config.data.apply_chat_template_kwargs)
        before, after = factory.around
        encode(Step("gizmo " * limit, before, after), [], limit)
    except (TemplateError, ValueError) as error:
        raise RunRefused(str(error)) from error
    return factory


def load_datasets(
    checks: Preflight, tokenizer: PreTrainedTokenizerBase, env_factory: EnvFactory | None
) -> tuple[PromptDataset, PromptDataset | None]:
    """Tokenize and measure the prompts of both splits."""
    data = checks.config.data
    limit = (checks.plan.longest_prompt_key, checks.plan.longest_prompt)
    tools = env_factory.tools if env_factory else ()
    train = PromptDataset(checks.train, tokenizer, data, "train", limit, tools)
    if checks.val is None:
        return train, None
    return train, PromptDataset(checks.val, tokenizer, data, "val", limit, tools)


def show_data(display: Display, train: PromptDataset, val: PromptDataset | None) -> None:
    """Print how many prompts of each split are used, and warn about prompts in both."""
    display.info(str(train.report()))
    if val is None:
        return
    display.info(str(val.report()))
    overlap = overlap_note(train, val)
    if overlap:
        display.info(overlap)


def stop_if_complete(
    config: Config, run_dir: Path, state: dict[str, Any], total_steps: int
) -> None:
    """End here if the checkpoint is from the last step and its export exists.

    A run that was killed between its last checkpoint and the export is opened again to write the
    export.

    Raises:
        AlreadyComplete: nothing is left to do.
    """
    step = state["step"]
    trainer = config.trainer
    if step < total_steps or trainer.val_only:
        return
    if trainer.export_hf and exported_step(run_dir) != step:
        return
    lines = [f"already complete: {run_dir} has a checkpoint of step {step} of {total_steps}"]
    if step > total_steps:
        lines = [
            f"already complete: {run_dir} has a checkpoint of step {step}, and this "
            f"configuration trains for {total_steps} steps"
        ]
    writer = RetryingWriter(lines.append)
    MetricsFile(run_dir / METRICS, writer, step).write_missing(step, state["metrics"])
    writer.close()
    raise AlreadyComplete("\n".join(lines))


def open_tracking(checks: Preflight, state: dict[str, Any], writer: RetryingWriter) -> Tracking:
    """Open metrics.jsonl and the trackers.

    A checkpoint is written before its step's line, so a kill may have come between the two. The
    line is then written from the checkpoint.

    Raises:
        RunRefused: an earlier run's metrics.jsonl or warnings.jsonl can be neither read nor
            renamed.
    """
    trainer = checks.config.trainer
    try:
        tracking = Tracking(
            trainer.logger,
            Path(trainer.default_local_dir),
            trainer.project_name,
            trainer.experiment_name,
            yaml.safe_load(checks.config_yaml),
            writer,
            resumed_step=state["step"],
        )
        forget_warnings(Path(trainer.default_local_dir) / WARNINGS, state["step"], writer)
    except OSError as error:
        raise RunRefused(
            f"trainer.default_local_dir={trainer.default_local_dir}: a file of an earlier run "
            f"cannot be renamed: {error}. Choose another directory."
        ) from error
    if checks.checkpoint:
        tracking.file.write_missing(state["step"], state["metrics"])
    return tracking


def earlier_metrics(run_dir: Path, step: int) -> list[dict[str, Any]]:
    """Return the metrics of the steps up to the one that the run resumes from."""
    try:
        return [line for line in read_lines(run_dir / METRICS) if line["step"] <= step]
    except (OSError, ValueError):
        return []


def time_limit(config: Config, run_dir: Path) -> TimeLimit:
    """Return the run's wall time, with the durations of earlier steps of the same run directory."""
    started = psutil.Process().create_time()
    limit = TimeLimit(deadline(config.trainer.max_runtime, started))
    if limit.deadline is not None:
        for line in read_lines(run_dir / METRICS)[-EARLIER_STEPS:]:
            limit.observe(line)
    return limit


def start_workers(
    placement: Placement,
    config: Config,
    plan: Plan,
    total_steps: int,
    checkpoint: Checkpoint | None,
) -> dict[str, Any]:
    """Start the workers of every role, load the checkpoint, and wait until all are ready.

    Returns:
        Worker group of each role, by the role's name.
    """
    training = {}
    for role, entry in ROLES.items():
        if role not in plan.roles or role == "rollout":
            continue
        training[role] = spawn(entry.worker_class(), placement, role, config, plan, total_steps)
        # A role that offloads leaves the GPUs before the next one loads its model: together they
        # may not fit.
        if placement.kind == "cuda" and offloads(config, role):
            ready(training[role])
    if checkpoint or placement.kind == "cuda":
        ready(*training.values())
    if checkpoint:
        for role, workers in training.items():
            if ROLES[role].saves:
                workers.load(str(checkpoint.path / role), checkpoint.files(role))
    # Rollout comes last: vLLM takes its share of the memory that is free when it starts, which is
    # most once the other roles have loaded and offloaded their models.
    rollout_class = ROLES["rollout"].worker_class()
    rollout = spawn(rollout_class, placement, "rollout", config, plan, os.getcwd())
    ready(*training.values(), rollout)
    return {**training, "rollout": rollout}


def offloads(config: Config, role: str) -> bool:
    """Return True if a training role moves parameters or optimizer to host memory when idle."""
    fsdp = engine_settings(config, role, "cuda")
    return fsdp.param_offload or fsdp.optimizer_offload


def kl_controller(algorithm: AlgorithmConfig) -> FixedKLController | AdaptiveKLController:
    """Return the coefficient of the KL penalty in the reward, fixed or adaptive."""
    settings = algorithm.kl_ctrl
    if settings.type == "fixed":
        return FixedKLController(settings.kl_coef)
    return AdaptiveKLController(settings.kl_coef, settings.target_kl, settings.horizon)


def exported_step(run_dir: Path) -> int | None:
    """Step of the policy in huggingface/. None if nothing was exported."""
    try:
        return int(read_text(run_dir / "huggingface" / STEP_FILE))
    except (OSError, ValueError):
        return None


def restore(run: Run, checkpoint: Checkpoint, state: dict[str, Any]) -> None:
    """Restore the driver's state: step, KL coefficient, weight version.

    Workers load their own parts.

    A fixed KL coefficient comes from the configuration, not from the checkpoint.
    """
    run.current = StepState(number=state["step"])
    run.resumed_step = run.step
    # The first sync gives the engines the saved weights again, under the version that they had.
    run.version = state["version"] - 1
    run.saved_step = run.step if checkpoint.path.parent == run.run_dir else 0
    if run.config.algorithm.kl_ctrl.type == "adaptive":
        run.kl.load_state_dict(state["kl_controller"])
    run.display.info(f"resumed from {checkpoint.path} (step {run.step} of {run.total_steps})")


def finalize(run: Run) -> int:
    """End a run that did not fail: write the export, print where the results are.

    Returns:
        Exit code: 0 if all is done, 75 if a stop was requested and the same command goes on.

    Raises:
        CheckpointError: the steps since the last checkpoint cannot be saved.
    """
    trainer = run.config.trainer
    if run.stop.requested or (run.step < run.total_steps and not trainer.val_only):
        return finalize_stopped(run)
    if trainer.export_hf and run.step and not trainer.val_only:
        with run.display.phase("writing Hugging Face export"):
            export(run)
    run.display.close()
    print_results(run, sys.stdout)
    return DONE


def finalize_stopped(run: Run) -> int:
    """Save what is not saved yet: the request may have come after the step's own save."""
    if run.step > run.saved_step:
        save(run)
    if run.step > run.saved_step:
        raise CheckpointError(
            f"stopped by {run.stop.requested} after step {run.step}, whose checkpoint could not be "
            "written"
        )
    run.display.info(
        f"stopped by {run.stop.requested} after step {run.step} of {run.total_steps}. "
        f"{run.stop.checkpoint()}"
    )
    return STOPPED


def export(run: Run) -> None:
    """Write the policy to huggingface/ in Hugging Face format.

    The folder is written atomically: it is the new export, the old one, or absent. The export of
    another run, which had the same directory before, is renamed.

    Raises:
        CheckpointError: it cannot be written, or the driver does not see what the actor wrote.
    """
    final = run.run_dir / "huggingface"
    temporary = run.run_dir / ".tmp_huggingface"
    old = run.run_dir / ".old_huggingface"
    shutil.rmtree(temporary, ignore_errors=True)
    errors: Any = run.actor.export_hf(str(temporary))
    error = next(filter(None, errors), None)
    if error:
        shutil.rmtree(temporary, ignore_errors=True)
        text = f"the export was not written: {error} ({free_text(run.run_dir)} free). "
        if run.saved_step == run.step:
            text += f"The checkpoint of step {run.step} is complete: the same command exports it."
        raise CheckpointError(text)
    if not (temporary / "config.json").is_file():
        raise CheckpointError(
            f"the driver does not see the export that the actor wrote to {temporary}. "
            "trainer.default_local_dir must be a folder that all nodes share."
        )
    replace_file(temporary / STEP_FILE, str(run.step))
    shutil.rmtree(old, ignore_errors=True)
    if not run.resumed_step:
        renamed = set_aside(final)
        if renamed:
            run.display.info(f"the export of an earlier run is now {renamed}")
    if final.exists():
        final.rename(old)
    temporary.rename(final)
    shutil.rmtree(old, ignore_errors=True)


def print_results(run: Run, out: TextIO) -> None:
    """Print the paths of metrics, samples, configuration, logs, checkpoint and export."""
    folder = run.run_dir
    saved = folder.glob("global_step_*")
    newest = max(saved, key=lambda path: path.stat().st_mtime, default=None)
    paths = [
        ("metrics", folder / METRICS),
        ("samples", folder / "rollouts"),
        ("warnings", folder / WARNINGS),
        ("config", folder / "config.yaml"),
        ("worker logs", folder / "logs"),
        ("checkpoint", newest),
        ("Hugging Face", folder / "huggingface"),
    ]
    for label, path in paths:
        if path is None or not path.exists():
            continue
        inside = path.is_relative_to(Path.cwd())
        out.write(f"{label:>13}  {os.path.relpath(path) if inside else path}\n")
