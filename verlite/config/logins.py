"""Whether a tracker that needs an account has a login, by its variables and files. No network."""

import configparser
import netrc
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

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


def notes(loggers: list[str], variables: Environment) -> list[str]:
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
