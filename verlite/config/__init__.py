"""The typed configuration: schema, loading, rules, and the plan derived from them.

This package imports neither torch nor ray.
"""

from verlite.config.load import Loaded, compose, dump, main_argv
from verlite.config.plan import Plan, make_plan
from verlite.config.problems import ConfigError, Problem
from verlite.config.schema import Config

__all__ = [
    "Config",
    "ConfigError",
    "Loaded",
    "Plan",
    "Problem",
    "compose",
    "dump",
    "main_argv",
    "make_plan",
]
