"""Preflight: check a run, lock its directory, and start worker processes.

A run is `preflight`, then `build.open_run`, the loop in `ppo.py`, and `build.finalize`.

Launching takes two files because of torch. Importing torch and transformers takes seconds in the
driver and in every worker, and so does starting Ray. This file imports neither, so that both happen
at the same time and a wrong path is reported at once. `build.py` has everything that needs torch.
"""

import copy
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from verlite.config.catalog import ENGINES
from verlite.config.critical import critical_settings
from verlite.config.load import Loaded, dump
from verlite.config.names import names_a_file
from verlite.config.plan import Plan, make_plan
from verlite.config.rules import check
from verlite.config.schema import Config
from verlite.controller.cluster import Cluster, connect, find
from verlite.controller.placement import Placement, device_kind, reserve
from verlite.controller.worker_actor import import_ahead
from verlite.controller.worker_start import prestart
from verlite.data.dataset import RowFiles
from verlite.envs.factory import build_env_factory, check_env_factory
from verlite.envs.step import ToolError
from verlite.rewards.scorer import Scorer
from verlite.trainer import checkpoints
from verlite.trainer.errors import RunRefused
from verlite.workers.roles import ROLES

DRIVER_PRELOAD = "verlite.trainer.build"
"""Module that the driver imports in a thread while Ray and the worker processes start."""
ANSWERS_TO_CHECK = 8
"""Ground-truth answers on which the reward function is tried before the run."""


@dataclass(frozen=True)
class Preflight:
    """Result of all checks that do not need torch."""

    config: Config
    """The checked configuration, with absolute paths."""
    config_yaml: str
    """The same as YAML text, with the origin of each value, for config.yaml and the trackers."""
    plan: Plan
    train: RowFiles
    """Training rows."""
    val: RowFiles | None
    """Validation rows. None without data.val_files."""
    checkpoint: checkpoints.Checkpoint | None
    """The checkpoint to resume from. None: start from the beginning."""
    warnings: list[str]
    placement: Placement | None = None
    """Reserved devices, on which worker processes are starting.

    None if the run joins an existing Ray cluster, or if the checkpoint is from the last step.
    """


@contextmanager
def preflight(loaded: Loaded) -> Iterator[Preflight]:
    """Run every check that does not need torch, then start Ray and the worker processes.

    The run directory stays locked, and a local Ray cluster stays up, until the context ends.

    An existing Ray cluster is not joined here: other jobs may be waiting for its devices.
    `open_run` joins it after the prompts have been checked too.

    Raises:
        RunRefused: the directory is not writable or in use, a setting that must not change differs
            from the checkpoint's, or the tools of the environment do not answer.
        CheckpointError, DataError, FunctionError, UnknownDataSource: before Ray starts.
        NoCluster, ResourcesMissing: see `connect` and `reserve`.
    """
    config = absolutize_paths(loaded.config)
    run_dir = Path(config.trainer.default_local_dir)
    with ExitStack() as stack:
        stack.enter_context(lock_run_dir(run_dir))
        checks = check_all(config, dump(loaded), run_dir)
        ray_address = find(config.ray_kwargs.ray_init.address)
        if ray_address is not None or nothing_left(checks):
            yield checks
            return
        # Ray must start in the main thread: its processes end with the thread that started them.
        importing = threading.Thread(target=import_ahead, args=(DRIVER_PRELOAD,), name="imports")
        importing.start()
        cluster = stack.enter_context(connect_ray(config, checks.plan, "local"))
        placement = reserve_devices(cluster, config, checks.plan)
        prestart_workers(placement, checks.plan)
        importing.join()
        yield replace(checks, placement=placement)


def check_all(config: Config, config_yaml: str, run_dir: Path) -> Preflight:
    """Check the checkpoint, the data files, the reward function and the tools, cheapest first."""
    data = config.data
    warnings: list[str] = []
    checkpoint = checkpoints.find(
        run_dir,
        config.trainer.resume_mode,
        config.trainer.resume_from_path,
        warnings.append,
    )
    if checkpoint:
        refuse_changed_settings(config, checkpoint.state().get("critical", {}))
    train = RowFiles(data.train_files, data, "train")
    val = RowFiles(data.val_files, data, "val") if data.val_files else None
    validate_reward_fn(config, train, val, warnings.append)
    plan = make_plan(config)
    check_tools(config, plan, warnings.append)
    return Preflight(config, config_yaml, plan, train, val, checkpoint, warnings)


def nothing_left(checks: Preflight) -> bool:
    """Whether the checkpoint to resume from is already from the last step."""
    total = checks.plan.total_steps
    if checks.checkpoint is None or total is None:
        return False
    return checks.checkpoint.step >= total


def prestart_workers(placement: Placement, plan: Plan) -> None:
    """Start the processes of every role and let them import what they need. Returns at once."""
    for role in plan.roles:
        modules = [ROLES[role].worker.partition(":")[0], *ROLES[role].preload]
        if role == "rollout":
            engine = ENGINES.get(plan.rollout_name, plan.rollout_name)
            modules.append(engine.partition(":")[0])
        prestart(placement, role, *modules)


def refuse_changed_settings(config: Config, saved: dict[str, Any]) -> None:
    """Refuse to resume with settings that would change the numbers.

    Args:
        saved: the checkpoint's `critical_settings`.

    Raises:
        RunRefused: lists every setting that differs.
    """
    now = critical_settings(config)
    changed = [
        f"  {key}: {saved[key]!r} in the checkpoint, {now[key]!r} now"
        for key in now
        if key in saved and saved[key] != now[key]
    ]
    if changed:
        raise RunRefused(
            "these settings differ from the checkpoint's:\n"
            + "\n".join(changed)
            + "\nSet them back, or start from the beginning with trainer.resume_mode=disable or "
            "another trainer.experiment_name."
        )


def validate_reward_fn(
    config: Config, train: RowFiles, val: RowFiles | None, warn: Callable[[str], None]
) -> None:
    """Load the reward function and try it on ground-truth answers.

    This scorer is only for the check; each rollout worker has its own.

    Raises:
        UnknownDataSource: a data source has no scorer.
        FunctionError: the user's function cannot be loaded, or has the wrong parameters.
    """
    sources = train.data_sources()
    if val:
        sources = sources + val.data_sources()
    with closing(Scorer(config.custom_reward_function, config.reward)) as scorer:
        scorer.check_signature(sources)
        if not config.reward.check_ground_truth:
            return
        warning = scorer.self_check(train.answers(ANSWERS_TO_CHECK)).warning()
        if warning:
            warn(warning)


def check_tools(config: Config, plan: Plan, warn: Callable[[str], None]) -> None:
    """Ask the environment whether its tools answer. Does nothing for single-turn runs.

    Raises:
        RunRefused: the tools do not answer, or `env.name` cannot be built.
    """
    if not plan.max_turns:
        return
    try:
        warning = check_env_factory(build_env_factory(config))
    except (ToolError, ValueError) as error:
        raise RunRefused(str(error)) from error
    if warning:
        warn(warning)


def connect_ray(config: Config, plan: Plan, address: str | None) -> Cluster:
    """Connect to Ray at `address`, or start a new cluster for "local". Raises NoCluster."""
    return connect(
        config.trainer.default_local_dir,
        address=address,
        num_cpus=config.ray_kwargs.ray_init.num_cpus,
        slots=plan.n_devices,
        call_timeout_s=config.trainer.phase_timeout_s,
    )


def plan_on(cluster: Cluster, config: Config, plan: Plan) -> Plan:
    """Return the plan for the cluster's kind of device, which trainer.device=auto resolves to.

    A driver without a GPU may join a cluster with GPUs. The plan says which devices form an
    engine, so it must be right before they are reserved.

    Raises:
        RunRefused: a rule does not allow the configuration on that kind of device.
    """
    if cluster.local or config.trainer.device != "auto":
        return plan
    kind = device_kind()
    if kind == plan.device:
        return plan
    resolved = copy.deepcopy(config)
    resolved.trainer.device = kind
    resolved.ray_kwargs.ray_init.address = cluster.address
    problems = check(resolved, files=False)
    if problems:
        raise RunRefused(
            f"trainer.device=auto is {kind} on the cluster at {cluster.address}, where:\n"
            + "\n".join(f"  {problem}" for problem in problems)
        )
    return make_plan(config, kind)


def reserve_devices(cluster: Cluster, config: Config, plan: Plan) -> Placement:
    """Reserve the devices of all roles. Raises ResourcesMissing."""
    kind: Any = plan.device
    return reserve(
        cluster,
        devices_of_ranks(plan),
        nodes=plan.nnodes,
        devices_per_node=plan.devices_per_node,
        kind=kind,
        wait_s=config.trainer.resource_wait_s,
    )


def devices_of_ranks(plan: Plan) -> dict[str, list[int] | list[list[int]]]:
    """Devices of each rank of each role. A rollout engine with tensor parallelism has several."""
    size = plan.tensor_parallel
    if size == 1:
        return dict(plan.placement)
    devices = plan.placement["rollout"]
    engines = [devices[i : i + size] for i in range(0, len(devices), size)]
    return {**plan.placement, "rollout": engines}


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
    reward = config.custom_reward_function
    if reward.path and names_a_file(reward.path):
        reward.path = absolute(reward.path)
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
        run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = (run_dir / ".lock").open("a+", encoding="utf-8")
    except OSError as error:
        raise RunRefused(
            f"trainer.default_local_dir={run_dir} cannot be written: {error.strerror}. "
            "Choose another directory."
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        owner = lock.read().strip() or "unknown"
        raise RunRefused(
            f"trainer.default_local_dir={run_dir} is in use by process {owner}. "
            "End that run, or choose another trainer.default_local_dir or trainer.experiment_name."
        ) from None
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock


def interrupted_text(config: Config) -> str:
    """What to print after Ctrl-C: the last checkpoint and how to resume from it."""
    run_dir = Path(absolute(config.trainer.default_local_dir))
    try:
        step = (run_dir / checkpoints.POINTER).read_text(encoding="utf-8").strip()
    except OSError:
        return "interrupted. No checkpoint was saved (trainer.save_freq sets how often)."
    mode = config.trainer.resume_mode
    command = "the same command"
    if mode != "auto":
        command += " with trainer.resume_mode=auto"
    return f"interrupted. Last checkpoint: {run_dir}/global_step_{step}. To resume, run {command}."
