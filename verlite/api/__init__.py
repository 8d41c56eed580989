"""verlite as a Python library, for scripts, notebooks and tests (docs/python.md)."""

from verlite.api.config import RunConfig, load_config
from verlite.api.result import Result
from verlite.api.run import Report, check, evaluate, export, train

__all__ = ["Report", "Result", "RunConfig", "check", "evaluate", "export", "load_config", "train"]
