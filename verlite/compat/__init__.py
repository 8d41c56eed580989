"""What files written for verl import from it, for machines without verl.

`install` makes `import verl` work after every other way to find it has failed: an installed verl is
used as it is. `verlite.importing` calls it before it loads a user's file, if the environment
variable VERLITE_VERL_COMPAT is 1. Nothing else in verlite depends on this package.

Only the standard library is imported here, because reward processes start with this file.
"""

import functools
import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

PACKAGE = "verlite.compat"
_LOOP = "verl.experimental.reward_loop"
_MANAGERS = f"{_LOOP}.reward_manager"

MODULES: dict[str, str] = {
    "verl": f"{PACKAGE}.top",
    "verl.protocol": f"{PACKAGE}.top",
    "verl.tools": f"{PACKAGE}.tools",
    "verl.tools.base_tool": f"{PACKAGE}.tools",
    "verl.tools.gsm8k_tool": f"{PACKAGE}.tools",
    "verl.tools.sandbox_fusion_tools": f"{PACKAGE}.tools",
    "verl.tools.schemas": f"{PACKAGE}.tools",
    "verl.tools.tool_registry": f"{PACKAGE}.tools",
    "verl.utils": f"{PACKAGE}.utils",
    **dict.fromkeys(
        (
            _LOOP,
            _MANAGERS,
            *(f"{_MANAGERS}.{name}" for name in ("base", "dapo", "naive", "registry")),
        ),
        f"{PACKAGE}.loop_managers",
    ),
    "verl.workers.reward_manager": f"{PACKAGE}.managers",
    **{
        f"verl.workers.reward_manager.{name}": f"{PACKAGE}.managers"
        for name in ("abstract", "batch", "dapo", "naive", "prime", "registry")
    },
    "verl.experimental.dataset.sampler": f"{PACKAGE}.datasets",
    "verl.utils.dataset": f"{PACKAGE}.datasets",
    "verl.utils.dataset.rl_dataset": f"{PACKAGE}.datasets",
    "verl.utils.fs": f"{PACKAGE}.utils",
    "verl.utils.hdfs_io": f"{PACKAGE}.utils",
    "verl.utils.import_utils": f"{PACKAGE}.utils",
    "verl.utils.py_functional": f"{PACKAGE}.utils",
    "verl.utils.ray_utils": f"{PACKAGE}.utils",
    "verl.utils.rollout_trace": f"{PACKAGE}.utils",
    "verl.utils.tokenizer": f"{PACKAGE}.utils",
    "verl.utils.model": f"{PACKAGE}.tensors",
    "verl.utils.torch_functional": f"{PACKAGE}.tensors",
    "verl.utils.reward_score": f"{PACKAGE}.scores",
    **{
        f"verl.utils.reward_score.{name}": f"{PACKAGE}.scores:{part}"
        for name, part in (
            ("gsm8k", "gsm8k"),
            ("prime_code", "code"),
            ("prime_code.testing_util", "code"),
            ("sandbox_fusion", "code"),
            ("sandbox_fusion.utils", "code"),
            ("search_r1_like_qa_em", "search_r1_like_qa_em"),
        )
    },
    **{
        f"verl.utils.reward_score.{name}": f"{PACKAGE}.math_scores:{part}"
        for name, part in (
            ("geo3k", "geo3k"),
            ("math", "math_reward"),
            ("math_batch", "math_batch"),
            ("math_dapo", "math_dapo"),
            ("math_reward", "math_reward"),
            ("math_verify", "math_verify"),
            ("prime_math", "prime_math"),
            ("prime_math.grader", "prime_math"),
        )
    },
}
"""Module of verl -> the module that takes its place. Behind a colon: the beginning of the functions
there that are called otherwise than in verl."""


MISSING: dict[str, str] = {
    "verl.experimental.agent_loop": "Agent loops are not supported yet: write an environment "
    "(docs/agents.md).",
    f"{_MANAGERS}.limited": "Limit the calls in your own reward function.",
    f"{_MANAGERS}.RateLimitedRewardManager": "Limit the calls in your own reward function.",
    f"{_MANAGERS}.remote": "reward.remote.url scores in a service (docs/reward_service.md).",
    f"{_MANAGERS}.RemoteRewardManager": "reward.remote.url scores in a service "
    "(docs/reward_service.md).",
    f"{_LOOP}.RewardModelManager": "Serve a reward model: reward.remote.url "
    "(docs/reward_service.md).",
    "verl.interactions": "Interactions are not supported: write an environment (docs/agents.md).",
    "verl.tools.mcp": "Call the server in execute() of a tool that derives from BaseTool.",
    "verl.utils.reward_score.prime_math.math_normalize": "Compare answers with "
    "verl.utils.reward_score.prime_math.grade_answer.",
    "verl.tools.search_tool": "env.name=search searches a retriever (docs/agents.md).",
    "verl.trainer": "verlite has a trainer of its own.",
    "verl.single_controller": "verlite has worker groups of its own.",
}
"""Beginning of the full name of a module, class or function -> what to do without it."""


def install() -> None:
    """Let `import verl` find MODULES if nothing else finds it. Repeated calls change nothing."""
    if any(isinstance(finder, Finder) for finder in sys.meta_path):
        return
    found = importlib.machinery.PathFinder.find_spec("verl")
    # A folder verl without __init__.py, such as that of a clone, is not an installed package.
    is_folder = found is not None and found.origin is None
    sys.meta_path.insert(0 if is_folder else len(sys.meta_path), Finder())


class Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of MODULES and the packages around them."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the module's spec; None if it does not belong to verl, or verl is installed.

        Raises:
            ModuleNotFoundError: verlite has nothing in its place.
        """
        top, _, below = name.partition(".")
        if top != "verl":
            return None
        if below and not isinstance(sys.modules["verl"].__loader__, _Loader):
            return None  # an installed verl lacks the module
        if name in MODULES or any(each.startswith(f"{name}.") for each in (*MODULES, *MISSING)):
            return importlib.machinery.ModuleSpec(name, _Loader(), is_package=True)
        remedy = next((MISSING[start] for start in MISSING if name.startswith(start)), "")
        # `from module import NAME` looks for a module, too. Its error is shown if it has another
        # name than that module.
        is_name = name.rpartition(".")[0] in MODULES
        raise ModuleNotFoundError(
            f"verlite's compatibility package for verl has no {name}. {remedy}".strip()
            + " docs/migration/verl.md lists what it has; with verl itself installed, verl is used",
            name="verl" if is_name else name,
        )


def attributes(name: str) -> Any:
    """Return what has the attributes of verl's module `name`, one of MODULES."""
    place, _, part = MODULES[name].partition(":")
    module = importlib.import_module(place)
    if not part:
        return module
    known = {entry: value for entry, value in vars(module).items() if not entry.startswith("_")}
    own = {entry.removeprefix(f"{part}_"): value for entry, value in known.items()}
    return SimpleNamespace(**known | own)


class _Loader(importlib.abc.Loader):
    """Makes a module under verl's name, whose attributes are those of verlite's module."""

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ in MODULES:
            own = attributes(module.__name__)
            module.__dict__["__getattr__"] = functools.partial(getattr, own)
            module.__dict__["__all__"] = [name for name in dir(own) if not name.startswith("_")]
