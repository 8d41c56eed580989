"""From a checked configuration to a run that is ready to step, and back to nothing: what is started here is ended here."""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO

import yaml
from transformers import PreTrainedTokenizerBase

from verlite.algorithms.kl import AdaptiveKLController, FixedKLController
from verlite.config.catalog import ESTIMATORS, POLICY_LOSSES, resolve
from verlite.config.load import Loaded, dump
from verlite.config.plan import longest_prompt, make_plan, max_turns, prompts_drawn
from verlite.config.schema import Config, ModelConfig
from verlite.controller.supervise import StopRequest
from verlite.controller.worker_group import ready, spawn
from verlite.data.dataset import PromptDataset, overlap_note
from verlite.data.sampler import PromptSampler
from verlite.engine.folder import ModelError, load_config, load_tokenizer
from verlite.envs.chat import TemplateError
from verlite.envs.factory import EnvFactory, build_env_factory, encoder
from verlite.envs.step import Step
from verlite.trainer import checkpoints
from verlite.trainer.begin import Begun, held, joined
from verlite.trainer.display import Display
from verlite.trainer.errors import AlreadyComplete, RunRefused
from verlite.trainer.finish import save
from verlite.trainer.run import Run
from verlite.trainer.tracking import MetricsFile, Tracking, read_lines, replace_file
from verlite.workers.actor import ActorWorker
from verlite.workers.critic import CriticWorker
from verlite.workers.reference import ReferenceWorker
from verlite.workers.rollout import RolloutWorker

STEP_FILE = "training_step.txt"
"""In huggingface/: of which step the policy is."""


def tokenizer_of(model: ModelConfig) -> PreTrainedTokenizerBase:
    """The policy's tokenizer, after a look at its config.json, which fails here in a second and in the workers in many.

    Raises:
        RunRefused: either cannot be loaded.
    """
    try:
        load_config(model)
        return load_tokenizer(model)
    except ModelError as error:
        raise RunRefused(f"actor_rollout_ref.{error}") from error


@contextmanager
def open_run(loaded: Loaded, begun: Begun) -> Iterator[Run]:
    """Build everything in the order that fails earliest and cheapest: tokenizer, prompts, then a cluster of others, then workers.

    Raises:
        RunRefused, CheckpointError, and the data and reward rooms' own errors before any worker is built.
    """
    config, placement, checkpoint, warnings = (
        begun.config,
        begun.placement,
        begun.checkpoint,
        begun.warnings,
    )
    trainer, policy = config.trainer, config.actor_rollout_ref
    run_dir = Path(trainer.default_local_dir)
    with ExitStack() as stack:
        state = checkpoint.state() if checkpoint else {"step": 0}
        functions_of(config)
        tokenizer = tokenizer_of(policy.model)
        world = env_factory_of(config, tokenizer)
        limits = longest_prompt(config), world.tools if world else ()
        train_data = PromptDataset(begun.train, tokenizer, config.data, "train", *limits)
        val_data = (
            PromptDataset(begun.val, tokenizer, config.data, "val", *limits) if begun.val else None
        )
        drawn_by, prompts = prompts_drawn(config)
        sampler = PromptSampler(
            len(train_data), prompts, config.data.seed, config.data.shuffle, drawn_by
        )
        if checkpoint:
            sampler.load_state_dict(state["sampler"])
        plan = make_plan(config)
        total_steps = plan.steps(len(train_data))[1]
        # A kill between the last checkpoint and the export leaves the export to do: then the run opens once more, for that alone.
        if (
            state["step"] >= total_steps
            and not trainer.val_only
            and (not trainer.export_hf or exported_step(run_dir) == state["step"])
        ):
            finish_metrics(run_dir, state)
            raise AlreadyComplete(
                f"already complete: {run_dir} has a checkpoint of step {state['step']} of {total_steps}"
            )
        display = Display(total_steps, state["step"])
        stack.callback(display.close)
        overlap = overlap_note(train_data, val_data) if val_data else None
        for line in (train_data.report(), val_data and val_data.report(), overlap):
            if line:
                display.say(str(line))
        for text in warnings:
            display.warn(text)
        replace_file(run_dir / "config.yaml", dump(loaded))

        with display.phase("starting workers"):
            cluster = (
                placement.cluster
                if placement
                else stack.enter_context(joined(config, plan, config.ray_kwargs.ray_init.address))
            )
            stop = stack.enter_context(
                StopRequest(lambda name: display.say(f"{name}: stopping after this step"))
            )
            placement = placement or held(cluster, config, plan)
            if (
                placement.kind != plan.device
            ):  # the driver's machine has another kind of device than the cluster
                plan = make_plan(config, placement.kind)
            display.say_plan(plan)
            actor = spawn(ActorWorker, placement, "actor", config, plan, total_steps)
            critic = (
                spawn(CriticWorker, placement, "critic", config, plan, total_steps)
                if plan.needs_critic
                else None
            )
            reference = (
                spawn(ReferenceWorker, placement, "ref", config, plan, total_steps)
                if "ref" in plan.roles
                else None
            )
            training = [role for role in (actor, critic, reference) if role is not None]
            if checkpoint or placement.kind == "cuda":
                ready(*training)
            if checkpoint:
                actor.load(str(checkpoint.path / "actor"))
                if critic is not None:
                    critic.load(str(checkpoint.path / "critic"))
            # Last: vLLM takes its share of what is free when it starts, after the others have loaded and offloaded.
            rollout = spawn(RolloutWorker, placement, "rollout", config, plan, os.getcwd())
            ready(*training, rollout)
        if checkpoint:
            finish_metrics(run_dir, state)
        tracking = Tracking(
            trainer.logger,
            run_dir,
            trainer.project_name,
            trainer.experiment_name,
            yaml.safe_load(dump(loaded)),
            display.warn,
            resumed_step=state["step"],
        )
        stack.callback(tracking.finish)
        ctrl = config.algorithm.kl_ctrl
        kl = (
            FixedKLController(ctrl.kl_coef)
            if ctrl.type == "fixed"
            else AdaptiveKLController(ctrl.kl_coef, ctrl.target_kl, ctrl.horizon)
        )
        run = Run(
            config,
            plan,
            run_dir,
            tokenizer,
            train_data,
            val_data,
            sampler,
            total_steps,
            actor,
            rollout,
            critic,
            reference,
            kl,
            tracking,
            display,
            stop,
            world,
        )
        if checkpoint:
            restore(run, checkpoint, state)
        yield run


def functions_of(config: Config) -> None:
    """Look up the estimator and the policy loss, which may be a user's own, where a wrong name costs a second.

    Raises:
        RunRefused: there is no such function.
    """
    loss_mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
    try:
        resolve(config.algorithm.adv_estimator, ESTIMATORS, "algorithm.adv_estimator")
        resolve(loss_mode, POLICY_LOSSES, "actor_rollout_ref.actor.policy_loss.loss_mode")
    except ValueError as error:
        raise RunRefused(str(error)) from error


def env_factory_of(config: Config, tokenizer: PreTrainedTokenizerBase) -> EnvFactory | None:
    """The world that an agent's samples act in; None for single turns.

    Raises:
        RunRefused: there is no such world, or the chat template cannot carry its tools or has no room for them.
    """
    if not max_turns(config):
        return None
    try:
        world = build_env_factory(config)
        template, limit = config.data.apply_chat_template_kwargs, config.data.max_obs_length
        encode = encoder(world, tokenizer, template)
        before, after = world.around
        encode(Step("gizmo " * limit, before, after), [], limit)  # has room
    except (TemplateError, ValueError) as error:
        raise RunRefused(str(error)) from error
    return world


def exported_step(run_dir: Path) -> int | None:
    """Of which step the policy in huggingface/ is; None when there is none."""
    try:
        return int((run_dir / "huggingface" / STEP_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def finish_metrics(run_dir: Path, state: dict[str, Any]) -> None:
    """Log the checkpoint's own step where a kill came between the checkpoint and its line of metrics.jsonl."""
    path = run_dir / "metrics.jsonl"
    if state["step"] not in [line["step"] for line in read_lines(path)]:
        file = MetricsFile(path, state["step"])
        file.write(state["step"], state["metrics"])
        file.close()


def restore(run: Run, checkpoint: checkpoints.Checkpoint, state: dict[str, Any]) -> None:
    """Put the driver where the checkpoint left it: step, KL weight, versions. The workers have loaded their own parts."""
    run.step = run.resumed_step = state["step"]
    run.version = (
        state["version"] - 1
    )  # the engine gets the saved weights once more, by the first sync, under their own version
    run.saved_step = run.step if checkpoint.path.parent == run.run_dir else 0
    if run.config.algorithm.kl_ctrl.type == "adaptive":  # a fixed weight is the configuration's
        run.kl.load_state_dict(state["kl_controller"])
    run.display.say(f"resumed from {checkpoint.path} (step {run.step} of {run.total_steps})")


def finished(run: Run) -> int:
    """Close a run that was not interrupted by an error: export, say where things are, and the exit code.

    0 when every step was made; 75 when the run was asked to stop and can be resumed.

    Raises:
        CheckpointError: the run was asked to stop, and what it did since its last checkpoint cannot be saved.
    """
    if run.step < run.total_steps and not run.config.trainer.val_only:
        if run.step > run.saved_step:  # the request came after the step had looked for one
            save(run)
        if run.step > run.saved_step:
            raise checkpoints.CheckpointError(
                f"stopped by request after step {run.step}, whose checkpoint could not be written"
            )
        run.display.say(
            f"stopped by request after step {run.step} of {run.total_steps}; the same command resumes it"
        )
        return 75
    if run.config.trainer.export_hf and run.step and not run.config.trainer.val_only:
        with run.display.phase("writing Hugging Face export"):
            export(run)
    run.display.close()
    summary(run, sys.stdout)
    return 0


def export(run: Run) -> None:
    """Write the policy as a Hugging Face folder, `huggingface/`, which is the new one, the old one or absent, never a part.

    Raises:
        CheckpointError: the folder that the actor wrote is not here.
    """
    final, temporary, old = (
        run.run_dir / name for name in ("huggingface", ".tmp_huggingface", ".old_huggingface")
    )
    shutil.rmtree(temporary, ignore_errors=True)
    run.actor.export_hf(str(temporary))
    if not (temporary / "config.json").is_file():
        raise checkpoints.CheckpointError(
            f"the driver does not see the export that the actor wrote to {temporary}: trainer.default_local_dir must be one folder that "
            "all nodes share"
        )
    (temporary / STEP_FILE).write_text(str(run.step), encoding="utf-8")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    temporary.rename(final)
    shutil.rmtree(old, ignore_errors=True)


def summary(run: Run, out: TextIO) -> None:
    """Where everything is."""
    d = run.run_dir
    rows = [
        ("metrics", d / "metrics.jsonl"),
        ("samples", d / "rollouts"),
        ("config", d / "config.yaml"),
        ("worker logs", d / "logs"),
        ("checkpoint", max(d.glob("global_step_*"), key=lambda p: p.stat().st_mtime, default=None)),
        ("Hugging Face", d / "huggingface"),
    ]
    for label, path in rows:
        if path is not None and path.exists():
            near = path.is_relative_to(Path.cwd())
            out.write(f"{label:>13}  {os.path.relpath(path) if near else path}\n")
