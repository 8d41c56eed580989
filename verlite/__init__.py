"""verlite: reinforcement learning for language models, small enough to read and proven on a CPU.

    from verlite import load_config, check, train, evaluate, export

docs/python.md shows them. They are imported at their first use: `import verlite` stays light.
__init__.pyi has their types.
"""

from typing import Any

from verlite.threads import settle

settle()  # before torch is loaded, in every process that imports a part of verlite

__version__ = "0.1.0"
# ruff: noqa: F822  (the names are defined by __getattr__)
__all__ = ["ConfigError", "check", "evaluate", "export", "load_config", "train"]


def __getattr__(name: str) -> Any:
    import importlib

    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "verlite.config.problems" if name == "ConfigError" else "verlite.api"
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value
