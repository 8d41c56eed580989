"""The trackers of `trainer.logger`: each sends metrics and samples to one package or service.

Packages are imported when the tracker is opened, in its own thread. Whether a tracker that needs an
account has a login is judged by its variables and files, without network.
"""

import configparser
import json
import logging
import netrc
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from verlite.files import one_line
from verlite.trainer.tracking import Metrics, TrackedRun

SAMPLE_COLUMNS = ("prompt", "response", "ground_truth", "score", "data_source", "status")
"""Fields of a sample that the trackers' tables have."""
STEP_METRIC = "training/global_step"
WANDB_INIT_S = 60.0
"""How long W&B may take to answer before the run is logged offline."""


class WandbTracker:
    """Weights & Biases. A resumed run continues the same W&B run.

    Without a login, or if the server does not answer, the run is written to `wandb/` in the run
    directory, for `wandb sync`.

    Steps are a metric of their own, because W&B drops metrics of a step that it has already. A run
    that resumes repeats the steps after its checkpoint, with the same numbers.
    """

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        number = run.keep_id("wandb", run.kept_id("wandb") or secrets.token_hex(4))
        options: dict[str, Any] = {
            "project": run.project,
            "name": run.name,
            "dir": str(run.directory),
            "config": run.config,
            "id": number,
            "resume": "allow",
            "settings": wandb.Settings(silent=True, init_timeout=WANDB_INIT_S),
        }
        problem = wandb_problem(os.environ)
        self._run, why = _online_or_not(wandb, options, problem, wandb.Error)
        if self._run.offline:
            files = f"{run.directory}/wandb/offline-run-*-{number}"
            run.say(f"wandb: {why}. Send the run later with: wandb sync {files}")
        elif self._run.url:
            run.say(f"wandb: {self._run.url}")
        self._run.define_metric(STEP_METRIC)
        self._run.define_metric("*", step_metric=STEP_METRIC, step_sync=True)

    def __call__(self, step: int, metrics: Metrics) -> None:
        self._run.log({**metrics, STEP_METRIC: step})

    def samples(self, step: int, kind: str, records: list[dict[str, Any]]) -> None:
        import wandb

        table = wandb.Table(columns=["step", *SAMPLE_COLUMNS], data=_rows(step, records))
        self._run.log({f"{kind}/generations": table, STEP_METRIC: step})

    def finish(self) -> None:
        self._run.finish()


class TensorBoardTracker:
    """Event files in the run directory's `tensorboard` folder."""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = str(run.directory / "tensorboard")
        # Events of steps that are repeated after a resume are dropped by TensorBoard.
        purged = run.resumed_step + 1 if run.resumed_step else None
        self._writer = SummaryWriter(folder, purge_step=purged)

    def __call__(self, step: int, metrics: Metrics) -> None:
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def samples(self, step: int, kind: str, records: list[dict[str, Any]]) -> None:
        for number, record in enumerate(records, start=1):
            self._writer.add_text(f"{kind}/generations/{number}", _markdown(record), step)

    def finish(self) -> None:
        self._writer.close()


class MLflowTracker:
    """MLflow: the server at MLFLOW_TRACKING_URI, or the run directory's `mlflow.db`.

    A resumed run continues the same MLflow run. MLflow's names have no @: `mean@8` becomes
    `mean_at_8`, and other characters an underscore. Samples are JSON lines among the artifacts.
    """

    def __init__(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        logging.getLogger("alembic").setLevel(logging.WARNING)  # tells each table that it makes
        server = os.environ.get("MLFLOW_TRACKING_URI")
        self._client = MlflowClient(server or f"sqlite:///{run.directory}/mlflow.db")
        number = self._resume(run)
        if number is None:
            project = self._client.get_experiment_by_name(run.project)
            store = None if server else (run.directory / "mlflow").as_uri()
            experiment = (
                project.experiment_id
                if project
                else self._client.create_experiment(run.project, artifact_location=store)
            )
            number = self._client.create_run(experiment, run_name=run.name).info.run_id
            params = [Param(self._legal(key), str(value)[:500]) for key, value in flat(run.config)]
            for start in range(0, len(params), 100):  # the most that a request may have
                self._client.log_batch(number, params=params[start : start + 100])
        self._run = run.keep_id("mlflow", number)
        if server and server.startswith("http"):
            experiment = self._client.get_run(number).info.experiment_id
            run.say(f"mlflow: {server.rstrip('/')}/#/experiments/{experiment}/runs/{number}")

    def _resume(self, run: TrackedRun) -> str | None:
        """Return the id of the run that goes on, or None if there is none."""
        from mlflow.exceptions import MlflowException

        number = run.kept_id("mlflow")
        if number is None:
            return None
        try:
            self._client.update_run(number, status="RUNNING")
        except MlflowException as error:
            run.say(
                f"mlflow: run {number} cannot be continued: {one_line(error)}. A new one begins"
            )
            return None
        return number

    def __call__(self, step: int, metrics: Metrics) -> None:
        from mlflow.entities import Metric

        now = time.time_ns() // 1_000_000
        rows = [Metric(self._legal(key), value, now, step) for key, value in metrics.items()]
        self._client.log_batch(self._run, metrics=rows)

    def samples(self, step: int, kind: str, records: list[dict[str, Any]]) -> None:
        lines = [json.dumps(record, ensure_ascii=False, default=str) + "\n" for record in records]
        text = "".join(lines).encode(errors="backslashreplace").decode()
        self._client.log_text(self._run, text, f"{kind}_generations/step_{step}.jsonl")

    def finish(self) -> None:
        self._client.set_terminated(self._run)

    @staticmethod
    def _legal(name: str) -> str:
        return re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"))


class SwanLabTracker:
    """SwanLab: the account of `swanlab login`. A resumed run continues the same SwanLab run.

    Without a login, or if the server does not answer, the run is written to `swanlab/` in the run
    directory, for `swanlab sync`.
    """

    def __init__(self, run: TrackedRun) -> None:
        import swanlab

        number = run.keep_id("swanlab", run.kept_id("swanlab") or secrets.token_hex(8))
        options: dict[str, Any] = {
            "project": run.project,
            "name": run.name,
            "log_dir": str(run.directory / "swanlab"),
            "config": run.config,
            "id": number,
            "resume": "allow",
        }
        problem = swanlab_problem(os.environ)  # its login and network errors have no common class
        self._run, why = _online_or_not(swanlab, options, problem, Exception)
        if self._run.mode == "online":
            run.say(f"swanlab: {self._run.url}")
        else:
            files = f"{run.directory}/swanlab/run-*-{number}"
            run.say(f"swanlab: {why}. Send the run later with: swanlab sync {files}")

    def __call__(self, step: int, metrics: Metrics) -> None:
        self._run.log(metrics, step=step)

    def samples(self, step: int, kind: str, records: list[dict[str, Any]]) -> None:
        import swanlab

        texts = [swanlab.Text(_markdown(record)) for record in records]
        self._run.log({f"{kind}/generations": texts}, step=step)

    def finish(self) -> None:
        self._run.finish()


class TrackioTracker:
    """Trackio: its local database, or the Space or server that its variables name.

    A resumed run continues the same Trackio run. Its name is unique, because Trackio finds runs by
    name: the experiment's, and a part of an id.
    """

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        name = run.kept_id("trackio") or f"{run.name}-{secrets.token_hex(2)}"
        self._run = trackio.init(
            project=run.project,
            name=run.keep_id("trackio", name),
            config=run.config,
            resume="allow",
            embed=False,
        )

    def __call__(self, step: int, metrics: Metrics) -> None:
        self._run.log(dict(metrics), step=step)

    def samples(self, step: int, kind: str, records: list[dict[str, Any]]) -> None:
        import trackio

        table = trackio.Table(columns=["step", *SAMPLE_COLUMNS], data=_rows(step, records))
        self._run.log({f"{kind}/generations": table}, step=step)

    def finish(self) -> None:
        self._run.finish()


def _online_or_not(
    package: Any, options: dict[str, Any], problem: str | None, caught: type[Exception]
) -> tuple[Any, str]:
    """Begin a run of W&B or SwanLab. Return it, and why it is offline if it is.

    Args:
        problem: why it would ask for a login.
        caught: what a failed login, network or server raises. Other errors are passed on.
    """
    if problem is None:
        try:
            return package.init(**options), "offline, as asked for"
        except caught as error:
            problem = one_line(error)
            if hasattr(package, "teardown"):
                package.teardown()  # W&B would refuse the id of the run that did not start
    return package.init(**options, mode="offline"), problem


def _rows(step: int, records: list[dict[str, Any]]) -> list[list[Any]]:
    """Return the rows of a table: the step, then SAMPLE_COLUMNS. Each column has one type."""
    rows = []
    for record in records:
        values: list[Any] = [_text(record.get(column)) for column in SAMPLE_COLUMNS]
        values[SAMPLE_COLUMNS.index("score")] = record.get("score")
        rows.append([step, *values])
    return rows


def _markdown(record: dict[str, Any]) -> str:
    """Return a sample as text that shows its line breaks where Markdown is rendered."""
    parts = [f"score {record.get('score')}, expected {_text(record.get('ground_truth'))}"]
    parts += [_text(record.get(name)) for name in ("prompt", "response")]
    return "\n\n".join("    " + part.replace("\n", "\n    ") for part in parts)


def _text(value: Any) -> str:
    """Return a value as text in valid UTF-8."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text.encode(errors="backslashreplace").decode()


def flat(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of every value below a mapping."""
    for name, value in config.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


Environment = Mapping[str, str]
WANDB_HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")
"""Servers that W&B uses by default, by version."""


def wandb_problem(env: Environment) -> str | None:
    """Return why W&B would ask for a login, or None if it has one or needs none."""
    settings = _wandb_settings(env)
    if (env.get("WANDB_MODE") or settings.get("mode") or "online") != "online":
        return None
    names = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
    if any(env.get(name) for name in names) or settings.get("api_key"):
        return None
    address = env.get("WANDB_BASE_URL") or settings.get("base_url")
    hosts = (urlsplit(address).netloc,) if address else WANDB_HOSTS
    home = Path.home()
    files = [Path(env["NETRC"])] if env.get("NETRC") else [home / ".netrc", home / "_netrc"]
    if any(_has_login(file, host) for file in files for host in hosts):
        return None
    server = f" for {hosts[0]}" if address else ""
    return f"no login{server} (`wandb login`, or WANDB_API_KEY in the environment)"


def swanlab_problem(env: Environment) -> str | None:
    """Return why SwanLab would ask for a login, or None if it has one or needs none."""
    if (env.get("SWANLAB_MODE") or "online") != "online" or env.get("SWANLAB_API_KEY"):
        return None
    folders = [Path.cwd() / ".swanlab", Path.home() / ".swanlab"]
    if any((folder / ".netrc").is_file() for folder in folders):
        return None
    return "no login (`swanlab login`, or SWANLAB_API_KEY in the environment)"


LOGINS: dict[str, Callable[[Environment], str | None]] = {
    "wandb": wandb_problem,
    "swanlab": swanlab_problem,
}
"""Trackers that need an account."""


def login_notes(loggers: list[str], variables: Environment) -> list[str]:
    """Return a line about each tracker that would log offline because it has no login.

    Args:
        loggers: trainer.logger.
        variables: environment variables that the run sets.
    """
    env = {**os.environ, **variables}
    problems = {name: LOGINS[name](env) for name in loggers if name in LOGINS}
    return [
        f"trainer.logger={name}: {why}. The run would be logged offline, for `{name} sync`."
        for name, why in problems.items()
        if why
    ]


def _wandb_settings(env: Environment) -> Mapping[str, str]:
    """Return what `wandb login` and `wandb offline` wrote to W&B's settings files."""
    folder = Path(env.get("WANDB_CONFIG_DIR") or Path.home() / ".config" / "wandb")
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read([folder / "settings", Path("wandb", "settings")])
    except (configparser.Error, UnicodeError):
        return {}
    return parser["default"] if "default" in parser else {}


def _has_login(file: Path, host: str) -> bool:
    try:
        found = netrc.netrc(file).authenticators(host)
    except (OSError, netrc.NetrcParseError, UnicodeError):
        return False
    return bool(found and found[2])
