"""Notes of `verlite check` and of a run's start on legal settings that are rarely meant.

Notes on keys without effect come from their fields' `used_when` (`declared`).
"""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from verlite import tables
from verlite.config import keys, placement, plan
from verlite.config.rules.context import KEYS, Context
from verlite.config.rules.declared import why_unused
from verlite.hub import HubError, local_file
from verlite.importing import VERL_VARIABLE
from verlite.masking import display
from verlite.spec import catalog

NO_INFLUENCE = "the KL to the reference is computed, which costs a reference, but has no influence"

# fmt: off
NOTES: tuple[tuple[Callable[[Context], Any], str], ...] = (
    (lambda c: c.rollout.name == "auto" and c.engine == "vllm",
     "actor_rollout_ref.rollout.name=auto chose vllm"),
    (lambda c: c.rollout.name == "auto" and c.engine != "vllm",
     "actor_rollout_ref.rollout.name=auto chose {c.engine}: vLLM is not installed"),
    (lambda c: c.actor.ppo_mini_batch_size > c.prompts,
     "actor_rollout_ref.actor.ppo_mini_batch_size={c.actor.ppo_mini_batch_size} is more than "
     "data.train_batch_size={c.prompts}; both count prompts: one update per step"),
    (lambda c: c.needs_critic and (c.critic.ppo_mini_batch_size or 0) > c.prompts,
     "critic.ppo_mini_batch_size={c.critic.ppo_mini_batch_size} is more than "
     "data.train_batch_size={c.prompts}; both count prompts: one update per step"),
    (lambda c: c.n == 1 and catalog.estimator(c.estimator).compares,
     "algorithm.adv_estimator={c.estimator} with actor_rollout_ref.rollout.n=1: a prompt has no "
     "other sample to compare with, so the advantage is {c.lone_advantage}, without a baseline; "
     "usual: 4 to 16"),
    (lambda c: c.loss and c.loss.aggregation not in (None, c.actor.loss_agg_mode),
     "actor_rollout_ref.actor.loss_agg_mode={c.actor.loss_agg_mode}: the paper of "
     "policy_loss.loss_mode={c.loss_mode} uses {c.loss.aggregation}"),
    (lambda c: c.actor.fsdp_config.use_torch_compile,
     "actor_rollout_ref.actor.fsdp_config.use_torch_compile=true compiles the model's layers, "
     "where verl compiles only the entropy: the first passes take a minute longer"),
    (lambda c: c.algorithm.use_kl_in_reward and c.actor.use_kl_loss,
     "the KL to the reference counts twice: algorithm.use_kl_in_reward and "
     "actor_rollout_ref.actor.use_kl_loss are both on"),
    (lambda c: c.actor.use_kl_loss and c.actor.kl_loss_coef == 0,
     f"actor_rollout_ref.actor.kl_loss_coef=0: {NO_INFLUENCE}"),
    (lambda c: c.actor.use_kl_loss and c.actor.kl_loss_type in ("kl", "k1"),
     "actor_rollout_ref.actor.kl_loss_type={c.actor.kl_loss_type}: the expected gradient of this "
     "estimator is 0, so it adds noise and no constraint; use {c.actor.kl_loss_type}+ or "
     "low_var_kl"),
    (lambda c: (c.distilled and not c.distilled.use_policy_gradient
         and c.distilled.loss_mode in ("kl", "k1")),
     "distillation.distillation_loss.loss_mode={c.distilled.loss_mode}: the expected gradient of "
     "this estimator as a loss is 0; use use_policy_gradient=true, k2 or "
     "{c.distilled.loss_mode}+"),
    (lambda c: (c.distilled and c.distilled.use_policy_gradient
         and c.distilled.loss_mode not in ("kl", "k1")),
     "distillation.distillation_loss.loss_mode={c.distilled.loss_mode} as an advantage also pulls "
     "tokens down that the teacher prefers; use_policy_gradient=true is meant for k1"),
    (lambda c: c.estimator == "rloo_token_kl" and not c.algorithm.use_kl_in_reward,
     "algorithm.adv_estimator=rloo_token_kl is rloo with clipped advantages while "
     "algorithm.use_kl_in_reward is off"),
    (lambda c: (c.algorithm.use_kl_in_reward and c.algorithm.kl_ctrl.type == "fixed"
         and c.algorithm.kl_ctrl.kl_coef == 0), f"algorithm.kl_ctrl.kl_coef=0: {NO_INFLUENCE}"),
    (lambda c: c.algorithm.use_kl_in_reward and c.algorithm.kl_penalty.endswith("+"),
     "algorithm.kl_penalty={c.algorithm.kl_penalty}: a reward has no gradient, so the + has no "
     "effect"),
    (lambda c: c.algorithm.filter_groups.enable and c.trainer.epochs() is not None,
     "trainer.total_epochs counts data.train_batch_size prompts per step, but "
     "algorithm.filter_groups draws more: set trainer.total_training_steps for an exact length"),
    (lambda c: c.algorithm.filter_groups.enable and c.n > 1 and "values" in c.measured,
     "algorithm.filter_groups leaves out prompts whose samples agree: the critic never learns "
     "their values"),
    (lambda c: (c.is_async and c.async_training.max_age
         and plan.steps_ahead(c.config) == 0),
     "async_training.depth=0: nothing is sampled ahead of the current step, as with "
     "trainer.mode=sync, so async_training.max_age={c.async_training.max_age} has no effect"),
    (lambda c: (c.overlaps and "actor_rollout_ref.rollout.free_cache_engine" in c.user_keys
         and c.rollout.free_cache_engine and plan.resolve_device(c.trainer.device) == "cuda"),
     "actor_rollout_ref.rollout.free_cache_engine=true: the engines of "
     "trainer.mode={c.trainer.mode} do not sleep after their first weights, so nothing is freed. "
     "Use false"),
    (lambda c: c.gradients_wait_for,
     "trainer.mode=pipelined computes log-probs and values while prompts are sampled, but no "
     "gradients: with {c.gradients_wait_for} they need all samples of a step"),
    (lambda c: (c.is_async and c.engine == "hf" and c.async_training.partial_rollout
         and c.async_training.kv_cache == "mixed"),
     "async_training.kv_cache=mixed is the same as salted with the engine hf, which reuses no "
     "cached prefixes"),
    (lambda c: (c.turns and not plan.decides_turns(c.config)
         and plan.worst_case(c.config) > c.longest),
     "samples may not fit: {c.length_arithmetic}"),
    (lambda c: "actor_rollout_ref.rollout.n_agent" in c.old_names and c.n > 1,
     "actor_rollout_ref.actor.ppo_mini_batch_size counts prompts here, {c.n} samples each; "
     "Search-R1 counted samples, so its runs made {c.n} times as many updates"),
    (lambda c: c.val_files and c.rollout.val_kwargs.n > 1 and not _samples(c),
     "actor_rollout_ref.rollout.val_kwargs.n={c.rollout.val_kwargs.n}: validation is greedy, so "
     "all samples of a prompt are the same"),
    (lambda c: (c.val_files and c.rollout.val_kwargs.n == 1 and c.rollout.val_kwargs.do_sample
         and not _samples(c)),
     "actor_rollout_ref.rollout.val_kwargs.temperature=0 is greedy although do_sample is on"),
    (lambda c: _variables(c).get(VERL_VARIABLE) == "1",
     f"{VERL_VARIABLE}=1: files that import verl get verlite's own versions of its functions "
     "and classes, unless verl is installed (docs/migration/verl.md)."),
    (lambda c: "/" not in c.model.path and not Path(c.model.path).expanduser().exists(),
     "actor_rollout_ref.model.path={c.model.path} is not a folder here, so it is read as a name on "
     "the hub. Names there have the form OWNER/NAME, such as Qwen/Qwen2.5-0.5B."),
)
# fmt: on
"""Condition, and what is noted where it holds. docs/rules.md has an example of each."""


class Usual(NamedTuple):
    """The values of a number that anyone uses."""

    key: str
    low: float
    high: float
    """Values below `low` or above `high` get a note. Both are far outside of what was seen."""
    seen: str
    """The values of published recipes."""
    remedy: str = ""
    source: str = "the examples of verl, verl-recipe and Search-R1"


# fmt: off
USUAL = (
    Usual("actor_rollout_ref.actor.optim.lr", 1e-9, 3e-3, "2e-7 to 3e-5",
          "Try 1e-6 for all weights, 1e-5 to 1e-4 for LoRA."),
    Usual("critic.optim.lr", 1e-9, 1e-2, "1e-6 to 1e-5", "Try 1e-5."),
    Usual("actor_rollout_ref.actor.optim.weight_decay", 0, 1, "0 to 0.1", "Try 0.01."),
    Usual("actor_rollout_ref.actor.clip_ratio", 1e-5, 10, "3e-4 (GSPO) to 0.4", "Try 0.2.",
          "the GSPO paper and verl"),
    Usual("actor_rollout_ref.actor.clip_ratio_low", 1e-5, 10, "3e-4 (GSPO) to 0.4; 10 for CISPO",
          "Try 0.2."),
    Usual("actor_rollout_ref.actor.clip_ratio_high", 1e-5, 10, "4e-4 (GSPO) to 0.4", "Try 0.28."),
    Usual("actor_rollout_ref.actor.entropy_coeff", -0.1, 0.3, "0 to 0.01", "Try 0."),
    Usual("actor_rollout_ref.actor.kl_loss_coef", 0, 1, "0 to 0.04", "Try 0.001.",
          "DeepSeekMath and verl"),
    Usual("actor_rollout_ref.actor.ppo_epochs", 1, 20, "1 to 4", "Try 1."),
    Usual("algorithm.kl_ctrl.kl_coef", 0, 1, "0 to 0.05", "Try 0.001.", "InstructGPT and verl"),
    Usual("algorithm.gamma", 0.9, 1, "0.99 to 1", "Try 1."),
    Usual("algorithm.lam", 0.5, 1, "0.95 to 1", "Try 1."),
    Usual("actor_rollout_ref.rollout.temperature", 0.2, 2, "0.6 to 1.5", "Try 1.",
          "verl and POLARIS"),
    Usual("actor_rollout_ref.rollout.val_kwargs.temperature", 0, 2, "0 to 1",
          "Try 0.6, or 0 for greedy."),
    Usual("actor_rollout_ref.rollout.n", 1, 512, "1 to 64", "Try 8.", "DeepSeekMath and verl"),
    Usual("actor_rollout_ref.rollout.val_kwargs.n", 1, 1024, "1 to 64", "Try 8."),
    Usual("actor_rollout_ref.rollout.gpu_memory_utilization", 0.05, 0.95, "0.1 to 0.9", "Try 0.5."),
    Usual("actor_rollout_ref.model.lora_rank", 0, 1024, "8 to 256", "Try 32."),
    Usual("data.train_batch_size", 1, 65536, "8 to 4096 prompts", "Try 256."),
    Usual("data.max_prompt_length", 1, 262144, "256 to 32768 tokens"),
    Usual("data.max_response_length", 1, 262144, "256 to 32768 tokens"),
    Usual("trainer.total_epochs", 1, 10000, "1 to 100", "Try 1 to 15."),
)
# fmt: on
TRUTH_ROWS = 20_000
"""Ground truths that are looked at, of each file."""
QUOTED = re.compile(r"""(['"]).*\1|[“‘].*[”’]""", re.DOTALL)
SHELL_VARIABLE = re.compile(r"\$([A-Z][A-Z0-9_]+)")


def notes(c: Context) -> list[str]:
    """Return the notes on a configuration, each a whole sentence."""
    return [
        *_placement(c),
        *_truncated_samples(c),
        *(text.format(c=c) for holds, text in NOTES if holds(c)),
        *far_values(c),
        *_typed_text(c),
        *_files_twice(c),
        *_empty_truths(c),
    ]


def _samples(c: Context) -> bool:
    sampling = c.rollout.val_kwargs
    return sampling.do_sample and sampling.temperature > 0


def _variables(c: Context) -> dict[str, str]:
    return os.environ | c.config.ray_kwargs.ray_init.runtime_env.env_vars


def _placement(c: Context) -> Iterator[str]:
    """Yield roles of the placement that have another name here, or that are none."""
    spec = c.config.cluster.component_placement or {}
    typed = {name.strip() for names in spec for name in names.split(",")}
    for name in sorted(typed & placement.RENAMED.keys()):
        yield f"cluster.component_placement: {name} is called {placement.RENAMED[name]} here"
    for name in sorted(typed & placement.IGNORED.keys()):
        yield f"cluster.component_placement: {name} has no effect: {placement.IGNORED[name]}"


def _truncated_samples(c: Context) -> Iterator[str]:
    truncating = []
    if c.rollout.top_p < 1:
        truncating.append(f"actor_rollout_ref.rollout.top_p={c.rollout.top_p}")
    if c.rollout.top_k > 0:
        truncating.append(f"actor_rollout_ref.rollout.top_k={c.rollout.top_k}")
    if truncating:
        yield (
            f"{' and '.join(truncating)}: samples come from a truncated distribution, but training "
            "uses the full one; rollout and training log-probs will differ"
        )


def far_values(c: Context) -> Iterator[str]:
    """Yield numbers that have an effect and are far from what anyone uses."""
    for usual in USUAL:
        value = keys.get(c.config, usual.key)
        if value is None or usual.low <= value <= usual.high or why_unused(usual.key, c):
            continue
        yield (
            f"{usual.key}={value:g} is far from published values, which are {usual.seen} "
            f"({usual.source}). {usual.remedy}"
        ).rstrip()


def _typed_text(c: Context) -> Iterator[str]:
    """Yield values with quotes around them, or with variables that a shell did not expand."""
    for name in sorted(c.user_keys):
        key = keys.find(name, KEYS)
        if key is None or key.section or key.free and name == key.name:
            continue
        try:
            value = keys.get(c.config, name)
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


def _files_twice(c: Context) -> Iterator[str]:
    """Yield files that are named more than once."""
    for key in ("data.train_files", "data.val_files"):
        files = plan.files_of(keys.get(c.config, key))
        for file in dict.fromkeys(files):
            if files.count(file) > 1:
                yield f"{key} names {file} {files.count(file)} times, so its rows count as often."


def _empty_truths(c: Context) -> Iterator[str]:
    """Yield files with empty ground truths, which the built-in scorers cannot use."""
    if c.data.custom_cls.path is not None:
        return  # which makes the rows
    if c.config.custom_reward_function.path is not None or plan.scores_remotely(c.reward):
        return
    if plan.scores_itself(c.config):
        return
    for key in ("data.train_files", "data.val_files"):
        for file in plan.files_of(keys.get(c.config, key)):
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
    return len(truths), [row for row, truth in enumerate(truths) if is_empty(truth)]


def is_empty(truth: Any) -> bool:
    """Return whether a ground truth has no text. Search data have {"target": [answers]}."""
    if isinstance(truth, dict):
        truth = truth.get("target", truth)
    if isinstance(truth, list):
        return all(is_empty(item) for item in truth)
    return truth is None or isinstance(truth, str) and not truth.strip()
