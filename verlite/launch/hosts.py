"""`verlite launch hostfile`: check the two files and a training command, check the hosts, start
Ray, train, stop what was started."""

import json
import os
import re
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from verlite import threads
from verlite.config.load import Loaded, compose
from verlite.config.override_text import override
from verlite.config.plan import files_of, reference_urls, teacher_urls
from verlite.config.problems import ConfigError, Note, Problem
from verlite.config.schema import Config
from verlite.launch import ClusterError, training
from verlite.launch.head import Say
from verlite.launch.host_check import Expected, versions
from verlite.launch.hostfile import Host, Nodes, read_hostfile, read_nodes
from verlite.launch.session import SSH_FAILED, Heart, Remote, Session, end_all
from verlite.launch.training import DEVICES, NODES

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
    name, folder, overrides = training.parse(arguments)
    typed = {training.current_name(text) for text in overrides}
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
    kept = training.for_other_machines(given, overrides)
    everything = [*(override(key, value) for key, value in settings.items()), *kept]
    loaded = training.checked(name, everything, folder, problems)
    run = _run(hosts, nodes, loaded, [*training.options(name, folder), *everything], root)
    return run, [*loaded.notes, *notes]


def passed_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the hosts get."""
    given = threads.undivided(environment)
    return {name: value for name, value in given.items() if PASSED.fullmatch(name)}


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
    yield from training.own_cluster(given, "the launcher")


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
    for url in teacher_urls(config):
        teacher = config.distillation.teacher_models.teacher_model
        yield "reference", url.rstrip("/"), teacher.token_env or ""


RAY_STOP_S = 60.0
"""How long a host's Ray gets to end."""
CHECK_S = 120.0
"""How long the check of a host may take, in addition to waiting for services."""
DRIVER_NOTICES_S = 90.0
"""After a host was lost: how long the driver gets to report it and to end by itself."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Interrupted(Exception):
    """A signal ended the launcher before the training began."""


@dataclass(eq=False)
class Launcher:
    """Runs one training. Use `run` once, in the main thread."""

    job: HostsRun
    remote: Remote
    say: Say
    wait_s: float
    """How long Ray's start may take on all hosts together."""
    service_wait_s: float
    """How long to wait for a service to become healthy."""

    def __post_init__(self) -> None:
        self._signals: list[int] = []
        self._heart = Heart()
        # Hidden, and on the shared folder: the head's address and the cluster's token.
        self._shared = self.job.run_dir.parent / f".launch-{secrets.token_hex(4)}"

    def run(self) -> int:
        """Return the exit code of the run.

        Raises:
            ClusterError: a host, a service or Ray is not ready; nothing was trained.
        """
        before = [(number, signal.signal(number, self._note)) for number in SIGNALS]
        # A stopped process would not answer the hosts, which would end the run.
        before.append((signal.SIGTSTP, signal.signal(signal.SIGTSTP, signal.SIG_IGN)))
        nodes: list[Session] = []
        try:
            self.job.logs.mkdir(parents=True, exist_ok=True)
            self._shared.mkdir(mode=0o700, parents=True)
            self._check_hosts()
            nodes = self._start_ray()
            return self._train(nodes)
        except Interrupted:
            self.say(f"stopped by {signal.Signals(self._signals[0]).name} before the training")
            return 128 + self._signals[0]
        except OSError as error:
            raise ClusterError(f"{error.filename} cannot be written: {error.strerror}") from None
        finally:
            if nodes:
                self.say(f"stopping Ray on {len(nodes)} hosts")
            end_all(nodes[::-1], RAY_STOP_S)
            self._heart.stop()
            for file in self._shared.glob("*"):
                file.unlink(missing_ok=True)
            if self._shared.is_dir():
                self._shared.rmdir()
            for number, handler in before:
                signal.signal(number, handler)

    def _check_hosts(self) -> None:
        """Check all hosts at the same time.

        Raises:
            ClusterError: with every problem of every host.
        """
        job = self.job
        nonce = self._shared / "check"
        nonce.write_text(secrets.token_hex(8), encoding="utf-8")
        for name, url, _ in job.services:
            self.say(f"{name} service: {url}")
        sessions = []
        for host in job.hosts:
            expected = Expected(
                versions(),
                (str(nonce), nonce.read_text(encoding="utf-8")),
                host.slots if job.gpus else 0,
                os.path.abspath(job.model) if job.model else "",
                job.services,
                self.service_wait_s,
            )
            command = ["-m", "verlite.launch.host_check", expected.text()]
            sessions.append(self._session(host.target, command))
        try:
            self._wait(
                lambda: all(session.code is not None for session in sessions),
                CHECK_S + self.service_wait_s * max(1, len(job.services)),
            )
            problems = [text for session in sessions for text in _problems(session)]
        finally:
            for session in sessions:
                session.close()
        nonce.unlink(missing_ok=True)
        if problems:
            raise ClusterError("\n".join(dict.fromkeys(problems)))
        names = ", ".join(host.name for host in job.hosts)
        healthy = " and of the services" if job.services else ""
        self.say(f"checked {len(job.hosts)} hosts ({names}){healthy}")

    def _start_ray(self) -> list[Session]:
        """Start Ray on all hosts; return its sessions, in the order of the ranks.

        Raises:
            ClusterError: a host's Ray did not start. Those of the others are ended.
        """
        job = self.job
        started: set[int] = set()
        sessions = []
        for rank, host in enumerate(job.hosts):
            devices = [f"--num-cpus={host.slots}", "--num-gpus=0"]
            if job.gpus:
                devices = [f"--num-gpus={host.slots}"]
            command = ["-m", "verlite", "cluster", "start", "--block", f"--rank={rank}"]
            command += [f"--shared={self._shared}", f"--port={job.nodes.master_port}"]
            command += [f"--wait={self.wait_s}", *devices]

            def heard(line: str, rank: int = rank) -> None:
                if line == "Ray started":
                    started.add(rank)

            session = self._session(
                host.target,
                command,
                log=job.logs / f"ray-{host.name}.log",
                on_line=heard,
                remove=str(self._shared) if rank == 0 else None,
            )
            sessions.append(session)
        try:
            self._wait(
                lambda: (
                    len(started) == len(sessions)
                    or any(session.code is not None for session in sessions)
                ),
                self.wait_s + 60,
            )
            missing = [session for rank, session in enumerate(sessions) if rank not in started]
            ended = [session for session in sessions if session.code is not None]
            if ended:
                raise ClusterError("\n".join(f"Ray on {one.name}: {one.why()}" for one in ended))
            if missing:
                last = [f"{one.name} ({one.last[-1] if one.last else '...'})" for one in missing]
                raise ClusterError(
                    f"Ray did not start within {self.wait_s:.0f} s (--wait) on {', '.join(last)}"
                )
        except BaseException:
            end_all(sessions[::-1], RAY_STOP_S)
            raise
        self.say(
            f"Ray runs on {len(sessions)} hosts, {job.hosts[0].slots} devices each; "
            f"head: {job.hosts[0].name}"
        )
        return sessions

    def _train(self, nodes: list[Session]) -> int:
        """Run the driver on the head; return its exit code."""
        log = self.job.logs / "train.log"
        self.say(f"training; the output is in {log}, too")
        driver = self._session(
            self.job.hosts[0].target,
            ["-m", "verlite.main_ppo", *self.job.arguments],
            log=log,
            on_line=lambda line: print(line, flush=True),
        )
        sent = 0
        lost_at: float | None = None
        try:
            while driver.code is None:
                time.sleep(0.2)
                while sent < len(self._signals):
                    number = self._signals[sent]
                    driver.signal(signal.SIGTERM if number == signal.SIGHUP else number)
                    self.say(f"{signal.Signals(number).name}: passed on to the training")
                    sent += 1
                ended = [node for node in nodes if node.code is not None]
                if ended and lost_at is None:
                    lost_at = time.monotonic()
                    for node in ended:
                        self.say(f"Ray has ended on {node.name}: {node.why()}")
                if lost_at is not None and time.monotonic() - lost_at > DRIVER_NOTICES_S:
                    self.say(
                        f"the training has not ended {DRIVER_NOTICES_S:.0f} s later: ending it"
                    )
                    return 1
        finally:
            driver.close()
        code = driver.code
        assert code is not None
        if code == SSH_FAILED:
            raise ClusterError(f"the connection to {driver.name} was lost: {driver.why()}")
        return code

    def _session(self, target: str, arguments: list[str], **options: object) -> Session:
        session = Session(self.remote, target, arguments, **options)  # type: ignore[arg-type]
        return self._heart.add(session)

    def _wait(self, condition: Callable[[], bool], seconds: float) -> None:
        """Wait until the condition holds or the time is over.

        Raises:
            Interrupted: a signal asks to stop.
        """
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            if self._signals:
                raise Interrupted
            time.sleep(0.1)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)


def own_python() -> str:
    """Return this interpreter's path, without resolving a virtual environment's link."""
    return str(Path(sys.executable).absolute())


def _problems(session: Session) -> list[str]:
    """Return the problems that the check of a host has found, or why it did not run."""
    name = session.name
    if session.code is None:
        return [f"{name} did not answer the check in time"]
    if session.code == SSH_FAILED:
        reason = session.last[-1] if session.last else "ssh says nothing"
        return [f"{name} cannot be reached by ssh: {reason}. Try: {session.attempt}"]
    for line in reversed(session.last):
        try:
            found = json.loads(line)["problems"]
        except (ValueError, KeyError, TypeError):
            continue
        return [f"{name} {text}" for text in found]
    return [f"{name} cannot run verlite from this folder and Python: {session.why()}"]
