"""Hints about legal values that are probably mistakes: far from what anyone uses, typed with quotes
or shell variables, or ground truths that are empty.

They are notes of `verlite check` and of a run's start, and refuse nothing.
"""

import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verlite import tables
from verlite.config import ineffective, keys, plan
from verlite.config.schema import Config
from verlite.hub import HubError, local_file
from verlite.importing import VERL_VARIABLE
from verlite.masking import display

ACTOR = "actor_rollout_ref.actor."
ROLLOUT = "actor_rollout_ref.rollout."
EXAMPLES = "the examples of verl, verl-recipe and Search-R1"
TRUTH_ROWS = 20_000
"""Ground truths that are looked at, of each file."""
QUOTED = re.compile(r"""(['"]).*\1|[“‘].*[”’]""", re.DOTALL)
SHELL_VARIABLE = re.compile(r"\$([A-Z][A-Z0-9_]+)")


@dataclass(frozen=True)
class Range:
    """The values of a number that anyone uses."""

    key: str
    low: float
    high: float
    """Values below `low` or above `high` get a note. Both are far outside of what was seen."""
    seen: str
    """The values of published recipes."""
    source: str
    remedy: str = ""


LEARNING_RATE = "Try 1e-6 for all weights, 1e-5 to 1e-4 for LoRA."
RANGES = (
    Range(f"{ACTOR}optim.lr", 1e-9, 3e-3, "2e-7 to 3e-5", EXAMPLES, LEARNING_RATE),
    Range("critic.optim.lr", 1e-9, 1e-2, "1e-6 to 1e-5", EXAMPLES, "Try 1e-5."),
    Range(f"{ACTOR}optim.weight_decay", 0, 1, "0 to 0.1", EXAMPLES, "Try 0.01."),
    Range(
        f"{ACTOR}clip_ratio", 1e-5, 10, "3e-4 (GSPO) to 0.4", "the GSPO paper and verl", "Try 0.2."
    ),
    Range(
        f"{ACTOR}clip_ratio_low", 1e-5, 10, "3e-4 (GSPO) to 0.4; 10 for CISPO", EXAMPLES, "Try 0.2."
    ),
    Range(f"{ACTOR}clip_ratio_high", 1e-5, 10, "4e-4 (GSPO) to 0.4", EXAMPLES, "Try 0.28."),
    Range(f"{ACTOR}entropy_coeff", -0.1, 0.3, "0 to 0.01", EXAMPLES, "Try 0."),
    Range(f"{ACTOR}kl_loss_coef", 0, 1, "0 to 0.04", "DeepSeekMath and verl", "Try 0.001."),
    Range(f"{ACTOR}ppo_epochs", 1, 20, "1 to 4", EXAMPLES, "Try 1."),
    Range("algorithm.kl_ctrl.kl_coef", 0, 1, "0 to 0.05", "InstructGPT and verl", "Try 0.001."),
    Range("algorithm.gamma", 0.9, 1, "0.99 to 1", EXAMPLES, "Try 1."),
    Range("algorithm.lam", 0.5, 1, "0.95 to 1", EXAMPLES, "Try 1."),
    Range(f"{ROLLOUT}temperature", 0.2, 2, "0.6 to 1.5", "verl and POLARIS", "Try 1."),
    Range(
        f"{ROLLOUT}val_kwargs.temperature", 0, 2, "0 to 1", EXAMPLES, "Try 0.6, or 0 for greedy."
    ),
    Range(f"{ROLLOUT}n", 1, 512, "1 to 64", "DeepSeekMath and verl", "Try 8."),
    Range(f"{ROLLOUT}val_kwargs.n", 1, 1024, "1 to 64", EXAMPLES, "Try 8."),
    Range(f"{ROLLOUT}gpu_memory_utilization", 0.05, 0.95, "0.1 to 0.9", EXAMPLES, "Try 0.5."),
    Range("actor_rollout_ref.model.lora_rank", 0, 1024, "8 to 256", EXAMPLES, "Try 32."),
    Range("data.train_batch_size", 1, 65536, "8 to 4096 prompts", EXAMPLES, "Try 256."),
    Range("data.max_prompt_length", 1, 262144, "256 to 32768 tokens", EXAMPLES),
    Range("data.max_response_length", 1, 262144, "256 to 32768 tokens", EXAMPLES),
    Range("trainer.total_epochs", 1, 10000, "1 to 100", EXAMPLES, "Try 1 to 15."),
)


def hints(config: Config, user_keys: Collection[str]) -> list[str]:
    """Return one line for each value that is probably a mistake: key, value, range, remedy."""
    return [
        *_verl_compat(config),
        *_far_values(config),
        *_typed_text(config, user_keys),
        *_model_names(config),
        *_files_twice(config),
        *_empty_truths(config),
    ]


def _far_values(config: Config) -> Iterator[str]:
    for known in RANGES:
        value = keys.get(config, known.key)
        if value is None or known.low <= value <= known.high:
            continue
        if ineffective.why_unused(known.key, config) is None:
            yield (
                f"{known.key}={value:g} is far from published values, which are {known.seen} "
                f"({known.source}). {known.remedy}"
            ).rstrip()


def _typed_text(config: Config, user_keys: Collection[str]) -> Iterator[str]:
    """Yield values with quotes around them, or with variables that a shell did not expand."""
    for name in sorted(user_keys):
        key = keys.find(name)
        if key is None or key.section or key.free and name == key.name:
            continue
        try:
            value = keys.get(config, name)
        except KeyError:
            continue  # an entry that ~key removed
        for item in value if isinstance(value, list) else [value]:
            if not isinstance(item, str):
                continue
            shown = f"{name}={display(name, item, not key.free)}"
            if len(item) > 1 and QUOTED.fullmatch(item):
                yield f"{shown}: the quotes are part of the value. Leave out one level of quotes."
            found = SHELL_VARIABLE.search(item)
            if found and not key.free:
                yield (
                    f"{shown} contains {found[0]}, which was not expanded. In a shell use double "
                    f"quotes; in a YAML file write ${{oc.env:{found[1]}}}."
                )


def _model_names(config: Config) -> Iterator[str]:
    """Yield a model path that is neither a folder nor a name with an owner."""
    path = config.actor_rollout_ref.model.path
    if "/" not in path and not Path(path).expanduser().exists():
        yield (
            f"actor_rollout_ref.model.path={path} is not a folder here, so it is read as a name on "
            "the hub. Names there have the form OWNER/NAME, such as Qwen/Qwen2.5-0.5B."
        )


def _verl_compat(config: Config) -> Iterator[str]:
    """Yield that `import verl` is served by verlite, if it is."""
    variables = os.environ | config.ray_kwargs.ray_init.runtime_env.env_vars
    if variables.get(VERL_VARIABLE) == "1":
        yield (
            f"{VERL_VARIABLE}=1: files that import verl get verlite's own versions of its "
            "functions and classes, unless verl is installed (docs/migration/verl.md)."
        )


def _files_twice(config: Config) -> Iterator[str]:
    """Yield files that are named more than once."""
    for key in ("data.train_files", "data.val_files"):
        files = plan.files_of(keys.get(config, key))
        for file in dict.fromkeys(files):
            if files.count(file) > 1:
                yield f"{key} names {file} {files.count(file)} times, so its rows count as often."


def _empty_truths(config: Config) -> Iterator[str]:
    """Yield files with empty ground truths, which the built-in scorers cannot use."""
    if config.data.custom_cls.path is not None:
        return  # which makes the rows
    if config.custom_reward_function.path is not None or plan.scores_remotely(config.reward):
        return
    for key, files in (
        ("data.train_files", config.data.train_files),
        ("data.val_files", config.data.val_files),
    ):
        for file in plan.files_of(files):
            try:
                path = local_file(file)
            except HubError:
                continue
            if not path.is_file():
                continue  # reported by a rule, or on another machine
            rows, empty = _count_empty(path)
            if empty:
                yield (
                    f"{key}={file}: {len(empty)} of {rows} rows have an empty ground truth, the "
                    f"first is row {empty[0]}. Their samples always score 0. Remove these rows."
                )


def _count_empty(file: Path) -> tuple[int, list[int]]:
    """Return how many rows of a file were looked at, and which have an empty ground truth."""
    try:
        values: list[Any] = tables.head(file, "reward_model", TRUTH_ROWS)
    except (tables.TableError, KeyError):
        return 0, []  # rules report it
    truths = [value.get("ground_truth") if isinstance(value, dict) else value for value in values]
    return len(truths), [row for row, truth in enumerate(truths) if _is_empty(truth)]


def _is_empty(truth: Any) -> bool:
    if isinstance(truth, dict):  # the search data: {"target": [answers]}
        truth = truth.get("target", truth)
    if isinstance(truth, list):
        return all(_is_empty(item) for item in truth)
    return truth is None or isinstance(truth, str) and not truth.strip()
