"""Rewards and environments that are given as Python callables: each is written to a file, so that
other processes can load it.

Rewards and environments run in processes of their own. A callable of an importable module is
imported there. Any other one, such as a function of a notebook or a lambda, is stored by value:
cloudpickle keeps its code and the objects that it uses. It then needs the same version of Python
everywhere, and cannot use open files, connections or locks.
"""

import base64
import importlib.util
import inspect
import os
import pickle
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verlite.api.config import RunConfig
from verlite.files import replace_file

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
        write(reward, folder / REWARD_FILE)
        changes["custom_reward_function.path"] = folder / REWARD_FILE
        changes["custom_reward_function.name"] = name_of(reward)
    if env is not None:
        write(env, folder / f"{ENV_MODULE}.py")
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
    """Return the name under which `write` stores a callable."""
    name = getattr(function, "__name__", type(function).__name__)
    return name if name.isidentifier() else "function"  # such as <lambda>


def write(function: Callable[..., Any], file: Path) -> None:
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
