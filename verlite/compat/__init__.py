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

PLACES = {
    "top": "verl verl.protocol",
    "tools": "verl.tools verl.tools.{base_tool,gsm8k_tool,schemas,tool_registry} "
    "verl.tools.sandbox_fusion_tools",
    "loop_managers": f"{_LOOP} {_MANAGERS} {_MANAGERS}.{{base,dapo,naive,registry}}",
    "loops": "verl.experimental.agent_loop verl.experimental.agent_loop.{agent_loop,tool_parser} "
    "verl.utils.profiler verl.workers.rollout.{llm_server,replica}",
    "managers": "verl.workers.reward_manager "
    "verl.workers.reward_manager.{abstract,batch,dapo,naive,prime,registry}",
    "datasets": "verl.experimental.dataset.sampler "
    "verl.utils.dataset verl.utils.dataset.rl_dataset",
    "utils": "verl.utils verl.utils.{fs,hdfs_io,import_utils,py_functional,ray_utils,tokenizer} "
    "verl.utils.rollout_trace",
    "tensors": "verl.utils.{model,torch_functional}",
    "scores": "verl.utils.reward_score",
    "scores:gsm8k": "verl.utils.reward_score.gsm8k",
    "scores:code": "verl.utils.reward_score.{prime_code,sandbox_fusion} "
    "verl.utils.reward_score.{prime_code.testing_util,sandbox_fusion.utils}",
    "scores:search_r1_like_qa_em": "verl.utils.reward_score.search_r1_like_qa_em",
    "math_scores:geo3k": "verl.utils.reward_score.geo3k",
    "math_scores:math_reward": "verl.utils.reward_score.{math,math_reward}",
    "math_scores:math_batch": "verl.utils.reward_score.math_batch",
    "math_scores:math_dapo": "verl.utils.reward_score.math_dapo",
    "math_scores:math_verify": "verl.utils.reward_score.math_verify",
    "math_scores:prime_math": "verl.utils.reward_score.{prime_math,prime_math.grader}",
}
"""Module here -> those of verl that it takes the place of. Behind a colon: the beginning of the
functions that are called otherwise than in verl."""
MODULES = {
    start + name: f"{PACKAGE}.{place}"
    for place, texts in PLACES.items()
    for text in texts.split()
    for start, _, names in [text.rstrip("}").partition("{")]
    for name in names.split(",")
}
"""Module of verl -> the module that takes its place."""


MISSING: dict[str, str] = {
    "verl.experimental.agent_loop": "Derive a loop of your own from AgentLoopBase; "
    "multi_turn.tool_config_path plays tools without one.",
    f"{_MANAGERS}.limited": "Limit the calls in your own reward function.",
    f"{_MANAGERS}.RateLimitedRewardManager": "Limit the calls in your own reward function.",
    f"{_MANAGERS}.remote": "reward.remote.url scores in a service (docs/reward_service.md).",
    f"{_MANAGERS}.RemoteRewardManager": "reward.remote.url scores in a service "
    "(docs/reward_service.md).",
    f"{_LOOP}.RewardModelManager": "Serve a reward model: reward.remote.url "
    "(docs/reward_service.md).",
    "verl.interactions": "Call the simulated user in the run() of your own AgentLoopBase, or write "
    "an environment (docs/agents.md).",
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
