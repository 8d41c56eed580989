"""What `verlite launch hostfile` runs: the two files and a training command, checked."""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verlite.config import aliases
from verlite.config.load import Loaded, compose, parse_argv, with_home
from verlite.config.plan import files_of, reference_urls
from verlite.config.problems import ConfigError, Note, Problem
from verlite.config.schema import Config
from verlite.launch.hostfile import Host, read_hostfile
from verlite.launch.nodes_file import Nodes, read_nodes

NODES, DEVICES = "trainer.nnodes", "trainer.n_gpus_per_node"
ELSEWHERE = ("trainer.device", DEVICES, "actor_rollout_ref.rollout.name")
"""Keys whose problems on this machine may not exist on the hosts."""
PLAIN = re.compile(r"[\w./~@%+-]+(:[\w./@%+-]+)*")
"""Values that Hydra's grammar takes without quotes."""
PASSED = re.compile(
    r"PYTHONPATH|OMP_NUM_THREADS|OMP_WAIT_POLICY|GOMP_SPINCOUNT|TENSORBOARD_DIR|VERLITE_CLUSTER_DIR|NO_PROXY|HTTPS?_PROXY"
    r"|(HF|NCCL|GLOO|UCX|WANDB|TORCH|VLLM|TRANSFORMERS|TOKENIZERS)_\w+"
    r"|VERLITE_\w+_TOKEN|VERLITE_VERL_COMPAT",
    re.IGNORECASE,
)
"""Environment variables of the launcher that the hosts get."""


@dataclass(frozen=True)
class HostsRun:
    """A checked run.

    Attributes:
        hosts: the head first.
        nodes: the content of nodes.yaml.
        services: (name, base address, variable with its bearer token or "") of the services
            that the run uses.
        arguments: of verlite.main_ppo.
        gpus: the run uses GPUs; otherwise a slot is a CPU slot.
        model: the model's folder; "" for a name on the hub.
        run_dir, logs: absolute folders on a file system that all hosts share.
    """

    hosts: list[Host]
    nodes: Nodes
    services: list[tuple[str, str, str]]
    arguments: list[str]
    gpus: bool
    model: str
    run_dir: Path
    logs: Path


def plan_run(
    nodes_path: Path, hostfile: Path, arguments: list[str], root: Path
) -> tuple[HostsRun, list[Note]]:
    """Return the run of the two files and the arguments of main_ppo, and notes for the user.

    Raises:
        ConfigError: with every problem of the files and of the configuration.
    """
    problems: list[Problem] = []
    try:
        hosts = read_hostfile(hostfile)
    except ConfigError as error:
        hosts = []
        problems += error.problems
    try:
        nodes = read_nodes(nodes_path)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    if problems:
        raise ConfigError(problems)
    hosts = _head_first(hosts, nodes, nodes_path, hostfile)
    name, folder, overrides, help_wanted = parse_argv(arguments)
    if help_wanted:
        raise ConfigError([Problem("--help", None, "stands after --", "Give it before the --.")])
    overrides = with_home(overrides)
    typed = {_current_name(text) for text in overrides}
    settings = nodes.settings(root)
    notes = [
        Note(f"{key} is set after --, so that of {nodes_path} has no effect")
        for key in settings
        if key in typed
    ]
    settings = {key: value for key, value in settings.items() if key not in typed}
    of_file = [override(key, value) for key, value in settings.items()]
    given = compose(name, [*of_file, *overrides], folder, check=False)
    problems = list(_conflicts(given, hosts))
    settings |= {NODES: len(hosts), DEVICES: hosts[0].slots}
    if given.config.trainer.device != "cpu" and "trainer.device" not in given.user_keys:
        settings["trainer.device"] = "cuda"  # CPU slots must not replace GPUs that are missing
    kept = [text for text in overrides if _current_name(text) not in (NODES, DEVICES)]
    everything = [*(override(key, value) for key, value in settings.items()), *kept]
    try:
        loaded = _checked(name, everything, folder)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    if problems:
        raise ConfigError(problems)
    options = [f"--config-name={name}"] if name else []
    options += [f"--config-path={folder}"] if folder else []
    run = _run(hosts, nodes, loaded, [*options, *everything], root)
    return run, [*loaded.notes, *notes]


def override(key: str, value: Any) -> str:
    """Return key=value in Hydra's grammar."""
    if isinstance(value, list):
        return f"{key}=[{','.join(_quoted(item) for item in value)}]"
    return f"{key}={_quoted(value)}"


def passed_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the hosts get."""
    return {name: value for name, value in environment.items() if PASSED.fullmatch(name)}


def _quoted(value: Any) -> str:
    text = str(value)
    if isinstance(value, int) or (PLAIN.fullmatch(text) and not text.isdecimal()):
        return text
    # Hydra reads a backslash as an escape only before a quote.
    escaped = re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), text)
    return f"'{escaped}'"


def _head_first(hosts: list[Host], nodes: Nodes, nodes_path: Path, hostfile: Path) -> list[Host]:
    """Return the hosts with master_node at the front.

    Raises:
        ConfigError: the hostfile does not have it.
    """
    head = [host for host in hosts if nodes.master_node in (host.target, host.name)]
    if not head:
        rule = f"is not in {hostfile}, which has {', '.join(host.name for host in hosts)}"
        remedy = "The head is one of the training hosts: write it as in the hostfile."
        key = f"{nodes_path}: training.master_node"
        raise ConfigError([Problem(key, nodes.master_node, rule, remedy)])
    return [*head, *(host for host in hosts if host not in head)]


def _conflicts(given: Loaded, hosts: list[Host]) -> Iterator[Problem]:
    """Check the typed settings against what the files say."""
    trainer = given.config.trainer
    for key, typed, value, what in (
        (NODES, trainer.nnodes, len(hosts), "hosts"),
        (DEVICES, trainer.n_gpus_per_node, hosts[0].slots, "slots of a host"),
    ):
        if key in given.user_keys and typed != value:
            rule = f"the hostfile has another number of {what}: {value}"
            yield Problem(key, typed, rule, "Leave the key out, or correct the hostfile.")
    address = given.config.ray_kwargs.ray_init.address
    if address is not None:
        rule = "the launcher starts a Ray cluster of its own"
        yield Problem("ray_kwargs.ray_init.address", address, rule, "Leave it out.")


def _checked(name: str | None, overrides: list[str], folder: str | None) -> Loaded:
    """Check the configuration. What only the hosts need is not a problem here.

    Raises:
        ConfigError: with every other problem.
    """
    try:
        return compose(name, overrides, folder)
    except ConfigError as error:
        serious = [p for p in error.problems if not (p.is_local and p.key in ELSEWHERE)]
        if serious:
            raise ConfigError(serious) from None
        return compose(name, overrides, folder, elsewhere=True)


def _run(
    hosts: list[Host], nodes: Nodes, loaded: Loaded, arguments: list[str], root: Path
) -> HostsRun:
    config = loaded.config
    model = config.actor_rollout_ref.model.path or ""
    return HostsRun(
        hosts,
        nodes,
        list(_services(config)),
        arguments,
        config.trainer.device != "cpu",
        model if os.path.isabs(model) or Path(model).is_dir() else "",
        Path(root, config.trainer.default_local_dir),
        Path(root, nodes.logs),
    )


def _services(config: Config) -> Iterator[tuple[str, str, str]]:
    """Yield the services that the run uses, as HostsRun.services."""
    policy = config.actor_rollout_ref
    rollout = policy.rollout
    if rollout.name == "server":
        for url in files_of(rollout.servers):
            yield "generation", url.rstrip("/"), rollout.server_token_env or ""
    for url in reference_urls(config):
        yield "reference", url.rstrip("/"), policy.ref.token_env or ""


def _current_name(override: str) -> str:
    """Return the key of an override under its current name."""
    key = override.partition("=")[0].lstrip("+~")
    return aliases.renamed(key) or key
