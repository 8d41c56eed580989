"""Plan a Slurm job that trains on several nodes, and write its script.

The script (templates/slurm.sbatch) runs Ray in a background step, one Ray node per machine, and the
driver in a step on the first node. Slurm's signals reach the driver, which writes a checkpoint and
exits with 75; the script then puts the job back into the queue. It is meant to be read and changed
by its user.
"""

import os
import re
import shlex
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from verlite import hub
from verlite.config.commands import PPO
from verlite.config.load import Loaded, compose
from verlite.config.plan import computes_teacher, needs_critic
from verlite.config.problems import Note, Problem
from verlite.config.schema import Config
from verlite.config.sources import from_command_line
from verlite.launch import training
from verlite.launch.slurm_options import Options, Runtime
from verlite.launch.training import DEVICES, NODES
from verlite.masking import URL_SECRET, display, is_secret

PASSED = (
    "VERLITE_CLUSTER_DIR",
    "VERLITE_VERL_COMPAT",
    "HOME",
    "USER",
    "PYTHONPATH",
    "PYTHONUNBUFFERED",
    "OMP_NUM_THREADS",
    "VERLITE_THREADS",
    "OMP_WAIT_POLICY",
    "GOMP_SPINCOUNT",
    "HF_HOME",
    "HF_TOKEN",
    "HF_HUB_OFFLINE",
    "WANDB_API_KEY",
    "NCCL_DEBUG",
    "NCCL_IB_HCA",
    "NCCL_IB_GID_INDEX",
    "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME",
)
"""Environment variables that a container gets from the job."""
VISIBLE = {
    False: ("CUDA_VISIBLE_DEVICES",),
    True: ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "HSA_NO_SCRATCH_RECLAIM"),
}
"""The same for GPUs, by whether they are AMD's."""


CPUS_PER_GPU = 4
"""Cores of a machine per GPU if --cpus-per-task is not given: for Ray, rewards and data."""
OWN_OPTIONS = {
    **{
        name: f"--{name}"
        for name in "nodes time mem partition account qos job-name cpus-per-task gpus-per-node "
        "output requeue no-requeue".split()
    },
    "error": "--output, which gets the errors too",
    "mem-per-cpu": "--mem, which is per node",
    "mem-per-gpu": "--mem, which is per node",
    "ntasks": "nothing: Ray starts the workers",
    "ntasks-per-node": "nothing: Ray starts the workers",
    "ntasks-per-gpu": "nothing: Ray starts the workers",
    "gpus": "--gpus-per-node",
    "gpus-per-task": "--gpus-per-node",
    "signal": "--grace",
    "chdir": "the working folder",
    "open-mode": "nothing: the output is appended to",
    "export": "export in your shell; sbatch passes its environment to the job",
    "export-file": "export in your shell; sbatch passes its environment to the job",
}
"""Options of sbatch that the script sets itself or relies on, and what to use instead."""
TYPED_SECRET = re.compile(
    r"""(?:
        (?:^|(?<=[\s=,;&|('"{]))-*(?P<name>\w[\w.-]*)=
        |(?:^|(?<=\s))--(?P<flag>\w[\w-]*)\s+(?!-)
        |(?P<header>\w[\w-]*):\s*(?:bearer|basic|token)\s+
    )
    (?=["']?(?P<value>[^\s,;&|)'"]+))""",
    re.IGNORECASE | re.VERBOSE,
)
"""What may be a secret in a command: NAME=value, --name value and a header of HTTP."""
SHM_SIZE = "128g"
"""Limit of /dev/shm in containers, which holds Ray's objects and NCCL's buffers."""
NODE_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm", "/run")
"""Folders that are usually each node's own."""


@dataclass(frozen=True)
class SlurmJob:
    """A Slurm job that runs verlite.main_ppo.

    Attributes:
        options: what the user asked for, with the defaults of `filled_in`.
        arguments: arguments of main_ppo, without trainer.nnodes and trainer.n_gpus_per_node.
        folder: working folder, on a file system that all nodes share.
        devices: of a node: GPUs, or CPU slots if `gpus` is False.
        downloads: models on the Hugging Face hub.
        environment: names and values that the script exports.
    """

    options: Options
    arguments: tuple[str, ...]
    folder: str
    devices: int
    gpus: bool
    downloads: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()


def filled_in(options: Options, devices: int, gpus: bool) -> Options:
    """Return the options with the defaults that follow from others.

    devices: of a node: GPUs, or CPU slots if `gpus` is False.
    """
    return replace(
        options,
        cpus_per_task=options.cpus_per_task or devices * (CPUS_PER_GPU if gpus else 1),
        container_runtime=options.container_runtime or Runtime.podman,
        shm_size=options.shm_size or SHM_SIZE,
        python=options.python or ("python3" if options.container else sys.executable),
    )


def plan_job(options: Options, arguments: list[str]) -> tuple[SlurmJob, list[Note]]:
    """Return the job of a training command in the current folder, and notes for the user.

    Args:
        arguments: arguments of main_ppo.

    Raises:
        ConfigError: with every problem of the options and of the configuration.
    """
    name, path, overrides = training.parse(arguments)
    given = compose(name, overrides, path, check=False)
    config = given.config
    gpus = config.trainer.device != "cpu"
    nodes = options.nodes or config.trainer.nnodes
    devices = options.gpus_per_node or config.trainer.n_gpus_per_node
    problems = [*_option_problems(options, given, devices), *_secrets(overrides)]
    kept = training.for_other_machines(given, overrides)
    shape = [f"{NODES}={nodes}", f"{DEVICES}={devices}"]
    # Files in a container, or that --prepare writes, are checked by the job itself.
    files_later = bool(options.container or options.prepare)
    loaded = training.checked(name, [*kept, *shape], path, problems, files_later)
    job_name = re.sub(r"[^\w.-]+", "-", options.job_name or config.trainer.experiment_name)
    own_path = os.environ.get("PYTHONPATH")
    job = SlurmJob(
        options=replace(filled_in(options, devices, gpus), nodes=nodes, job_name=job_name),
        arguments=(*training.options(name, path), *kept),
        folder=os.getcwd(),
        devices=devices,
        gpus=gpus,
        downloads=tuple(_hub_models(config)),
        environment=(("PYTHONPATH", own_path),) if own_path and not options.container else (),
    )
    return job, [*loaded.notes, *map(Note, _notes(options, loaded, nodes))]


def _option_problems(options: Options, given: Loaded, devices: int) -> Iterator[Problem]:
    """Check the options alone, and against the configuration."""
    config = given.config
    for option, value, key, what in (
        ("--nodes", options.nodes, NODES, "machines"),
        ("--gpus-per-node", options.gpus_per_node, DEVICES, "devices of a machine"),
    ):
        typed = config.trainer.nnodes if key == NODES else config.trainer.n_gpus_per_node
        if value is not None and key in given.user_keys and typed != value:
            rule = f"{key}={typed} gives another number of {what}"
            yield Problem(option, value, rule, f"Leave {key} out; the script sets it.")
    if config.trainer.device == "cpu":
        if options.gpus_per_node is not None:
            rule = "trainer.device=cpu would leave the GPUs unused"
            remedy = f"Leave one of the two out. CPU slots of a machine: {DEVICES}."
            yield Problem("--gpus-per-node", options.gpus_per_node, rule, remedy)
        if options.rocm:
            yield Problem("--rocm", None, "trainer.device=cpu uses no GPU", "Leave one out.")
    elif options.gpus_per_node is None and DEVICES not in given.user_keys:
        rule = "must be given: GPUs of a machine"
        yield Problem("--gpus-per-node", None, rule, "To train on CPUs: trainer.device=cpu.")
    if options.cpus_per_task is not None and options.cpus_per_task < devices:
        rule = f"each of the {devices} devices of a machine needs a core"
        yield Problem("--cpus-per-task", options.cpus_per_task, rule, f"Use at least {devices}.")
    yield from training.own_cluster(given, "the job")
    mode = config.trainer.resume_mode
    if options.requeue and mode != "auto":
        rule = "a job that starts again would lose its progress, and --requeue is on"
        remedy = "Use trainer.resume_mode=auto, or --no-requeue."
        yield Problem("trainer.resume_mode", mode, rule, remedy)
    yield from _sbatch_problems(options)
    yield from _container_problems(options)
    yield from _typed_secrets(options)


def _sbatch_problems(options: Options) -> Iterator[Problem]:
    if options.time is not None:
        limit = limit_seconds(options.time)
        if limit is None:
            rule = "is not a time of Slurm"
            remedy = "Such as 1-12:00:00, 12:00:00, 90 or UNLIMITED."
            yield Problem("--time", options.time, rule, remedy)
        elif 0 < limit <= options.grace:
            rule = f"--time={options.time} is not longer, so the job would stop at once"
            yield Problem("--grace", options.grace, rule, "Raise --time, or lower --grace.")
    if not re.fullmatch(r"\d+[KMGT]?", options.mem):
        rule = "is not a size of Slurm"
        yield Problem("--mem", options.mem, rule, "Such as 200G; 0 is all memory of a machine.")
    yield from _line_problems(options)
    folder = Path(os.getcwd(), options.output).parent
    if "%" not in str(folder) and not folder.is_dir():
        rule = f"the folder {folder} does not exist, and Slurm would end the job without a message"
        yield Problem("--output", options.output, rule, "Create it.")
    for option in options.sbatch:
        if _typed_secret(option):
            continue  # its own problem, which does not show it
        name = option.lstrip("-").partition("=")[0]
        if not re.fullmatch(r"--[a-z][a-z-]*(=.*)?", option):
            rule = "is not a long option of sbatch"
            yield Problem("--sbatch", option, rule, "Such as --sbatch=--nodelist=gpu-[0-3].")
        elif name in OWN_OPTIONS:
            rule = "the script sets this option itself, or relies on its default"
            yield Problem("--sbatch", option, rule, f"Use {OWN_OPTIONS[name]}.")


def _line_problems(options: Options) -> Iterator[Problem]:
    """Check that a text stays one word of its #SBATCH line."""
    for name in ("partition", "account", "qos"):
        value = getattr(options, name)
        if value is not None and not re.fullmatch(r"[^\s#\"'\\]+", value):
            rule = "is not a name: it is empty, or has a space, quote, backslash or #"
            yield Problem(f"--{name}", value, rule, "Names are listed by sinfo and sacctmgr.")
    if options.job_name is not None and re.search(r"[\r\n]", options.job_name):
        yield Problem("--job-name", options.job_name, "has more than one line", "Use one line.")
    for name, path in (("--output", options.output), ("the working folder", os.getcwd())):
        if re.search(r"[\"'\\\r\n]", path):
            rule = "has a quote, backslash or newline, which sbatch would not read as a part of it"
            yield Problem(name, path, rule, "Use another name.")


def _container_problems(options: Options) -> Iterator[Problem]:
    if options.container is None:
        for option, value in (
            ("--container-runtime", options.container_runtime),
            ("--mount", " ".join(options.mount) or None),
            ("--shm-size", options.shm_size),
        ):
            if value is not None:
                yield Problem(option, value, "has no effect without --container", "Name the image.")
    for mount in options.mount:
        if not mount.startswith("/") or ":" in mount:
            rule = "is not an absolute path; a folder has the same path in the container"
            yield Problem("--mount", mount, rule, "Such as --mount /data.")
    if options.shm_size is not None and not re.fullmatch(r"\d+[kmgKMG]", options.shm_size):
        yield Problem("--shm-size", options.shm_size, "is not a size", "Such as 128g.")


def _secrets(overrides: list[str]) -> Iterator[Problem]:
    """Secrets must not be in a file that others may read, or on a command line."""
    for assignment in from_command_line(overrides, None)[0]:
        key = assignment.key
        shown = display(key, assignment.value, key in PPO.keys)
        if "***" in shown and "***" not in str(assignment.value):
            rule = "the script would contain this secret"
            remedy = f"Export it as a variable and write '{key}=${{oc.env:NAME}}'."
            yield Problem(key, "***", rule, remedy)


def _typed_secrets(options: Options) -> Iterator[Problem]:
    """Check the commands that the script contains as they are typed."""
    typed = [
        *(("--prepare", command) for command in options.prepare),
        *(("--sbatch", option) for option in options.sbatch),
        ("--python", options.python or ""),
    ]
    for option, text in typed:
        name = _typed_secret(text)
        if not name:
            continue
        if not re.fullmatch(r"[A-Z_][A-Z0-9_]*", name):  # not a variable
            remedy = "Export it as a variable in your shell"
            remedy += ' and write "$NAME" here' if option == "--prepare" else ""
        else:
            remedy = f"Export {name} in your shell and leave it out here"
        remedy += "; sbatch passes the environment to the job."
        if options.container and name not in PASSED:
            remedy += " For the container, add its name to passed=(...) in the script."
        yield Problem(option, "***", f"the script would contain this secret, {name}", remedy)


def _typed_secret(text: str) -> str | None:
    """Return the name of the first secret in a command, or None. $NAME and $(...) are none."""
    for found in TYPED_SECRET.finditer(text):
        name = found["name"] or found["flag"] or found["header"]
        value: str | int = found["value"]
        if found["value"].startswith(("$", "`")):
            continue
        if re.fullmatch(r"true|false|null|none", found["value"], re.IGNORECASE):
            continue
        if found["value"].isdecimal():
            value = int(found["value"])
        if is_secret(name.replace("-", "_"), value):
            return name
    for found in URL_SECRET.finditer(text):
        if not found[0].removeprefix(found[1] or found[2]).startswith("$"):
            return "in a URL"
    return None


def _hub_models(config: Config) -> Iterator[str]:
    """Yield the models that are names on the hub, not folders."""
    paths: list[str | None] = [config.actor_rollout_ref.model.path]
    if needs_critic(config):
        paths.append(config.critic.model.path)
    if computes_teacher(config):
        paths.append(config.distillation.teacher_models.teacher_model.model_path)
    for path in dict.fromkeys(paths):
        if path and "/" in path and hub.NAME.fullmatch(path) and not Path(path).exists():
            yield path


def _notes(options: Options, loaded: Loaded, nodes: int) -> Iterator[str]:
    for problem in loaded.lacking:
        yield f"on this machine {problem.brief()}. The job checks it again before Ray starts"
    if nodes > 1:
        for what, path in (
            ("the working folder", os.getcwd()),
            ("trainer.default_local_dir", loaded.config.trainer.default_local_dir),
        ):
            if path.startswith(tuple(f"{folder}/" for folder in NODE_FOLDERS)):
                yield f"{what} {path} must be shared by all nodes, which /tmp and the like are not"


def limit_seconds(limit: str) -> int | None:
    """Return a time limit of Slurm in seconds, 0 for no limit, or None if it is not one.

    Slurm's forms are M, M:S, H:M:S, D-H, D-H:M, D-H:M:S, UNLIMITED and INFINITE. 0 means no limit.
    """
    if limit.upper() in ("UNLIMITED", "INFINITE"):
        return 0
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", limit)
    if not found:
        return None
    days, *rest = found.groups()
    parts = [int(part) for part in rest if part is not None]
    if days is None and len(parts) < 3:
        parts = [0, *parts]
    hours, minutes, seconds = (*parts, 0, 0)[:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


class Typed(str):
    """A text that stands in a script as it is."""


def script(job: SlurmJob) -> str:
    """Return the text of the sbatch script.

    The template's expressions become one word of the shell each, unless a filter says otherwise:
    `line` writes a path for an #SBATCH line, where a # would start a comment; `typed` changes
    nothing.
    """
    templates = Environment(
        loader=PackageLoader("verlite.launch"),
        trim_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
        finalize=lambda value: value if isinstance(value, Typed) else shlex.quote(str(value)),
    )
    templates.filters["typed"] = Typed
    templates.filters["line"] = _for_sbatch
    names = " ".join([*PASSED, *(VISIBLE[job.options.rocm] if job.gpus else ())])
    limit = job.options.time
    values: dict[str, Any] = {field: getattr(job, field) for field in SlurmJob.__annotations__}
    return templates.get_template("slurm.sbatch").render(
        values,
        passed=textwrap.fill(names, 88, subsequent_indent="    "),
        unlimited=limit is not None and limit_seconds(limit) == 0,
    )


def _for_sbatch(text: str) -> Typed:
    return Typed(f'"{text}"' if re.search(r"[\s#]", text) else text)
