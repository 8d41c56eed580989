"""Convert a YAML file of RLinf's math and reasoning examples."""

import io
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verlite.config.problems import ConfigError, Problem
from verlite.convert.engine import Draft, apply
from verlite.convert.formulas import CORRECTION, dual_clip, prepare_data, trackers, verbatim
from verlite.convert.rows import ACTOR, MODEL, REF, ROLLOUT, find, read, unknown
from verlite.convert.text import Conversion
from verlite.files import check_yaml, one_line

FILE = Path(__file__).with_suffix(".toml")
_ACTOR = read(FILE, role="actor", section=ACTOR, fsdp=f"{ACTOR}fsdp_config.").sections
_CRITIC = read(
    FILE, role="critic", section="critic.", fsdp="critic.model.fsdp_config.", model="critic.model."
).sections
KEYS = (*_ACTOR["keys"], *_ACTOR["model"], *_ACTOR["critic"], *_CRITIC["model"], *_ACTOR["reward"])
"""Every key of RLinf's math YAMLs."""
PRECISIONS = {"fp16": "bfloat16", "bf16": "bfloat16", "fp32": "float32"}
MAPPINGS = ("cluster.component_placement",)
"""Keys whose value is a mapping."""


def convert(file: Path) -> Conversion:
    """Convert a file.

    Raises:
        ConfigError: it cannot be read, or has an unknown key.
    """
    given: dict[str, Any] = {}
    problems: list[Problem] = []
    for key, value in load(file).items():
        row = find(KEYS, key)
        if isinstance(value, OmegaConfBaseException):
            if row and row.act in ("same", "derived", "refused"):
                problems.append(Problem(key, None, str(value).splitlines()[0]))
            continue
        if row is None:
            problems.append(unknown(KEYS, key, value, "is not a key of RLinf's math YAMLs"))
        else:
            given[row.name] = row.name if "*" in row.name else value
    if problems:
        raise ConfigError(problems)
    return apply(Draft("RLinf", KEYS, given, keep=False), FORMULAS)


def load(file: Path) -> dict[str, Any]:
    """Read a file with the files of its defaults list, and resolve `${...}`.

    Returns:
        {dotted key: value}. The value is an error if it cannot be resolved.

    Raises:
        ConfigError: a file is missing or invalid.
    """
    try:
        tree = OmegaConf.create({})
        content = _read(file)
        entries = content.pop("defaults", None) or []
        for entry in entries if isinstance(entries, list) else [entries]:
            name = next(iter(entry), "") if isinstance(entry, dict) else entry
            if not isinstance(entry, str) and not str(name).startswith("override"):
                rule = "is not read: write the keys of this file into the YAML file"
                raise ConfigError([Problem("defaults", entry, rule)])
            if isinstance(entry, str) and entry != "_self_":
                name, _, package = entry.partition("@")
                part = _read(file.parent / f"{name}.yaml")
                OmegaConf.update(tree, package, part) if package else tree.merge_with(part)
        tree.merge_with(content)
        with functions():
            return dict(_leaves(tree, ""))
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        rule = f"cannot be read: {str(error).splitlines()[0]}"
        raise ConfigError([Problem(str(file), None, rule)]) from error


def _read(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
        check_yaml(text)
        loaded = OmegaConf.load(io.StringIO(text))
    except (OSError, ValueError, RecursionError) as error:
        rule = f"cannot be read: {getattr(error, 'strerror', None) or one_line(error)}"
        raise ConfigError([Problem(str(file), None, rule)]) from error
    content = OmegaConf.to_container(loaded, resolve=False)
    if not isinstance(content, dict):
        raise ConfigError([Problem(str(file), None, "must contain keys and values")])
    return {str(key): value for key, value in content.items()}


@contextmanager
def functions() -> Iterator[None]:
    """Make the functions of RLinf's YAMLs known to OmegaConf, such as ${subtract:a,b}."""
    known: dict[str, Callable[..., Any]] = {
        "not": lambda value: not value,
        "subtract": lambda a, b: a - b,
        "multiply": lambda a, b: a * b,
        "int_div": lambda a, b: a // b,
    }
    added = [name for name in known if not OmegaConf.has_resolver(name)]
    for name in added:
        OmegaConf.register_new_resolver(name, known[name])
    try:
        yield
    finally:
        for name in added:
            OmegaConf.clear_resolver(name)


def _leaves(node: DictConfig, prefix: str) -> Iterator[tuple[str, Any]]:
    for name in node:
        key = f"{prefix}{name!s}"
        try:
            value = node[name]
        except OmegaConfBaseException as error:
            yield key, error
            continue
        if isinstance(value, DictConfig) and value and key not in MAPPINGS:
            yield from _leaves(value, f"{key}.")
        elif isinstance(value, DictConfig | ListConfig):
            yield key, OmegaConf.to_container(value, resolve=True)
        else:
            yield key, value


# The formulas


def cluster(draft: Draft) -> None:
    """Nodes, devices, and the placement without roles that need no devices."""
    placement = {}
    for names, value in (draft["cluster.component_placement"] or {}).items():
        roles = [role.strip() for role in str(names).split(",")]
        kept = [role.replace("actor_inference", "inference") for role in roles if role != "reward"]
        if kept:
            placement[",".join(kept)] = value if isinstance(value, dict) else str(value)
    if placement:
        draft.set("cluster.component_placement", placement)
        of_role = {role: spec for names, spec in placement.items() for role in names.split(",")}
        actor, rollout = of_role.get("actor"), of_role.get("rollout")
        if actor and rollout and actor != rollout and "all" not in (actor, rollout):
            draft.set("trainer.mode", "pipelined", "RLinf overlaps phases with this placement")
    nodes, per_node = draft["cluster.num_nodes"], draft["cluster.num_gpus_per_node"]
    if per_node:
        draft.set("trainer.n_gpus_per_node", per_node, explicit=True)
        return
    numbers = [
        int(number) for value in placement.values() for number in re.findall(r"\d+", str(value))
    ]
    named = bool(numbers) and "all" not in placement.values()
    guess = -(-(max(numbers) + 1) // nodes) if named else 8
    draft.set("trainer.n_gpus_per_node", guess, "RLinf counts the GPUs of a node; set yours")


def lengths(draft: Draft) -> None:
    """Prompt and response lengths."""
    prompt, total = draft["data.max_prompt_length"], draft["runner.seq_length"]
    response = draft["algorithm.sampling_params.max_new_tokens"]
    if not prompt or not (response or total):
        rule = "data.max_prompt_length and runner.seq_length are needed"
        draft.refuse("data.max_prompt_length", rule)
        return
    draft.set("data.max_prompt_length", prompt, explicit=True)
    comment = f"runner.seq_length {total} - data.max_prompt_length {prompt}" if total else ""
    draft.set("data.max_response_length", response or total - prompt, "" if response else comment)


def batches(draft: Draft) -> None:
    """Mini- and micro-batches."""
    prompts, count = draft["data.rollout_batch_size"], draft["algorithm.n_minibatches"]
    if not prompts or prompts % count:
        rule = f"data.rollout_batch_size={prompts} must be divisible by it"
        draft.refuse("algorithm.n_minibatches", rule)
        return
    unit = f"{count} mini-batches of {prompts} prompts -> ppo_mini_batch_size {prompts // count}"
    draft.set(ACTOR + "ppo_mini_batch_size", prompts // count, f"{unit} prompts")
    if draft["runner.enable_dynamic_batch_size"]:
        tokens = draft["runner.max_tokens_per_mbs"]
        draft.set(ACTOR + "ppo_max_token_len_per_gpu", tokens)
        return
    size = draft["algorithm.training_batch_size_per_gpu"]
    draft.set(ACTOR + "ppo_micro_batch_size_per_gpu", size)
    forward = draft["algorithm.logprob_forward_micro_batch_size"]
    if forward and forward != size:
        sections = [ROLLOUT] + [REF] * _has_reference(draft)
        for section in sections:
            draft.set(section + "log_prob_micro_batch_size_per_gpu", forward)


def estimator(draft: Draft) -> None:
    """Advantages, KL terms and clipping."""
    name = draft["algorithm.adv_type"]
    beta = draft["algorithm.reinpp_kl_beta"]
    baseline = draft["algorithm.use_reinpp_baseline"]
    own = {"gae": "gae", "grpo": "grpo", "reinpp": "reinforce_plus_plus"}
    chosen = draft.choice("algorithm.adv_type", own)
    if chosen is None:
        return
    whitens = draft["algorithm.normalize_advantages"]
    if name == "reinpp" and baseline and beta > 0:
        chosen = "grpo"
        draft.set("algorithm.norm_adv_by_std_in_grpo", False)
        draft.set("algorithm.kl_in_reward_mode", "token")
        whitens = True
    elif name == "reinpp" and baseline:
        chosen = "reinforce_plus_plus_baseline"
    comment = "" if chosen == name else f"RLinf's {name}{' with baseline' * baseline}"
    draft.set("algorithm.adv_estimator", chosen, comment, explicit=True)
    if chosen == "grpo" and whitens:
        note = "RLinf whitens over the tokens of an optimizer step, verlite over those of the step"
        draft.set("algorithm.whiten_advantages", True, note)
    elif name == "gae" and not draft["critic.use_critic_model"]:
        rule = "gae without a critic is a sum of rewards in RLinf"
        draft.refuse("critic.use_critic_model", rule, "Use true, or adv_type reinpp.")
    elif name == "gae" and not whitens:
        rule = "verlite's gae always whitens"
        draft.refuse("algorithm.normalize_advantages", rule, "Use true.")
    if name == "gae":
        draft.set("algorithm.gamma", float(draft["algorithm.gamma"]), explicit=False)
        draft.set("algorithm.lam", float(draft["algorithm.gae_lambda"]), explicit=False)
    kind = draft["algorithm.kl_penalty_type"]
    if name == "reinpp" and beta > 0:
        draft.set("algorithm.use_kl_in_reward", True)
        draft.set("algorithm.kl_ctrl.kl_coef", beta, explicit=True)
        draft.set("algorithm.kl_penalty", kind)
    if draft["algorithm.kl_beta"] > 0:
        draft.set(ACTOR + "use_kl_loss", True)
        draft.set(ACTOR + "kl_loss_coef", draft["algorithm.kl_beta"], explicit=True)
        draft.set(ACTOR + "kl_loss_type", kind)
    dual_clip(draft, draft["algorithm.clip_ratio_c"], "RLinf")


def correction(draft: Draft) -> None:
    """Log-probs of the rollout engine, and dynamic sampling."""
    if not draft["algorithm.recompute_logprobs"]:
        draft.set(CORRECTION + "bypass_mode", True)
    if draft["algorithm.importance_sampling_fix"]:
        draft.set(CORRECTION + "rollout_is", "token")
        bound = draft["algorithm.importance_sampling_clip"]
        draft.set(CORRECTION + "rollout_is_threshold", bound)
    if draft["algorithm.max_num_gen_batches"] > 1:
        draft.set("algorithm.filter_groups.enable", True)
        batches = draft["algorithm.max_num_gen_batches"]
        draft.set("algorithm.filter_groups.max_num_gen_batches", batches)
    top_k = draft["algorithm.sampling_params.top_k"]
    draft.set(ROLLOUT + "top_k", top_k if 0 < top_k < 1_000_000 else -1, explicit=False)


def optimizers(draft: Draft) -> None:
    """Schedules and precision of actor and critic."""
    _optimizer(draft, "actor", ACTOR + "optim.")
    fsdp = {"actor": ACTOR + "fsdp_config."}
    if _has_critic(draft):
        fsdp["critic"] = "critic.model.fsdp_config."
        _optimizer(draft, "critic", "critic.optim.")
        clip = draft["algorithm.value_cliprange"]
        draft.set("critic.cliprange_value", clip)
        warmup = draft["algorithm.critic_warmup_steps"]
        if warmup:
            draft.set("trainer.critic_warmup", warmup + 1, "the first step that trains the policy")
    for role, section in fsdp.items():
        _memory(draft, role, section)
    for key in [key for key in draft.values if key.startswith("critic.")]:
        if not _has_critic(draft):
            del draft.values[key]


def _optimizer(draft: Draft, role: str, section: str) -> None:
    schedule, optim = f"{role}.lr_sched.", f"{role}.optim."
    draft.set(section + "betas", [draft[optim + "adam_beta1"], draft[optim + "adam_beta2"]])
    styles = {name: name for name in ("constant", "cosine", "linear")}
    style = draft.choice(schedule + "lr_decay_style", styles)
    if style is None:
        return
    draft.set(section + "lr_scheduler_type", style, explicit=False)
    peak = draft[schedule + "max_lr"] or draft[optim + "lr"]
    if draft[optim + "lr"] and peak != draft[optim + "lr"]:
        draft.warn(schedule + "max_lr", f"{optim}lr={draft[optim + 'lr']:g} counts")
    if style != "constant":
        ratio = float(f"{draft[schedule + 'min_lr'] / peak:.12g}")
        draft.set(section + "min_lr_ratio", ratio)
        if draft[schedule + "lr_decay_iters"]:
            note = "it ends with the run; RLinf's after lr_decay_iters"
            draft.comments[section + "lr_scheduler_type"] = note
    if draft[schedule + "lr_warmup_iters"]:
        draft.set(section + "lr_warmup_steps", draft[schedule + "lr_warmup_iters"])
    else:
        fraction = draft[schedule + "lr_warmup_fraction"] or 0.0
        draft.set(section + "lr_warmup_steps_ratio", fraction, explicit=False)
    decays = {draft[schedule + f"{end}_weight_decay"] for end in ("start", "end")} - {None}
    if decays - {draft[optim + "weight_decay"]}:
        rule = "verlite's weight decay is constant"
        draft.refuse(schedule + "end_weight_decay", rule, f"Use {optim}weight_decay for both.")


def _memory(draft: Draft, role: str, section: str) -> None:
    name = f"{role}.model.precision"
    mixed, autocast = f"{role}.fsdp_config.mixed_precision.", f"{role}.fsdp_config.amp_autocast."
    if draft[autocast + "enabled"]:
        name = autocast + "precision"
    elif draft[mixed + "param_dtype"] is not None:
        name = mixed + "param_dtype"
    precision = draft[name]
    if precision is not None and precision not in PRECISIONS:
        draft.refuse(name, "is not a precision", "Known: fp16, bf16, fp32.")
    elif precision is not None:
        keys = section + "dtype" + f" {ROLLOUT}dtype" * (role == "actor")
        note = "fp16 in RLinf; verlite trains in bfloat16 or float32" * (precision == "fp16")
        draft.set(keys, PRECISIONS[precision], note)
    model = MODEL if role == "actor" else "critic.model."
    granularity = draft[f"{role}.model.recompute_granularity"]
    if draft.has(f"{role}.model.recompute_granularity"):
        draft.set(model + "enable_gradient_checkpointing", granularity is not None)
    strategy = draft[f"{role}.fsdp_config.sharding_strategy"]
    if strategy:
        frees = strategy == "full_shard" and draft[f"{role}.fsdp_config.reshard_after_forward"]
        draft.set(section + "reshard_after_forward", frees is not False, explicit=False)
        if strategy not in ("full_shard", "shard_grad_op"):
            name = f"{role}.fsdp_config.sharding_strategy"
            draft.warn(name, "fsdp_config.fsdp_size sets the devices of one sharding group")


def data(draft: Draft) -> None:
    """Files, and how prompts become text."""
    options = ["--input_key", draft["data.prompt_key"], "--label_key", draft["data.answer_key"]]
    options += ["--data_source", "math"]
    for name, key in (("train", "data.train_files"), ("val", "data.val_files")):
        files = draft[f"data.{name}_data_paths"]
        if files:
            names = ",".join(map(str, files if isinstance(files, list) else [files]))
            draft.set(key, prepare_data(draft, names, options))
    if not draft["data.apply_chat_template"]:
        verbatim(draft)
    tokenizer, model = draft["actor.tokenizer.tokenizer_model"], draft["rollout.model.model_path"]
    if tokenizer and os.path.normpath(tokenizer) != os.path.normpath(model or ""):
        draft.set(MODEL + "tokenizer_path", tokenizer)
    for name, legal in (
        ("data.type", ("math",)),
        ("runner.task_type", ("math", "reasoning")),
        ("reward.reward_type", ("math",)),
    ):
        if draft[name] not in legal:
            draft.refuse(
                name, "only math is converted", "Write the command yourself: docs/migration."
            )
    scale = draft["reward.reward_scale"]
    if draft["algorithm.adv_type"] == "grpo":
        if scale != 1:
            draft.warn("reward.reward_scale", "it cancels in grpo's normalized advantages")
        return
    comment = f"RLinf's scores are {scale:g} and -{scale:g}"
    draft.set("reward.std", 1 / scale, comment)
    draft.set("reward.score_scale", {"default": "signed"})


def run(draft: Draft) -> None:
    """How long the run is, where it writes, trackers, and resume."""
    draft.set("trainer.total_epochs", draft["runner.max_epochs"])
    if draft["runner.max_steps"] > 0:
        del draft.values["trainer.total_epochs"]
        draft.set("trainer.total_training_steps", draft["runner.max_steps"])
    if draft["data.val_data_paths"]:
        draft.set("trainer.test_freq", draft["runner.val_check_interval"])
        draft.set("trainer.val_before_train", False)
    name = draft["runner.experiment_name"]
    if name:
        draft.set("trainer.experiment_name", name)
        draft.set("trainer.default_local_dir", f"{draft['runner.output_dir']}/{name}")
    resume = draft["runner.resume_dir"]
    draft.set("trainer.resume_mode", {None: "disable", "auto": "auto"}.get(resume, "resume_path"))
    if resume not in (None, "auto"):
        note = "a checkpoint of verlite: those of RLinf cannot be loaded"
        draft.set("trainer.resume_from_path", resume, note)
    backends = "runner.logger.logger_backends"
    trackers(draft, backends, draft[backends] or [])
    tokens = draft["rollout.vllm.max_num_batched_tokens"]
    if tokens:
        draft.set(ROLLOUT + "max_num_batched_tokens", tokens)


def _has_reference(draft: Draft) -> bool:
    return bool(draft["algorithm.kl_beta"] > 0 or draft["algorithm.reinpp_kl_beta"] > 0)


def _has_critic(draft: Draft) -> bool:
    return bool(draft["algorithm.adv_type"] == "gae")


FORMULAS = (cluster, lengths, batches, estimator, correction, optimizers, data, run)
