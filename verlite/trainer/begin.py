"""What comes first in a run: it takes its directory, and starts the workers' processes while this one still imports torch.

Nothing heavy is imported here. Importing torch and transformers takes seconds in the driver and in each worker, and so does starting
Ray: together they take little longer than one of them.
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

from verlite.config.critical import critical_settings
from verlite.config.names import names_a_file
from verlite.config.plan import Plan, make_plan, max_turns
from verlite.config.schema import Config
from verlite.controller.cluster import Cluster, connect, find
from verlite.controller.host import import_ahead
from verlite.controller.hosts import prestart
from verlite.controller.placement import Placement, reserve
from verlite.data.dataset import RowFiles
from verlite.envs.factory import build_env_factory, checked
from verlite.envs.step import ToolError
from verlite.rewards.scorer import Scorer
from verlite.trainer import checkpoints
from verlite.trainer.errors import RunRefused

NEEDED = "verlite.trainer.setup"
"""The driver's heavy imports."""
WORKERS = {
    "actor": ("verlite.workers.actor", "verlite.engine.fsdp"),
    "critic": ("verlite.workers.critic", "verlite.engine.fsdp"),
    "ref": ("verlite.workers.reference", "verlite.engine.fsdp"),
    "rollout": ("verlite.workers.rollout",),
}
"""Theirs; a rollout worker's engine has its own."""


@dataclass(frozen=True)
class Begun:
    """config: as all processes read it. train, val: rows, checked. checkpoint: to resume. warnings: for the person who started this.
    placement: of a local cluster, whose workers' processes are starting; None for a joined one, and where there may be nothing to do."""

    config: Config
    train: RowFiles
    val: RowFiles | None
    checkpoint: checkpoints.Checkpoint | None
    warnings: list[str]
    placement: Placement | None


@contextmanager
def begin(config: Config) -> Iterator[Begun]:
    """Hold the run directory, and look at what can be looked at without torch: checkpoint, rows, reward function, tools. Then start
    Ray and the workers' processes, unless the run is already complete, or Ray is a cluster's, which others may wait for: that is left
    alone until prompts are right too.

    Raises:
        RunRefused: the directory cannot be written, or another run holds it.
        CheckpointError, DataError, FunctionError, UnknownDataSource: before Ray is started.
        NoCluster, ResourcesMissing: as `connect` and `reserve`.
    """
    config = from_anywhere(config)
    trainer, data, warnings = config.trainer, config.data, list[str]()
    run_dir = Path(trainer.default_local_dir)
    with ExitStack() as stack:
        stack.enter_context(hold(run_dir))
        checkpoint = checkpoints.find(
            run_dir, trainer.resume_mode, trainer.resume_from_path, warnings.append
        )
        refuse_changed_settings(
            config, checkpoint.state().get("critical", {}) if checkpoint else {}
        )
        train = RowFiles(data.train_files, data, "train")
        val = RowFiles(data.val_files, data, "val") if data.val_files else None
        validate_reward_fn(config, train, val, warnings.append)
        look_at_tools(config, warnings.append)
        begun = Begun(config, train, val, checkpoint, warnings, None)
        plan = make_plan(config)
        nothing_to_do = (
            checkpoint is not None
            and plan.total_steps is not None
            and checkpoint.step >= plan.total_steps
        )
        if nothing_to_do or find(config.ray_kwargs.ray_init.address) is not None:
            yield begun
            return
        # Ray itself starts in the main thread: its processes end with the thread that started them.
        imports = threading.Thread(target=import_ahead, args=(NEEDED,), name="imports")
        imports.start()
        cluster = stack.enter_context(joined(config, plan, "local"))
        placement = held(cluster, config, plan)
        for role in plan.roles:
            more = [f"verlite.rollout.start_{plan.rollout_name}"] if role == "rollout" else []
            prestart(placement, role, *WORKERS[role], *more)
        imports.join()
        yield replace(begun, placement=placement)


def refuse_changed_settings(config: Config, saved: dict[str, Any]) -> None:
    """Refuse to resume with settings that would give other numbers.

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
            + "\nSet them back, or start afresh with trainer.resume_mode=disable or another trainer.experiment_name."
        )


def validate_reward_fn(
    config: Config, train: RowFiles, val: RowFiles | None, warn: Callable[[str], None]
) -> None:
    """Load what will score the data, and try it on answers that are right. Raises FunctionError, UnknownDataSource."""
    with closing(
        Scorer(config.custom_reward_function, config.reward)
    ) as scorer:  # the workers that generate have their own
        scorer.check_signature(train.data_sources() + (val.data_sources() if val else []))
        if config.reward.check_ground_truth and (
            told := scorer.self_check(train.answers(8)).warning()
        ):
            warn(told)


def look_at_tools(config: Config, warn: Callable[[str], None]) -> None:
    """Ask the tools of an agent's world whether they answer. Raises RunRefused when they do not, or there is no such world."""
    if not max_turns(config):
        return
    try:
        if note := checked(build_env_factory(config)):
            warn(note)
    except (ToolError, ValueError) as error:
        raise RunRefused(str(error)) from error


def joined(config: Config, plan: Plan, address: str | None) -> Cluster:
    """The run's connection to Ray. Raises NoCluster."""
    ray, trainer = config.ray_kwargs.ray_init, config.trainer
    return connect(
        trainer.default_local_dir,
        address=address,
        num_cpus=ray.num_cpus,
        slots=plan.n_devices,
        call_timeout_s=trainer.phase_timeout_s,
    )


def held(cluster: Cluster, config: Config, plan: Plan) -> Placement:
    """The run's devices. Raises ResourcesMissing."""
    return reserve(
        cluster,
        places(plan),
        nodes=plan.nnodes,
        devices_per_node=plan.devices_per_node,
        kind="auto" if config.trainer.device == "auto" else plan.device,
        wait_s=config.trainer.resource_wait_s,
    )


def places(plan: Plan) -> dict[str, list[int] | list[list[int]]]:
    """Devices of each rank of each role; an engine under tensor parallelism takes several."""
    tp = plan.tensor_parallel
    devices = plan.placement["rollout"]
    engines = [devices[i : i + tp] for i in range(0, len(devices), tp)] if tp > 1 else devices
    return {**plan.placement, "rollout": engines}


def from_anywhere(config: Config) -> Config:
    """The configuration with absolute paths: workers may live in another folder than the driver. Hub names stay as they are."""
    config = copy.deepcopy(config)
    for model in (config.actor_rollout_ref.model, config.critic.model):
        for key in ("path", "tokenizer_path", "lora_adapter_path"):
            if (value := getattr(model, key)) and os.path.isdir(os.path.expanduser(value)):
                setattr(model, key, os.path.abspath(os.path.expanduser(value)))
    if names_a_file(config.custom_reward_function.path or ""):
        config.custom_reward_function.path = os.path.abspath(
            os.path.expanduser(config.custom_reward_function.path)
        )
    config.trainer.default_local_dir = os.path.abspath(
        os.path.expanduser(config.trainer.default_local_dir)
    )
    return config


def hold(run_dir: Path) -> TextIO:
    """Take the run directory for this process; the hold ends with the process, however it ends.

    Raises:
        RunRefused: the directory cannot be written, or another run holds it.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = (run_dir / ".lock").open("a+", encoding="utf-8")
    except OSError as error:
        raise RunRefused(
            f"trainer.default_local_dir={run_dir} cannot be written: {error.strerror}. Choose another directory."
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        raise RunRefused(
            f"trainer.default_local_dir={run_dir} is in use by process {lock.read().strip() or 'unknown'}. "
            "End that run, or choose another trainer.default_local_dir or trainer.experiment_name."
        ) from None
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock
