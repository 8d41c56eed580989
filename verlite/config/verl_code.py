"""Keys with which a verl command names code of the user's, as the keys that verlite has for it.

`+data.KEY=value` beside a data set or sampler of the user's becomes `data.extra.KEY`. With
VERLITE_VERL_COMPAT=1, a reward manager class and YAML files of tools and of agent loops become
what docs/migration/verl.md gives for them.
"""

import ast
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from verlite.config import plan, translation
from verlite.config.commands import Command
from verlite.config.problems import Problem
from verlite.config.sources import Assignment
from verlite.importing import VERL_VARIABLE, module_path
from verlite.masking import display

OWN_ROWS = ("data.custom_cls.path", "data.sampler.class_path")
SECTIONS = ("reward.reward_manager", "reward_manager")
MANAGERS = (*(f"{section}.name" for section in SECTIONS), "reward_model.reward_manager")
ROLLOUT = "actor_rollout_ref.rollout."
MULTI_TURN = f"{ROLLOUT}multi_turn."
AGENT = f"{ROLLOUT}agent."
LOOPS = f"{AGENT}agent_loop_config_path"
LOOP = f"{AGENT}default_agent_loop"
TOOLS = (f"{MULTI_TURN}tool_config_path", "data.tool_config_path")
FUNCTION = "custom_reward_function."
KWARGS = f"{FUNCTION}reward_kwargs."


def to_own_code(
    given: Sequence[Assignment], command: Command
) -> tuple[list[Assignment], list[str], list[Problem]]:
    """Return the assignments with verlite's keys, remarks about them, and problems."""
    names = [command.tables.new_name(one.key) or one.key for one in given]
    values = {name: one.value for name, one in zip(names, given, strict=True)}
    out, remarks, problems = list(given), list[str](), list[Problem]()
    if any(values.get(name) for name in OWN_ROWS):
        out = [_own_setting(one, command, remarks) for one in out]
    variable = f"ray_kwargs.ray_init.runtime_env.env_vars.{VERL_VARIABLE}"
    if "1" not in (os.environ.get(VERL_VARIABLE), str(values.get(variable))):
        return out, remarks, problems
    manager = _manager(values)
    if manager:
        out = _scored_by(out, *manager, values, remarks)
    if values.get(LOOPS):
        out = _with_loops(out, values, remarks)
    elif any(values.get(name) for name in TOOLS):
        out = _with_tools(out, values, remarks, problems)
    return out, remarks, problems


def _own_setting(one: Assignment, command: Command, remarks: list[str]) -> Assignment:
    """Return `+data.KEY` as `data.extra.KEY` if neither verlite nor verl has the key."""
    if not one.added or not one.key.startswith("data.") or command.meaning(one.key):
        return one
    new = "data.extra." + one.key.removeprefix("data.")
    remarks.append(f"{one.key} is a setting of your own data set or sampler: {new}")
    return replace(one, key=new)


def _manager(values: dict[str, Any]) -> tuple[str, str, str] | None:
    """Return the key, file and class of a reward manager of the user's; None without one."""
    for section in SECTIONS:
        path = values.get(f"{section}.module.path")
        if path and values.get(f"{section}.source") == "importlib":
            name = values.get(f"{section}.name") or values.get(f"{section}.module.name")
            return f"{section}.module.path", str(path), str(name)
    function = values.get(f"{FUNCTION}path")
    for key in MANAGERS:
        place, colon, name = str(values.get(key)).rpartition(":")
        if colon:
            return key, place, name
        found = _registered(str(function), name) if function and values.get(key) else None
        if found:
            return key, str(function), found
    return None


def _registered(place: str, name: str) -> str | None:
    """Return the class of a file that has the decorator register(name), as verl looks it up."""
    for node in _body(place):
        for each in node.decorator_list if isinstance(node, ast.ClassDef) else ():
            named = each.args if isinstance(each, ast.Call) else []
            if any(isinstance(arg, ast.Constant) and arg.value == name for arg in named):
                return node.name  # type: ignore[attr-defined]
    return None


def _body(place: str) -> list[ast.stmt]:
    """Return the statements of a file or module; [] if it cannot be read."""
    file = module_path(place)
    try:
        return ast.parse(file.expanduser().read_text(encoding="utf-8")).body if file else []
    except (OSError, SyntaxError, ValueError, RuntimeError):  # its rule says what is wrong with it
        return []


def _scored_by(
    given: list[Assignment],
    key: str,
    place: str,
    name: str,
    values: dict[str, Any],
    remarks: list[str],
) -> list[Assignment]:
    """Return the assignments with a manager class as the reward function.

    The reward function of the command and its arguments become what the manager calls. A file that
    has the manager may have no such function.
    """
    function = values.get(f"{FUNCTION}path")
    scorer = values.get(f"{FUNCTION}name")
    if function and not scorer:
        scorer = "compute_score"
        own = [node for node in _body(place) if not isinstance(node, ast.ClassDef)]
        if str(function) == place and not any(scorer in ast.dump(node) for node in own):
            function = None
    if function and str(function).endswith(".py"):
        function = Path(str(function)).expanduser().absolute()
    out = []
    for one in given:
        full = one.key.removeprefix("reward.")
        if one.key in MANAGERS or one.key.startswith(tuple(f"{each}." for each in SECTIONS)):
            continue
        if full in (f"{FUNCTION}path", f"{FUNCTION}name"):
            continue
        if full.startswith(KWARGS):
            one = replace(one, key=f"{KWARGS}score_kwargs.{full.removeprefix(KWARGS)}")
        out.append(one)
    origin = next(one for one in given if one.key == key)
    new = {f"{FUNCTION}path": place, f"{FUNCTION}name": name}
    new[f"{KWARGS}tokenizer"] = "${actor_rollout_ref.model.path}"
    if function:
        new[f"{KWARGS}compute_score"] = f"{function}:{scorer}"
    remarks.append(_sets(origin, new))
    return out + [replace(origin, key=name, value=value) for name, value in new.items()]


def _with_tools(
    given: list[Assignment], values: dict[str, Any], remarks: list[str], problems: list[Problem]
) -> list[Assignment]:
    """Return the assignments with the environment that plays the tools of a YAML file."""
    origin = next(one for one in given if one.key in TOOLS and one.value)
    new = {
        "env.name": "verlite.compat.tools:VerlTools",
        "env.kwargs.tool_config_path": origin.value,
    }
    # A model with A turns makes A - 1 calls; after U answers of tools it has its last turn.
    limits = {f"{MULTI_TURN}max_assistant_turns": 1, f"{MULTI_TURN}max_user_turns": 0}
    calls = [values[key] - less for key, less in limits.items() if isinstance(values.get(key), int)]
    if not values.get("max_turns"):
        if not calls or min(calls) < 1:
            key = next(iter(limits))
            rule = f"must be at least 2 with {origin.key}"
            remedy = "It is the number of the model's turns, the answer included."
            problems.append(Problem(key, values.get(key), rule, remedy))
        else:
            new["max_turns"] = min(calls)
    remarks.append(_sets(origin, new))
    dropped = {*TOOLS, *limits, f"{MULTI_TURN}enable"}
    if values.get(LOOP) == "tool_agent":
        dropped.add(LOOP)
    out = [one for one in given if one.key not in dropped]
    return out + [replace(origin, key=name, value=value) for name, value in new.items()]


def _with_loops(
    given: list[Assignment], values: dict[str, Any], remarks: list[str]
) -> list[Assignment]:
    """Return the assignments with the environment that runs a loop of a YAML file.

    The loop's `config` has verl's sections multi_turn and agent, and the lengths.
    """
    origin = next(one for one in given if one.key == LOOPS)
    new: dict[str, Any] = {
        "env.name": plan.LOOPS,
        "env.kwargs.agent_loop_config_path": origin.value,
    }
    if not values.get("max_turns"):
        new["max_turns"] = 1  # the loop itself decides
    if values.get(LOOP) not in (None, "single_turn_agent"):
        new["env.kwargs.default_agent_loop"] = values[LOOP]
    tools = next((values[name] for name in TOOLS if values.get(name)), None)
    if tools:
        new["env.kwargs.tool_config_path"] = tools
    remarks.append(_sets(origin, new))
    lengths = ("data.max_prompt_length", "data.max_response_length")
    data = (*lengths, "data.apply_chat_template_kwargs")
    seen = {key: f"${{{key}}}" for key in (*data, "actor_rollout_ref.model.path")}
    seen |= {
        f"{ROLLOUT}{name}": f"${{{key}}}"
        for name, key in zip(("prompt_length", "response_length"), lengths, strict=True)
    }
    sections = {
        key: defaults[-1]
        for key, defaults in translation.defaults().items()
        if key.startswith((MULTI_TURN, AGENT)) and "_target_" not in key
    }
    own = {name: value for name, value in values.items() if name.startswith((MULTI_TURN, AGENT))}
    new |= {f"env.kwargs.config.{key}": value for key, value in (seen | sections | own).items()}
    out = [one for one in given if one.key not in (*TOOLS, *own)]
    return out + [replace(origin, key=name, value=value) for name, value in new.items()]


def _sets(origin: Assignment, new: dict[str, Any]) -> str:
    shown = " ".join(f"{key}={display(key, value)}" for key, value in new.items())
    return f"{origin.key}={display(origin.key, origin.value)} sets {shown}"
