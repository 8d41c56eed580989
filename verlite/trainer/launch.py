"""Preflight: check a run, lock its directory, and start worker processes.

A run is `preflight`, then `build.open_run`, the loop in `ppo.py`, and `build.finalize`.

Launching takes two files because of torch. Importing torch and transformers takes seconds in the
driver and in every worker, and so does starting Ray. This file imports neither, so that both happen
at the same time and a wrong path is reported at once. `build.py` has everything that needs torch.
"""

import copy
import fcntl
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from verlite.config import debug
from verlite.config.compile import env_spec, generation_spec, scorer_spec
from verlite.config.critical import (
    CONTENT_OF,
    TOOLS,
    begin_run,
    code_contents,
    critical_settings,
)
from verlite.config.load import Loaded, dump
from verlite.config.plan import Plan, make_plan, scores_remotely
from verlite.config.rules import check
from verlite.config.schema import Config, ModelConfig
from verlite.config.sft import TuningConfig
from verlite.controller import supervisor_file
from verlite.controller.cluster import Cluster, connect
from verlite.controller.head import find
from verlite.controller.placement import Placement, device_kind, reserve
from verlite.controller.stacks import answer_requests
from verlite.controller.stop import Stop
from verlite.controller.worker_actor import import_ahead
from verlite.controller.worker_start import prestart
from verlite.data.dataset import DataError, RowFiles
from verlite.engine.reference_wire import ModelInfo
from verlite.envs.factory import build_env_factory, check_env_factory
from verlite.envs.step import ToolError
from verlite.files import free_text, read_json
from verlite.http.token import TokenError
from verlite.importing import names_a_file
from verlite.machine import visible_gpus
from verlite.rewards import environment as environment_reward
from verlite.rewards.process import FunctionError
from verlite.rewards.scorer import Scorer
from verlite.rollout.servers import fit
from verlite.rollout.servers.fit import Needs, NoServer
from verlite.spec.catalog import ENGINES
from verlite.trainer import checkpoints
from verlite.trainer.disk import disk_warning
from verlite.trainer.display import Display
from verlite.trainer.ending import begin, end_at_once, reported_first
from verlite.trainer.errors import RunRefused, ServiceMissing
from verlite.trainer.inputs import read_rows
from verlite.trainer.reference import find_service
from verlite.trainer.segments import shown_difference
from verlite.trainer.tracking import METRICS
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
    stop: Stop
    """Whether a signal has requested a stop."""
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
    display: Display
    service: ModelInfo | None = None
    """Model of the reference service. None: the run has none."""
    placement: Placement | None = None
    """Reserved devices, on which worker processes are starting.

    None if the run joins an existing Ray cluster, or if the checkpoint is from the last step.
    """


@contextmanager
def preflight(loaded: Loaded, stop: Stop) -> Iterator[Preflight]:
    """Run every check that does not need torch, then start Ray and the worker processes.

    The run directory stays locked, and a local Ray cluster stays up, until the context ends.

    An existing Ray cluster is not joined here: other jobs may be waiting for its devices.
    `open_run` joins it after the prompts have been checked too.

    Raises:
        RunRefused: the directory is not writable or in use, or a setting that must not change
            differs from the checkpoint's.
        ServiceMissing: a service that the run needs does not answer.
        CheckpointError, DataError, FunctionError, UnknownDataSource: before Ray starts.
        NoCluster, ResourcesMissing: see `connect` and `reserve`.
    """
    config = absolutize_paths(loaded.config)
    if debug.debugger(config):
        config = debug.without_limits(config)
    run_dir = Path(config.trainer.default_local_dir)
    with ExitStack() as stack:
        display = Display(log=lambda text: stop.log(text))  # `begin` sets stop.log
        stop.where = display.where
        stack.enter_context(lock_run_dir(run_dir))
        begin(stop, run_dir)
        stop.checkpoint = functools.partial(checkpoint_text, config, time.time())
        stop.grace_s = config.trainer.stop_grace_s
        with reported_first(stop, run_dir):
            stack.enter_context(environment(config.ray_kwargs.ray_init.runtime_env.env_vars))
            stack.enter_context(answer_requests(run_dir))
            with display.phase("checking the configuration and the files"):
                checks = check_all(config, stop, dump(loaded), run_dir, display)
            ray_address = find(config.ray_kwargs.ray_init.address)
            if ray_address is not None or nothing_left(checks.plan, checks.checkpoint):
                yield checks
                return
            with display.phase("starting Ray"):
                # Ray must start in the main thread: its processes end with the thread that started
                # them.
                importing = threading.Thread(
                    target=import_ahead, args=(DRIVER_PRELOAD,), name="imports"
                )
                importing.start()
                cluster = stack.enter_context(connect_ray(config, checks.plan, "local", stop))
                placement = reserve_devices(cluster, config, checks.plan)
                prestart_workers(placement, checks.plan)
                importing.join()
            yield replace(checks, placement=placement)


def check_all(
    config: Config, stop: Stop, config_yaml: str, run_dir: Path, display: Display
) -> Preflight:
    """Check the checkpoint, the data files, the reward function and the tools, cheapest first."""
    warnings: list[str] = []
    begin_run()
    checkpoint = resume_point(config, run_dir, warnings.append)
    train, val = read_rows(config)
    validate_reward_fn(config, train, val, warnings.append)
    plan = make_plan(config)
    too_little = disk_warning(config, plan, train.in_files)
    warnings += [too_little] if too_little else []
    check_tools(config, plan, warnings.append)
    service = find_service(config, plan, warnings.append)
    check_servers(config, plan, display.info, warnings.append)
    return Preflight(
        config, stop, config_yaml, plan, train, val, checkpoint, warnings, display, service
    )


def resume_point(
    config: Config, run_dir: Path, warn: Callable[[str], None], clean: bool = True
) -> checkpoints.Checkpoint | None:
    """Find the checkpoint to resume from and compare its settings. None: start from the beginning.

    Args:
        clean: as in `checkpoints.newest`.

    Raises:
        RunRefused: settings differ. CheckpointError: see `checkpoints.find`.
    """
    critical_settings(config)  # reads the files now, which may change before the first save
    code = code_contents(config)
    trainer = config.trainer
    found = checkpoints.find(run_dir, trainer.resume_mode, trainer.resume_from_path, warn, clean)
    if found:
        state = found.state()
        for line in refuse_changed_settings(config, state["critical"]):
            warn(line)
        for line in changed_code(code, state.get("code", {})):
            warn(line)
    return found


def nothing_left(plan: Plan, checkpoint: checkpoints.Checkpoint | None) -> bool:
    """Whether the checkpoint to resume from is already from the last step."""
    if checkpoint is None or plan.total_steps is None:
        return False
    return checkpoint.step >= plan.total_steps


def prestart_workers(placement: Placement, plan: Plan) -> None:
    """Start the processes of every role and let them import what they need. Returns at once."""
    for role in plan.roles:
        modules = preloads(role)
        if role == "rollout":
            engine = ENGINES.get(plan.rollout_name, plan.rollout_name)
            modules.append(engine.partition(":")[0])
        prestart(placement, role, *modules)


def preloads(role: str) -> list[str]:
    """Return the modules that a role's processes import before they are built."""
    return [ROLES[role].worker.partition(":")[0], *ROLES[role].preload]


def refuse_changed_settings(config: Config, saved: dict[str, Any]) -> list[str]:
    """Refuse to resume with settings that would change the numbers.

    Args:
        saved: the checkpoint's `critical_settings`.

    Returns:
        See `refuse_changes`.

    Raises:
        RunRefused: lists every setting that differs.
    """
    return refuse_changes(critical_settings(config), saved)


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


def validate_reward_fn(
    config: Config, train: RowFiles, val: RowFiles | None, warn: Callable[[str], None]
) -> None:
    """Load the reward function and try it on ground-truth answers, or check the reward service.

    With trainer.debug it is only loaded: breakpoint() must not stop in it here.

    This scorer is only for the check; each rollout worker has its own.

    Raises:
        UnknownDataSource: a data source has no scorer.
        DataError: a row for a built-in scorer has no ground truth.
        FunctionError: the user's function cannot be loaded, or has the wrong parameters.
        ServiceMissing: the reward service does not answer.
        RunRefused: the variable with the service's token is not set.
    """
    sources = train.data_sources()
    if val:
        sources = sources + val.data_sources()
    try:
        scorer = Scorer(scorer_spec(config.custom_reward_function, config.reward))
    except TokenError as error:
        raise RunRefused(str(error)) from error
    with closing(scorer):
        if scores_remotely(config.reward):
            try:
                warning = scorer.check_service()
            except FunctionError as error:
                raise ServiceMissing(str(error)) from error
            if warning:
                warn(warning)
            return
        scorer.check_signature(sources)
        if config.custom_reward_function.path is None:
            refuse_missing_answers(train, val)
        by_environment = config.custom_reward_function.path == environment_reward.NAME
        if config.trainer.debug or by_environment or not config.reward.check_ground_truth:
            return
        warning = scorer.self_check(train.answers(ANSWERS_TO_CHECK)).warning()
        if warning:
            warn(warning)


def refuse_missing_answers(*splits: RowFiles | None) -> None:
    """Raise DataError if a row has no ground truth, which built-in scorers compare with."""
    for rows in splits:
        name = rows.without_answer() if rows else None
        if name:
            raise DataError(
                f"{name}: reward_model.ground_truth is null, and the built-in scorers compare "
                "responses with it. Give the answer, drop the row, or score with "
                "custom_reward_function.path"
            )


def check_tools(config: Config, plan: Plan, warn: Callable[[str], None]) -> None:
    """Ask the environment whether its tools answer. Does nothing for single-turn runs.

    Raises:
        ServiceMissing: the tools do not answer.
        RunRefused: `env.name` cannot be built.
    """
    if not plan.max_turns:
        return
    try:
        warning = check_env_factory(build_env_factory(env_spec(config)))
    except ToolError as error:
        raise ServiceMissing(str(error)) from error
    except ValueError as error:
        raise RunRefused(str(error)) from error
    if warning:
        warn(warning)


def check_servers(
    config: Config, plan: Plan, say: Callable[[str], None], warn: Callable[[str], None]
) -> None:
    """Ask the generation servers, if the run has any, whether they fit the run.

    Args:
        say: prints that the run waits for them.

    Raises:
        ServiceMissing: none answers within rollout.server_wait_s.
        RunRefused: one cannot be used.
    """
    if not plan.servers:
        return
    # With device=auto a joined cluster decides the device, and that the default of the dtype.
    dtype = None if config.trainer.device == "auto" else plan.rollout_dtype
    needs = Needs(plan.max_model_len, vocab_size(config.actor_rollout_ref.model), dtype)
    try:
        policy = config.actor_rollout_ref
        warning = fit.check(generation_spec(policy.rollout, policy.model), needs, say)
    except NoServer as error:
        raise ServiceMissing(str(error)) from error
    except ValueError as error:
        raise RunRefused(str(error)) from error
    if warning:
        warn(warning)


def vocab_size(model: ModelConfig) -> int | None:
    """Return the vocabulary's size by the model's config.json; None if that does not say it."""
    try:
        values = read_json(Path(model.path) / "config.json")
        size = values.get("text_config", values)["vocab_size"]
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return None
    return size if isinstance(size, int) else None


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


def connect_ray(config: Config, plan: Plan, address: str | None, stop: Stop) -> Cluster:
    """Connect to Ray at `address`, or start a new cluster for "local". Raises NoCluster."""
    ray_init = config.ray_kwargs.ray_init
    wait_s = config.ray_kwargs.wait_s
    forkable = not visible_gpus()  # imports may look at the GPUs, which no fork can use then
    return connect(
        config.trainer.default_local_dir,
        address=address,
        num_cpus=ray_init.num_cpus,
        slots=plan.n_devices,
        call_timeout_s=config.trainer.phase_timeout_s,
        heartbeat_timeout_s=config.trainer.heartbeat_timeout_s,
        environment=ray_init.runtime_env.env_vars,
        py_executable=ray_init.runtime_env.py_executable,
        debugger=debug.debugger(config),
        stops_at_failures=debug.stops_at_failures(config),
        wait_s=config.trainer.resource_wait_s if wait_s is None else wait_s,
        preload=[name for role in plan.roles for name in preloads(role)] if forkable else [],
        on_lost=functools.partial(end_at_once, stop, Path(config.trainer.default_local_dir)),
        warn=stop.warn,
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
        env_vars=plan.env_vars,
        python=plan.python,
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
    for section, key in (
        (config.custom_reward_function, "path"),
        (config.data.custom_cls, "path"),
        (config.data.sampler, "class_path"),
    ):
        place = getattr(section, key)
        if place and names_a_file(place):
            setattr(section, key, absolute(place))
    tools = config.env.kwargs.get(TOOLS)
    if isinstance(tools, str):
        config.env.kwargs[TOOLS] = absolute(tools)
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
