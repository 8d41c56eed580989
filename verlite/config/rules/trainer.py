"""Validation, checkpoints, addresses and the run directory."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verlite.config import debug, plan
from verlite.config.problems import Problem
from verlite.config.rules.context import Context
from verlite.config.rules.declared import duration_s
from verlite.spec.catalog import TRACKERS

ADDRESS = "ray_kwargs.ray_init.address"
ENV_VARS = "ray_kwargs.ray_init.runtime_env.env_vars"
RESUME = "trainer.resume_from_path"
JOB_COPY = "/runtime_resources/working_dir_files/"
"""Where Ray puts the folder of `ray job submit --working-dir` on each node."""
SET_BY_VERLITE = {
    "RAY_ADDRESS": f"names the cluster, which is joined before; {ADDRESS} does it",
    **dict.fromkeys(
        ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
        "is set in each worker to its own devices",
    ),
}
"""Environment variables that a run cannot choose for its workers -> why."""


def length_and_resume(context: Context) -> Iterator[Problem]:
    """The wall time is a duration, and a checkpoint to resume from is named."""
    yield from run_section(context.config.trainer)


def run_section(trainer: Any) -> Iterator[Problem]:
    """Check the keys of schema.RunConfig, without looking at files."""
    if trainer.resume_mode == "resume_path" and not trainer.resume_from_path:
        rule = "must be given with trainer.resume_mode=resume_path"
        yield Problem(RESUME, None, rule, "Give the global_step_N folder of a checkpoint.")
    text = trainer.max_runtime
    if text is None:
        return
    try:
        duration_s(text)
    except ValueError as error:
        yield Problem("trainer.max_runtime", text, str(error), "Use null for no limit.")


def addresses(context: Context) -> Iterator[Problem]:
    """Addresses of cluster and services are well formed."""
    config = context.config
    address = config.ray_kwargs.ray_init.address
    if address and address not in ("auto", "local"):
        yield from _cluster_address(address)
    yield from _reference_address(f"{plan.REF}url", config.actor_rollout_ref.ref.url)
    yield from _reference_address(f"{plan.TEACHER}url", context.teacher.url)
    for key, urls, example in (
        ("retriever.url", config.retriever.url, "http://127.0.0.1:8000/retrieve"),
        ("reward.remote.url", config.reward.remote.url, "http://127.0.0.1:5000/get_reward"),
    ):
        for url in plan.files_of(urls):
            if re.match(r"https?://[^/\s]+", url):
                yield from _port(key, url)
            else:
                yield Problem(key, url, "is not an http address", f"Such as {example}.")


def _reference_address(key: str, value: Any) -> Iterator[Problem]:
    if value is not None and not plan.files_of(value):
        yield Problem(key, value, "is empty", "Give an address; null: no service.")
    for url in plan.files_of(value):
        if re.fullmatch(r"https?://[^/\s]+/?", str(url)):
            yield from _port(key, str(url))
        else:
            rule = "is not the http address of a service"
            yield Problem(key, url, rule, "Such as http://127.0.0.1:8001, without a path.")


def environment(context: Context) -> Iterator[Problem]:
    """Environment variables of the workers have legal names, and do not move the run."""
    for name, value in context.config.ray_kwargs.ray_init.runtime_env.env_vars.items():
        key = f"{ENV_VARS}.{name}"
        if name in SET_BY_VERLITE:
            remedy = "Leave it out; export it where Ray is started, if it is meant for the node."
            yield Problem(key, value, SET_BY_VERLITE[name], remedy)
        elif not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            rule = "is not the name of an environment variable"
            yield Problem(key, value, rule, "Letters, digits and _ are legal.")


def _cluster_address(address: str) -> Iterator[Problem]:
    wrong_port = list(_port(ADDRESS, address))
    yield from wrong_port
    if not wrong_port and "://" in address:
        yield Problem(
            ADDRESS,
            address,
            "is an address for clients, but this process must run inside the cluster",
            f"Submit it: ray job submit --address={address} -- python -m verlite.main_ppo ...; "
            "or give the host:port that `ray start --head` printed.",
        )


def _port(key: str, address: str) -> Iterator[Problem]:
    host = address.rsplit("@", 1)[-1].partition("://")
    match = re.fullmatch(
        r"(?:\[[^\]]*\]|[^:/\[\]]*):(\w*)(?:/.*)?", host[2] if host[1] else host[0]
    )
    if match and not (match[1].isdigit() and 1 <= int(match[1]) <= 65535):
        yield Problem(key, address, f"{match[1] or 'nothing'} is not a port", "Ports are 1-65535.")


def run_directory(context: Context) -> Iterator[Problem]:
    """The run directory can be written, and the checkpoint to resume from exists."""
    trainer = context.config.trainer
    yield from run_folders(trainer)
    if JOB_COPY in os.path.abspath(trainer.default_local_dir):
        yield Problem(
            "trainer.default_local_dir",
            trainer.default_local_dir,
            "is in the job's copy of the folder of `ray job submit --working-dir`, which Ray "
            "removes",
            "Give an absolute path on a shared folder.",
        )


def run_folders(trainer: Any) -> Iterator[Problem]:
    """Check the run directory, and the checkpoint to resume from."""
    yield from unwritable("trainer.default_local_dir", trainer.default_local_dir)
    path = trainer.resume_from_path
    if trainer.resume_mode != "resume_path" or not path:
        return
    folder = Path(path)
    if not re.fullmatch(r"global_step_\d+", folder.name):
        inside = sorted(entry.name for entry in folder.glob("global_step_*"))
        remedy = (
            f"It contains {', '.join(inside)}."
            if inside
            else "Give the global_step_N folder itself."
        )
        yield Problem(RESUME, path, "is not a global_step_N folder", remedy)
    elif not folder.is_dir():
        what = "is a file, not a folder" if folder.is_file() else "does not exist"
        yield Problem(RESUME, path, what, "trainer.resume_mode=auto finds the newest checkpoint.")


def unwritable(key: str, value: str) -> Iterator[Problem]:
    """Report why the folder that a key names cannot be created or written."""
    folder = Path(value).expanduser()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        rule = f"{folder} is a file, so the run directory cannot be created"
        yield Problem(key, value, rule, "Choose another.")
    elif not os.access(folder, os.W_OK | os.X_OK):
        rule = f"{folder.resolve()} is not writable"
        yield Problem(key, value, rule, "Choose another, or change its permissions.")


def debugger_is_installed(context: Context) -> Iterator[Problem]:
    """The debugger can be imported."""
    if debug.debugger(context.config) == debug.DEBUGPY and not plan.installed("debugpy"):
        by_variable = not context.config.trainer.debug
        name = "RAY_DEBUG_POST_MORTEM" if debug.stops_at_failures(context.config) else "RAY_DEBUG"
        yield Problem(
            name if by_variable else "trainer.debug",
            1 if by_variable else True,
            "the package debugpy is not installed here",
            "Install verlite[debug], or use Ray's legacy debugger: RAY_DEBUG=legacy in the "
            "environment.",
        )


def trackers_are_installed(context: Context) -> Iterator[Problem]:
    """The packages of the trackers can be imported."""
    yield from missing_trackers(context.config.trainer.logger)


def missing_trackers(loggers: list[str]) -> Iterator[Problem]:
    """Report each tracker whose package is not installed."""
    for name in loggers:
        if name in TRACKERS and not plan.installed(name):
            yield Problem(
                "trainer.logger",
                name,
                f"the package {name} is not installed here",
                f"pip install {name}, or leave it out: metrics.jsonl has every step.",
                is_local=True,
            )
