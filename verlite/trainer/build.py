"""Build a run and tear it down: everything of the launch that needs torch.

`open_run` turns a `launch.Launch` into a `Run`; `finalize` writes the Hugging Face
export after the last step and chooses the exit code.
"""

import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from verlite.algorithms.kl import KLController
from verlite.config.compile import advantage_spec, role_spec
from verlite.config.debug import DEBUGGERS, LIFTED
from verlite.config.plan import Plan
from verlite.config.schema import AlgorithmConfig, Config
from verlite.control.machine import Machine
from verlite.controller.debugger import show_stops
from verlite.controller.placement import Placement
from verlite.controller.worker_group import ready, spawn
from verlite.files import RetryingWriter, free_text
from verlite.spec import catalog
from verlite.spec.roles import TrainingRole
from verlite.trainer import run_record, saving
from verlite.trainer.checkpoints import Checkpoint, CheckpointError
from verlite.trainer.detectors import WARNINGS, Detectors, ignored
from verlite.trainer.display import Display
from verlite.trainer.finish import forget_warnings, save
from verlite.trainer.launch import Launch, connect_ray, plan_on, reserve_devices
from verlite.trainer.opening import (
    newest_saved,
    open_tracking,
    record_config,
    replacing_outputs,
    resumed_text,
)
from verlite.trainer.preflight import LIBRARIES, walk
from verlite.trainer.reference import check_teacher, check_weights
from verlite.trainer.run import Run, StepState
from verlite.trainer.stages.groups import open_groups
from verlite.trainer.tracking import METRICS, read_lines
from verlite.workers.roles import ROLES


@contextmanager
def open_run(launch: Launch) -> Iterator[Run]:
    """Do the remaining checks, and build everything: Ray cluster, workers, trackers.

    Trackers, display and Ray are closed when the context ends.

    Raises:
        REFUSED, AlreadyComplete, CheckpointError: see `preflight.walk`; before any worker is built.
    """
    found, stop, display = launch.found, launch.stop, launch.display
    config, plan, run_dir, state = found.config, found.plan, found.run_dir, found.state
    with ExitStack() as stack, stop.reported_first():
        stack.callback(display.close)
        with display.phase("reading prompts"):
            walk(found, LIBRARIES)
        assert found.total_steps is not None
        total_steps = found.total_steps
        run_record.plan(run_dir, total_steps)

        several = config.actor_rollout_ref.rollout.n > 1
        groups = several and catalog.estimator(config.algorithm.adv_estimator).compares
        display.begin(total_steps, state["step"], groups)
        for line in found.findings.seen:
            display.info(line)
        writer = RetryingWriter(display.warn)
        stack.callback(writer.close)
        record_config(found, launch.config_yaml, writer, display.info)

        with display.phase("starting workers"):
            placement = launch.placement
            if placement is None:
                address = config.ray_kwargs.ray_init.address
                cluster = stack.enter_context(connect_ray(config, plan, address, stop))
                plan = plan_on(cluster, config, plan)
                placement = reserve_devices(cluster, config, plan)
            display.console.print(plan.with_rows(found.sampler.size).table())
            placement.cluster.supervisor.warn = display.warn
            if config.trainer.debug:
                display.info(debug_text(placement.cluster.debugger))
                stack.enter_context(show_stops(placement.cluster, display.info))
            workers = start_workers(
                placement,
                config,
                plan,
                plan.total_training_steps or total_steps,
                found.checkpoint,
                display,
            )

        tracking = open_tracking(found, launch.config_yaml, writer, display.info)
        with replacing_outputs(found):
            forget_warnings(run_dir / WARNINGS, state["step"], writer)
        stack.callback(tracking.finish)
        run = Run(
            config=config,
            plan=plan,
            run_dir=run_dir,
            tokenizer=found.tokenizer,
            train_data=found.data["train"],
            val_data=found.data.get("val"),
            sampler=found.sampler,
            total_steps=total_steps,
            advantage=advantage_spec(config),
            workers=workers,
            kl=kl_controller(config.algorithm),
            writer=writer,
            tracking=tracking,
            display=display,
            stop=stop,
            env_factory=found.env_factory,
            detectors=Detectors(
                config.trainer.detect,
                earlier_metrics(run_dir, state["step"]),
                ignored(
                    groups,
                    cuts_prompts=found.data["train"].report.truncated > 0,
                    is_async=config.trainer.mode == "async",
                    filters=config.algorithm.filter_groups.enable,
                    rewards=not config.distillation.enabled
                    or config.distillation.distillation_loss.use_task_rewards,
                ),
            ),
            service=found.service,
            teacher_service=found.teacher_service,
        )
        if found.service:
            check_weights(config, found.service, run_dir, state["step"], run.actor.describe)
        if found.teacher_service:
            check_teacher(found.teacher_service, run_dir, state["step"])
        if config.trainer.mode != "sync":
            run.groups = open_groups(run, state, found.checkpoint)
        stop.where = lambda: display.where(run.step)
        if found.checkpoint:
            restore(run, state)
            display.info(resumed_text(found))
        run.begin(newest_saved(found))
        supervisor = placement.cluster.supervisor
        supervisor.before_poll = lambda: run.tell(Machine.polled)
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


def earlier_metrics(run_dir: Path, step: int) -> list[dict[str, Any]]:
    """Return the metrics of the steps up to the one that the run resumes from."""
    try:
        return [line for line in read_lines(run_dir / METRICS) if line["step"] <= step]
    except (OSError, ValueError):
        return []


def start_workers(
    placement: Placement,
    config: Config,
    plan: Plan,
    total_steps: int,
    checkpoint: Checkpoint | None,
    display: Display,
) -> dict[str, Any]:
    """Start the workers of every role, load the checkpoint, and wait until all are ready.

    Returns:
        Worker group of each role, by the role's name.
    """
    training = {}
    trained = [role for role in plan.roles if role != "rollout"]
    with display.phase(f"loading models: {', '.join(trained)}"):
        for role, entry in ROLES.items():
            if role not in plan.roles or role == "rollout":
                continue
            spec = role_spec(role, config, plan, total_steps)
            training[role] = spawn(entry.worker_class(), placement, role, spec)
            # A role that offloads leaves the GPUs before the next one loads its model: together
            # they may not fit.
            if placement.kind == "cuda" and offloads(spec):
                ready(training[role])
        if checkpoint or placement.kind == "cuda":
            ready(*training.values())
    if checkpoint:
        with display.phase(f"loading {checkpoint.path.name}"):
            for role, workers in training.items():
                if ROLES[role].saves:
                    workers.load(str(checkpoint.path / role), checkpoint.files(role))
    # Rollout comes last: vLLM takes its share of the memory that is free when it starts, which is
    # most once the other roles have loaded and offloaded their models.
    with display.phase("starting rollout engines"):
        rollout_class = ROLES["rollout"].worker_class()
        spec = role_spec("rollout", config, plan, total_steps)
        rollout = spawn(rollout_class, placement, "rollout", spec)
        ready(*training.values(), rollout)
    return {**training, "rollout": rollout}


def offloads(spec: TrainingRole) -> bool:
    """Return True if a training role moves parameters or optimizer to host memory when idle."""
    return spec.engine.fsdp.param_offload or spec.engine.fsdp.optimizer_offload


def kl_controller(algorithm: AlgorithmConfig) -> KLController:
    """Return the coefficient of the KL penalty in the reward, fixed or adaptive."""
    settings = algorithm.kl_ctrl
    target = settings.target_kl if settings.type == "adaptive" else None
    return KLController(settings.kl_coef, target, settings.horizon)


def restore(run: Run, state: dict[str, Any]) -> None:
    """Restore the driver's state from a checkpoint: step, KL coefficient, weight version.

    Workers load their own parts.

    A fixed KL coefficient comes from the configuration, not from the checkpoint.
    """
    run.current = StepState(number=state["step"])
    # The first sync gives the engines the saved weights again, under the version that they had.
    run.version = state["version"] - 1
    if run.config.algorithm.kl_ctrl.type == "adaptive":
        run.kl.load_state_dict(state["kl_controller"])


def finalize(run: Run) -> int:
    """End a run that did not fail, and return the exit code. Raises CheckpointError."""
    return saving.finalize(run, partial(save, run), partial(export, run), sys.stdout)


def export(run: Run) -> None:
    """Write the policy to huggingface/ in Hugging Face format.

    The folder is written atomically: it is the new export, the old one, or absent. The export of
    another run, which had the same directory before, is renamed.

    Raises:
        CheckpointError: it cannot be written, or the driver does not see what the actor wrote.
    """
    temporary = run.run_dir / ".tmp_huggingface"
    shutil.rmtree(temporary, ignore_errors=True)
    errors: Any = run.actor.export_hf(str(temporary))
    error = next(filter(None, errors), None)
    if error:
        shutil.rmtree(temporary, ignore_errors=True)
        text = f"the export was not written: {error} ({free_text(run.run_dir)} free). "
        if run.stop.machine.saved_step == run.step:
            text += f"The checkpoint of step {run.step} is complete: the same command exports it."
        raise CheckpointError(text)
    if not (temporary / "config.json").is_file():
        raise CheckpointError(
            f"the driver does not see the export that the actor wrote to {temporary}. "
            "trainer.default_local_dir must be a folder that all nodes share."
        )
    saving.install_export(run, temporary)
