"""verlite as a Python library, for scripts, notebooks and tests (docs/python.md).

The functions print what the commands print and raise ordinary exceptions. Signal handlers,
environment variables, sys.path and event loops are afterwards as they were before.

Rewards and environments run in processes of their own. A callable of an importable module is
imported there. Any other one, such as a function of a notebook or a lambda, is stored by value:
cloudpickle keeps its code and the objects that it uses. It then needs the same version of Python
everywhere, and cannot use open files, connections or locks.
"""

import base64
import gc
import importlib.util
import inspect
import os
import pickle
import sys
import tempfile
import textwrap
from asyncio import events
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

from verlite.config import keys
from verlite.config.commands import PPO
from verlite.config.load import Loaded, compose, dump
from verlite.config.plan import Plan, make_plan
from verlite.config.problems import ConfigError, Note, Problem
from verlite.config.schema import Config
from verlite.files import replace_file
from verlite.terminal import console

Overrides = Mapping[str, Any] | Sequence[str]
"""A str is one override."""


ENV_VARS = "ray_kwargs.ray_init.runtime_env.env_vars"
ENV_MODULE = "verlite_own_env"
REWARD_FILE = "reward.py"
AS_TEXT = {
    "reward": "Pass the function itself, as in `from my_reward import compute_score`, or name its "
    'file in the configuration: {"custom_reward_function.path": "my_reward.py"}',
    "env": "Pass the class itself, as in `from my_env import Factory`, or name it in the "
    'configuration: {"env.name": "my_env:Factory"}',
}
"""What to do in place of passing text."""


@dataclass(frozen=True)
class RunConfig:
    """A configuration of a run: a YAML file and what was changed. `load_config` makes it.

    config["trainer.total_training_steps"] is a value. Names and types have been checked, the rules
    between keys and the files not yet: `check` and `train` do that.
    """

    name: str | None
    """Name of the YAML file without its suffix; None: main_ppo's default."""
    folder: Path | None
    """Folder of the user's YAML files. None: verlite's own."""
    overrides: tuple[str | Mapping[str, Any], ...] = ()
    """key=value as on the command line, and mappings, in the order in which they apply."""

    def __post_init__(self) -> None:
        _ = self.values  # raises ConfigError

    def loaded(self, check: bool = True) -> Loaded:
        """Build the configuration; `check` as in `verlite.config.compose`. Raises ConfigError."""
        return compose(self.name, self.overrides, self.folder, check)

    @cached_property
    def values(self) -> Config:
        """All values, as data classes: config.values.trainer.total_training_steps."""
        return self.loaded(check=False).config

    def __getitem__(self, key: str) -> Any:
        if PPO.find(key) is None:
            raise KeyError(key)
        return keys.get(self.values, key)

    def override(self, overrides: Overrides) -> "RunConfig":
        """Return a copy with these keys changed.

        Raises:
            ConfigError: a key is unknown, or a value has the wrong type.
        """
        return replace(self, overrides=(*self.overrides, *_as_list(overrides)))

    def yaml(self) -> str:
        """Return every value as YAML with its origin. Secrets are masked."""
        return dump(self.loaded(check=False))


def load_config(name: str | Path | None = None, overrides: Overrides = ()) -> RunConfig:
    """Return a configuration.

    Args:
        name: one of verlite's configurations ("grpo", "ppo", ...), or the path of a YAML file.
            None: the default of main_ppo.
        overrides: a mapping {"data.train_batch_size": 64}, or a list ["data.train_batch_size=64"]
            in the grammar of the command line.

    Raises:
        ConfigError: the file is missing, a key is unknown, a value has the wrong type, or a
            required one is missing. `problems` lists all of them.
    """
    folder = None
    if name is not None and (str(name).endswith((".yaml", ".yml")) or os.sep in str(name)):
        path = Path(name).expanduser().resolve()
        if not path.is_file():
            raise ConfigError([Problem("name", str(name), "is not a YAML file that exists")])
        name, folder = path.stem, path.parent
    return RunConfig(None if name is None else str(name), folder, tuple(_as_list(overrides)))


def _as_list(overrides: Overrides) -> Sequence[str | Mapping[str, Any]]:
    return [overrides] if isinstance(overrides, str | Mapping) else overrides


@dataclass(frozen=True)
class Report:
    """What is known about a valid configuration. str(report) is what `verlite check` prints."""

    plan: Plan
    """Sizes, roles and devices that follow from the configuration."""
    notes: list[Note]
    """Renamed keys, keys without effect, and settings that are rarely meant."""
    warnings: list[str]
    """What a run would warn about: tools that do not answer, too little disk space."""
    prompts: list[str]
    """How many prompts there are, and how long, judged by the first rows of each file."""

    def __str__(self) -> str:
        out = console(file=open(os.devnull, "w"), record=True)
        with out.file:
            for note in self.notes:
                out.print(f"note: {note}", soft_wrap=True, highlight=False)
            for warning in self.warnings:
                out.print(f"warning: {warning}", soft_wrap=True, highlight=False)
            out.print(self.plan.table())
            for line in self.prompts:
                out.print(line, soft_wrap=True, highlight=False)
        return out.export_text().rstrip()


@dataclass(frozen=True)
class Result:
    """How a run ended, and where its files are."""

    run_dir: Path
    state: str
    """"finished", or "stopped": by SIGTERM, SIGUSR1 or trainer.max_runtime. The same call then
    resumes from the checkpoint."""
    exit_code: int
    """The exit code that the command would have (docs/failures.md)."""

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The metrics of each step, from metrics.jsonl. Steps before a resume are included."""
        from verlite.trainer.tracking import METRICS, read_lines

        return read_lines(self.run_dir / METRICS)

    def history(self, name: str) -> list[tuple[int, float]]:
        """Return (step, value) of one metric for each step that has it.

        Raises:
            KeyError: no step has it. The message lists similar names.
        """
        lines = self.metrics
        found = [(line["step"], line[name]) for line in lines if name in line]
        if not found:
            known = sorted({key for line in lines for key in line})
            close = get_close_matches(name, known, n=5, cutoff=0.4)
            raise KeyError(
                f"{name}: no step has this metric. Similar: {', '.join(close) or 'none'}"
            )
        return found

    @property
    def step(self) -> int:
        """The last finished step."""
        lines = self.metrics
        return int(lines[-1]["step"]) if lines else 0

    @property
    def checkpoint(self) -> Path | None:
        """The newest checkpoint. None if none was saved."""
        from verlite.trainer.checkpoints import last_saved

        step = last_saved(self.run_dir)
        return None if step is None else self.run_dir / f"global_step_{step}"

    @property
    def model(self) -> Path | None:
        """The Hugging Face folder of the trained model. None if none was written."""
        folder = self.run_dir / "huggingface"
        return folder if folder.is_dir() else None


def check(
    config: RunConfig,
    reward: Callable[..., Any] | None = None,
    env: Callable[..., Any] | None = None,
) -> Report:
    """Validate a configuration in seconds, without starting anything; arguments as in `train`.

    Raises:
        ConfigError: `problems` lists every violation, each with key, value, rule and remedy.
        RunRefused: the reward function, the tokenizer or the first prompts cannot be used.
        TypeError: `reward` or `env` cannot be stored for other processes.
    """
    from verlite.trainer.errors import RunRefused
    from verlite.trainer.opening import try_rl

    _refuse_other_types(config)
    with tempfile.TemporaryDirectory() as folder, _as_a_guest():
        with with_own_code(config, reward, env, Path(folder)) as whole:
            loaded = whole.loaded()
            plan = make_plan(loaded.config)
            found = try_rl(loaded.config)
            if found.errors:
                raise RunRefused("\n".join(found.errors))
            return Report(plan, loaded.notes, found.warnings + found.missing, found.seen)


def train(
    config: RunConfig,
    reward: Callable[..., Any] | None = None,
    env: Callable[..., Any] | None = None,
) -> Result:
    """Train in this process, with workers in processes of their own, and return when all is done.

    Ctrl-C stops the run and raises KeyboardInterrupt. Steps since the last checkpoint are lost.

    Args:
        config: from `load_config`.
        reward: function of the reward, as custom_reward_function names it: it takes data_source,
            solution_str, ground_truth and extra_info by name, and returns a number or a dict with
            "score". Reward processes get it from the run directory (`write_callable`
            has the limits).
        env: EnvFactory subclass, or a function that returns an EnvFactory, for samples of several
            turns (max_turns). It gets the entries of env.kwargs.

    Raises:
        ConfigError: the configuration is invalid; nothing was started.
        TypeError: `reward` or `env` cannot be stored for other processes.
        RunRefused: a file or a setting is wrong; nothing was trained. The same holds for
            DataError, FunctionError, UnknownDataSource, ResourcesMissing, NoCluster and
            ResumeRefused.
        WorkerError: the run failed (`verlite.trainer.errors`). The same holds for CheckpointError,
            RewardFailures, RolloutFailures, LogProbGap, TooFewGroups, StuckError, NodeLost and
            RayLost.
        KeyboardInterrupt: Ctrl-C.
    """
    from verlite.config.critical import CODE
    from verlite.control.exit_codes import DONE
    from verlite.trainer import command
    from verlite.trainer.opening import absolute, lock_run_dir
    from verlite.trainer.stop import Stop

    _refuse_other_types(config)
    _refuse_other_ray()
    run_dir = Path(absolute(config["trainer.default_local_dir"]))
    if reward is not None or env is not None:
        lock_run_dir(run_dir).close()  # the files of a running run must not change
    with _as_a_guest(), with_own_code(config, reward, env, run_dir / CODE) as whole:
        loaded = whole.loaded()
        stop = Stop(embedded=True)
        try:
            with stop:
                code = command.run(loaded, command.train_rl, stop)
        except KeyboardInterrupt:
            if stop.machine.requested in (None, "SIGINT"):
                raise
            code = stop.machine.exit_code
    return Result(run_dir, "finished" if code == DONE else "stopped", code)


def evaluate(
    config: RunConfig,
    reward: Callable[..., Any] | None = None,
    env: Callable[..., Any] | None = None,
) -> dict[str, float]:
    """Validate the model on data.val_files without training; arguments and errors as in `train`.

    If the run directory has checkpoints, trainer.resume_mode decides which one is evaluated.

    Returns:
        The validation metrics, `val-core/...` and `val-aux/...` (docs/metrics.md).
    """
    _refuse_other_types(config)
    result = train(config.override({"trainer.val_only": True}), reward, env)
    return {name: value for name, value in result.metrics[-1].items() if name.startswith("val-")}


def export(
    run: Result | str | Path,
    out: str | Path,
    dtype: str = "float32",
    model: str | None = None,
    trust_remote_code: bool = False,
) -> Path:
    """Write the policy of a checkpoint as a Hugging Face folder, reload it and compare.

    Args:
        run: what `train` returned, a run directory (its newest complete checkpoint) or a
            global_step_N folder.
        out: a new or empty folder.
        dtype: float32, bfloat16 or float16.
        model: folder or hub name of the model that the training began with. Not needed with what
            `train` returned.
        trust_remote_code: run Python code that comes with `model`.

    Raises:
        CheckpointError: there is no complete checkpoint, it cannot be loaded, `model` is missing,
            `out` is not empty or cannot be written, or `dtype` is unknown.
    """
    import warnings

    from verlite.report.export import Base, export_checkpoint, find_checkpoint

    folder = run.run_dir if isinstance(run, Result) else Path(run)
    checkpoint = find_checkpoint(folder, lambda text: warnings.warn(text, stacklevel=3))
    base = Base(model, trust_remote_code=trust_remote_code) if model else None
    if base is None and isinstance(run, Result):  # its settings are those of this process's user
        base = Base.recorded(checkpoint)
    export_checkpoint(checkpoint, Path(out), base, dtype)
    return Path(out)


def _refuse_other_ray() -> None:
    """Refuse to train while this process uses Ray for something else."""
    from verlite.trainer.errors import RunRefused

    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        raise RunRefused(
            "this process is connected to Ray already (ray.is_initialized() is true), and a run "
            "needs its own connection. Call ray.shutdown() before verlite.train"
        )


def _refuse_other_types(config: RunConfig) -> None:
    """Raise TypeError unless `config` is what load_config returns."""
    if not isinstance(config, RunConfig):
        raise TypeError(
            f"config is of the type {type(config).__name__}, not what verlite.load_config returns. "
            'Write verlite.load_config("grpo", {"data.train_batch_size": 64}), for example'
        )


@contextmanager
def _as_a_guest() -> Iterator[None]:
    """Hide the event loop that a notebook runs its cells in: the driver runs loops of its own. At
    the end let the caller's objects be collected again, which `import_ahead` leaves out."""
    loop = events._get_running_loop()
    events._set_running_loop(None)
    try:
        yield
    finally:
        events._set_running_loop(loop)
        gc.unfreeze()


@contextmanager
def with_own_code(
    config: RunConfig,
    reward: Callable[..., Any] | None,
    env: Callable[..., Any] | None,
    folder: Path,
) -> Iterator[RunConfig]:
    """Write the user's callables to `folder`, and yield a configuration that names them.

    Raises:
        TypeError: an argument has another type, or cannot be stored.
    """
    for name, given in (("reward", reward), ("env", env)):
        if isinstance(given, str | Path):
            raise TypeError(f"{name}={str(given)!r} is text, not a function. {AS_TEXT[name]}")
    changes: dict[str, Any] = {}
    if reward is not None:
        write_callable(reward, folder / REWARD_FILE)
        changes["custom_reward_function.path"] = folder / REWARD_FILE
        changes["custom_reward_function.name"] = name_of(reward)
    if env is not None:
        write_callable(env, folder / f"{ENV_MODULE}.py")
        changes["env.name"] = f"{ENV_MODULE}:{name_of(env)}"
        path = config[ENV_VARS].get("PYTHONPATH", os.environ.get("PYTHONPATH"))
        python_path = os.pathsep.join(filter(None, [str(folder), path]))
        changes[f"{ENV_VARS}.PYTHONPATH"] = python_path
    sys.modules.pop(ENV_MODULE, None)
    before = list(sys.path)
    sys.path.insert(0, str(folder))
    try:
        yield config.override(changes) if changes else config
    finally:
        sys.path[:] = before
        sys.modules.pop(ENV_MODULE, None)


def name_of(function: Callable[..., Any]) -> str:
    """Return the name under which `write_callable` stores a callable."""
    name = getattr(function, "__name__", type(function).__name__)
    return name if name.isidentifier() else "function"  # such as <lambda>


def write_callable(function: Callable[..., Any], file: Path) -> None:
    """Write a Python file that defines `name_of(function)`.

    The file adds the folders of this process's sys.path, so that modules beside a script or a
    notebook are found.

    Raises:
        TypeError: the value is not callable, or cannot be stored. The message says why.
        OSError: the file cannot be written.
    """
    if not callable(function):
        raise TypeError(f"expected a function or a class, got {function!r}")
    folders = list(dict.fromkeys(os.path.abspath(folder or ".") for folder in sys.path))
    text = (
        f'"""Written by verlite for {name_of(function)}. The next run replaces it."""\n\n'
        "import sys\n\n"
        f"sys.path += [folder for folder in {folders!r} if folder not in sys.path]\n\n"
        f"{_definition(function)}"
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    if not file.is_file() or file.read_text(encoding="utf-8") != text:
        replace_file(file, text)


def _definition(function: Callable[..., Any]) -> str:
    name = name_of(function)
    if is_importable(function):
        outer, *inner = function.__qualname__.split(".")
        line = f"from {function.__module__} import {outer}\n"
        return line + (f"\n{name} = {'.'.join([outer, *inner])}\n" if inner else "")
    import cloudpickle

    try:
        content = cloudpickle.dumps(function, protocol=pickle.DEFAULT_PROTOCOL)
    except Exception as error:  # a user's object may raise anything
        raise TypeError(
            f"{name} cannot be stored for other processes: {type(error).__name__}: {error}. "
            "Create connections, locks and open files inside the function, or put it in a "
            "module and import it"
        ) from error
    lines = textwrap.wrap(base64.b64encode(content).decode(), 90)
    written = "\n".join(f'    "{line}"' for line in lines)
    return (
        f"import base64\nimport pickle\n\n{name} = pickle.loads(base64.b64decode(\n{written}\n))\n"
    )


def is_importable(function: Callable[..., Any]) -> bool:
    """Return whether another process can import a callable by its module and name."""
    module, qualname = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if not module or module == "__main__" or not qualname or "<" in qualname:
        return False
    found: Any = sys.modules.get(module)
    if found is None or not getattr(found, "__file__", None):
        return False
    try:
        if importlib.util.find_spec(module) is None:
            return False
        return inspect.getattr_static(found, qualname.partition(".")[0], None) is not None and (
            _attribute(found, qualname) is function
        )
    except (ValueError, ImportError, AttributeError):
        return False


def _attribute(module: Any, qualname: str) -> Any:
    for part in qualname.split("."):
        module = getattr(module, part)
    return module
