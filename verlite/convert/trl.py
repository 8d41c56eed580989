"""Convert a script, YAML file or command line of TRL: GRPO, RLOO, PPO, SFT and DPO.

The formulas follow trl/trainer/grpo_config.py, grpo_trainer.py, rloo_trainer.py and
trl/experimental/ppo/ppo_trainer.py of version 1.16.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from verlite.config.commands import PPO
from verlite.config.problems import ConfigError, Problem
from verlite.convert import formulas
from verlite.convert.engine import Draft, apply, sentence
from verlite.convert.formulas import COMMANDS, CORRECTION, KL_NAMES, NO_DUAL_CLIP, SCHEDULES
from verlite.convert.rows import ACTOR, MODEL, ROLLOUT, Row, find, read, unknown
from verlite.convert.text import Conversion
from verlite.convert.trl_read import Computed, Settings, Source, arguments, program, read_file

DIALECT = read(Path(__file__).with_suffix(".toml"))
TABLES = DIALECT.tables("TRL")
"""Trainer -> its fields."""
REWARD_FILE = "reward.py"
"""The name in the command of the reward function that the user has to write."""
PER_NODE = 8
LONGEST = 8192
"""Tokens of a row of SFT or DPO if TRL has no limit."""
VISION_MODEL = re.compile(
    r"(?i)(?<![a-z])(vlm?|vision|smolvlm|llava|idefics|pixtral|paligemma|internvl)(?![a-z])"
)


def convert(
    file: Path | None,
    gpus: int | None = None,
    trainer: str | None = None,
    version: str | None = None,
    words: Sequence[str] = (),
) -> Conversion:
    """Convert a script (.py), a YAML file, or a command line.

    Args:
        file: the file. None: the command line names it, or `trl grpo` and the like.
        gpus: processes of the training. TRL's batch sizes are per process. None: as the command
            line of accelerate or torchrun says, else 8.
        trainer: one of TABLES. None: as the file or the command line says.
        version: TRL's version, whose defaults apply. None: the newest that is known.
        words: command line of `trl`, or of a script that takes its settings from there.

    Raises:
        ConfigError: the file cannot be read, or has an unknown field, or the version is unknown.
    """
    named, script, typed = program(words)
    file = file or (script if script and script.exists() else None)
    if file is None and (not typed or (script and not named)):
        rule = "does not exist" if script else "is missing"
        remedy = "Give a script, a YAML file, or a command line after --."
        raise ConfigError([Problem("FILE", script and str(script), rule, remedy)])
    found = read_file(file, typed) if file else Source(named or "grpo", {})
    source = f"the command line in {file}" if found.words and not typed else ""
    _, _, documented = program(found.words)
    line, after = (words, typed) if typed else (found.words, documented)
    said = formulas.processes(line[: len(line) - len(after)])
    gpus = gpus or (said.per_node or PER_NODE) * said.nodes
    is_divided = gpus % said.nodes == 0 and gpus // said.nodes <= PER_NODE
    nodes = said.nodes if is_divided else max(1, gpus // PER_NODE)
    settings = found.settings | arguments(typed or documented) | found.changed
    name = trainer or (named if named and not script else found.trainer)
    table = TABLES[name].at(version)
    given, computed = _named(table, settings, name)
    chosen = [partial(formula, gpus=gpus) for formula in FORMULAS[name]]
    chosen.append(partial(devices, gpus=gpus, nodes=nodes))
    warn = partial(_warn_of_computed, computed=computed)
    title, command = f"TRL's {name.upper()}Trainer", COMMANDS.get(name, PPO)
    renamed = formulas.own_key if name in COMMANDS else str
    draft = Draft(title, table, given, command=command, own_key=renamed)
    done = apply(draft, [*chosen, warn])
    defaults = TABLES[name].describe({*given, *computed}, version)
    if source:
        defaults = f"Settings are those of {source}: {' '.join(found.words)}. {defaults}"
    is_tuning = name in COMMANDS
    started = formulas.launch(gpus // nodes, nodes) if is_tuning else done.launch
    defaults += formulas.start_text(said, nodes if is_tuning else 1)
    return replace(done, defaults=defaults, launch=started)


OWN_TEXT = ("model_name_or_path", "dataset_name", "eval_dataset", "reward_funcs", "peft_config")
"""Settings whose expression in a script says enough."""


def _named(
    table: Sequence[Row], settings: Settings, trainer: str
) -> tuple[Settings, dict[str, Computed]]:
    """Return the settings by their names in the table, and those that a script computes."""
    given: Settings = {}
    computed: dict[str, Computed] = {}
    problems = []
    for field, value in settings.items():
        row = find(table, field)
        if field.startswith("**"):
            computed[field] = value
        elif row is None:
            rule = f"is not a setting of {trainer.upper()}Config"
            problems.append(unknown(table, field, value, rule))
        elif isinstance(value, Computed) and row.act == "refused":
            problems.append(
                Problem(field, value, "has no counterpart in verlite", sentence(row.note))
            )
        elif isinstance(value, Computed) and row.name not in OWN_TEXT and row.act != "needless":
            computed[field] = value
        else:
            given[row.name] = row.name if "*" in row.name else value
    if problems:
        raise ConfigError(problems)
    return given, computed


def _warn_of_computed(draft: Draft, computed: dict[str, Computed]) -> None:
    for field, text in computed.items():
        typed = field if field.startswith("**") else f"{field}={text}"
        row = find(draft.table, field)
        keys = filter(None, map(draft.own_key, row.to.split())) if row else ()
        counterpart = ", ".join(keys) or "its counterpart"
        draft.warn_typed(typed, f"the script computes it: set {counterpart} yourself")


# Batches


def updates(draft: Draft, gpus: int) -> int:
    """Return how many optimizer steps TRL does per generation."""
    if "num_ppo_epochs" in draft.rows:
        return int(draft["num_mini_batches"] * draft["num_ppo_epochs"])
    if draft.command is not PPO:
        return 1
    return max(1, _generated(draft, gpus) // _trained(draft, gpus)) * int(draft["num_iterations"])


def _trained(draft: Draft, gpus: int) -> int:
    """Return the samples of one optimizer step."""
    size: int = draft["per_device_train_batch_size"] * draft["gradient_accumulation_steps"] * gpus
    return size


def _generated(draft: Draft, gpus: int) -> int:
    """Return the samples of one generation."""
    steps = draft["steps_per_generation"] or draft["gradient_accumulation_steps"]
    size: int = draft["per_device_train_batch_size"] * gpus * steps
    return draft["generation_batch_size"] or size


def devices(draft: Draft, gpus: int, nodes: int) -> None:
    """As many devices as TRL has processes."""
    if gpus % nodes or gpus // nodes > PER_NODE:
        rule = f"is not a number of whole nodes of {PER_NODE}"
        draft.problems.append(Problem("--gpus", gpus, rule))
    draft.set("trainer.nnodes", nodes, explicit=False)
    note = f"TRL's batch sizes are converted for {gpus} processes (--gpus)"
    draft.set("trainer.n_gpus_per_node", gpus // nodes, note)


def batches(draft: Draft, gpus: int) -> None:
    """Samples per process become prompts per step and per update."""
    n = draft["num_generations"]
    generated, trained = _generated(draft, gpus), _trained(draft, gpus)
    for name, size in (
        ("generation_batch_size", generated),
        ("per_device_train_batch_size", trained),
    ):
        if size % n:
            rule = f"{size} samples are not a multiple of num_generations={n}"
            draft.refuse(name, rule, f"They are those of {gpus} processes: --gpus.")
            return
    if generated % trained:
        rule = f"an update of {trained} samples spans generations of {generated}"
        draft.refuse("gradient_accumulation_steps", rule, "verlite trains on one generation.")
        return
    prompts, mini = generated // n, trained // n
    draft.set(ROLLOUT + "n", n)
    unit = f"{generated} samples per generation -> train_batch_size {prompts} prompts of {n}"
    draft.set("data.train_batch_size", prompts, unit)
    unit = f"{trained} samples per update -> ppo_mini_batch_size {mini} prompts of {n}"
    draft.set(ACTOR + "ppo_mini_batch_size", mini, unit)
    _prompt_length(draft)


def ppo_batches(draft: Draft, gpus: int) -> None:
    """PPO's batch: one response per prompt, num_mini_batches updates."""
    size, parts = _trained(draft, gpus), draft["num_mini_batches"]
    if size % parts:
        draft.refuse("num_mini_batches", f"must divide the batch of {size} samples")
        return
    unit = f"batch of {size} samples on {gpus} processes, one per prompt"
    draft.set("data.train_batch_size", size, unit)
    draft.set(ACTOR + "ppo_mini_batch_size", size // parts)
    if draft["total_episodes"]:
        steps = -(-int(draft["total_episodes"]) // size)
        note = f"total_episodes {draft['total_episodes']} / {size} samples per step"
        draft.set("trainer.total_training_steps", steps, note)
        draft.values.pop("trainer.total_epochs", None)
    _prompt_length(draft)


def tuning_batches(draft: Draft, gpus: int) -> None:
    """SFT and DPO: rows per step, lengths, and the end of the schedule."""
    size = _trained(draft, gpus)
    unit = f"{draft['per_device_train_batch_size']} rows x {gpus} processes x "
    unit += f"{draft['gradient_accumulation_steps']} (--gpus)"
    if "packing" in draft.rows and draft["packing"]:
        unit += ". TRL counts packed sequences, verlite examples: multiply by the examples that "
        unit += f"{draft['max_length'] or LONGEST} tokens hold on average"
    draft.set(ACTOR + "ppo_mini_batch_size", size, unit)
    note = "TRL cuts no row: set the length of your longest; a longer one ends the run"
    longest = draft["max_length"] or LONGEST
    draft.set("data.max_length", longest, "" if draft["max_length"] else note)
    if draft["truncation_mode"] != "keep_start":
        rule = "verlite cuts longer rows at their end"
        draft.refuse("truncation_mode", rule, "Set truncation_mode to keep_start (0.29's default).")
    if draft["max_length"]:
        draft.set("data.truncation", "right", "longer rows lose their end, as in TRL")
    else:
        draft.set("data.truncation", "error", explicit=False)
    draft.set(f"{ACTOR}optim.min_lr_ratio {ACTOR}optim.lr_warmup_steps_ratio", 0.0, explicit=False)


def tuning_loss(draft: Draft, gpus: int) -> None:
    """The losses of main_sft and main_dpo."""
    kinds = draft["loss_type"]
    kinds = kinds if isinstance(kinds, list | tuple) else [kinds]
    known = ("sigmoid",) if "beta" in draft.rows else (None, "nll", "chunked_nll")
    if any(kind not in known for kind in kinds):
        remedy = f"verlite has {', '.join(filter(None, known))}."
        draft.refuse("loss_type", "has no counterpart in verlite", remedy)
    if "ref_model" in draft.rows:
        formulas.same_reference(draft, "ref_model", "model_name_or_path")


def _prompt_length(draft: Draft) -> None:
    prompt = draft["max_prompt_length"]
    if prompt:
        draft.set("data.max_prompt_length", prompt)
        draft.set("data.truncation", "left")
    else:
        draft.set("data.max_prompt_length", 512, "TRL has no limit: set that of your prompts")


# Algorithm


def grpo_loss(draft: Draft, gpus: int) -> None:
    """GRPO: advantages, KL in the loss, aggregation, clip."""
    scale = {True: "group", False: "none"}.get(draft["scale_rewards"], draft["scale_rewards"])
    draft.set("algorithm.adv_estimator", "grpo")
    if scale not in ("group", "none"):
        rule = "verlite divides by the standard deviation of the prompt's samples, or not at all"
        draft.refuse("scale_rewards", rule, "Use group or none.")
    draft.set("algorithm.norm_adv_by_std_in_grpo", scale == "group", explicit=False)
    if draft["beta"]:
        _kl_loss(draft, updates(draft, gpus))
    _aggregation(draft)
    high = draft["epsilon_high"]
    if draft["loss_type"] == "cispo":
        if not high:
            draft.refuse("epsilon_high", "loss_type=cispo needs it", "Usual: 5.")
            return
        draft.set(ACTOR + "clip_ratio_low", 1.0)
        note = f"epsilon_high {high:g} is the bound of the ratio itself"
        draft.set(ACTOR + "clip_ratio_high", high - 1, note)
        return
    draft.set(ACTOR + "clip_ratio", draft["epsilon"], explicit=False)
    if high:
        draft.set(ACTOR + "clip_ratio_high", high)
    if draft.values.get(ACTOR + "policy_loss.loss_mode") is None:
        formulas.dual_clip(draft, draft["delta"], "TRL")


def _kl_loss(draft: Draft, count: int) -> None:
    """KL in the loss. `count`: updates per generation."""
    draft.set(ACTOR + "use_kl_loss", True)
    draft.set(ACTOR + "kl_loss_coef", draft["beta"])
    if not draft["use_bias_correction_kl"]:
        draft.set(ACTOR + "kl_loss_type", "low_var_kl")
        return
    if draft["importance_sampling_level"] == "sequence":
        rule = "with beta above 0 and use_bias_correction_kl, TRL weights the KL of each token by "
        rule += "the ratio of its response"
        remedy = "Set use_bias_correction_kl to False (TRL's default before 1.10)."
        draft.refuse("importance_sampling_level", rule, remedy)
    # k3 times the ratio r has the gradient r * d, which is that of k2 times a constant r.
    note = "use_bias_correction_kl: k3 times the ratio has this estimator's value and gradient"
    draft.set(ACTOR + "kl_loss_type", "low_var_kl+", note)
    draft.set(ACTOR + "kl_loss_importance_weighted", count > 1, explicit=False)


AGGREGATIONS = {
    "dapo": "token-mean",
    "bnpo": "token-mean",
    "cispo": "token-mean",
    "grpo": "seq-mean-token-mean",
    "sapo": "seq-mean-token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
}


def _aggregation(draft: Draft) -> None:
    kind, level = draft["loss_type"], draft["importance_sampling_level"]
    aggregation = draft.choice("loss_type", AGGREGATIONS)
    if aggregation is None:
        return
    mode = {"cispo": "cispo", "sapo": "sapo"}.get(kind)
    if level == "sequence" and kind == "grpo":
        mode = "gspo"
    elif level != "token":
        remedy = "verlite has sequence with loss_type=grpo (GSPO), and token."
        draft.refuse("importance_sampling_level", "has no counterpart in verlite", remedy)
    if mode:
        draft.set(ACTOR + "policy_loss.loss_mode", mode)
    if mode == "sapo":
        draft.set(ACTOR + "tau_pos", draft["sapo_temperature_pos"], explicit=False)
        draft.set(ACTOR + "tau_neg", draft["sapo_temperature_neg"], explicit=False)
    note = "over the whole update; TRL's bnpo takes it per micro-batch" if kind == "bnpo" else ""
    draft.set(ACTOR + "loss_agg_mode", aggregation, note)


def rloo_loss(draft: Draft, gpus: int) -> None:
    """RLOO: KL in the reward, and a ratio per response in TRL."""
    draft.set("algorithm.adv_estimator", "rloo")
    if draft["beta"]:
        draft.set("algorithm.use_kl_in_reward", True)
        draft.set("algorithm.kl_ctrl.kl_coef", draft["beta"])
        draft.set("algorithm.kl_penalty", "kl", explicit=False)
    draft.set(ACTOR + "clip_ratio", draft["epsilon"], explicit=False)
    if draft["epsilon_high"]:
        draft.set(ACTOR + "clip_ratio_high", draft["epsilon_high"])
    formulas.dual_clip(draft, None, "TRL")
    several = updates(draft, gpus) > 1
    note = "TRL clips the ratio of a whole response, verlite that of each token" if several else ""
    draft.set(ACTOR + "loss_agg_mode", "seq-mean-token-sum", note)


def ppo_loss(draft: Draft, gpus: int) -> None:
    """PPO: a critic, KL in the reward."""
    draft.set("algorithm.adv_estimator", "gae")
    draft.set("algorithm.use_kl_in_reward", draft["kl_coef"] > 0, explicit=False)
    if draft["kl_coef"] > 0:
        draft.set("algorithm.kl_ctrl.kl_coef", draft["kl_coef"])
        kind = KL_NAMES.get(draft["kl_estimator"], "kl")
        draft.set("algorithm.kl_penalty", kind, explicit=False)
    formulas.dual_clip(draft, None, "TRL")
    draft.set("critic.optim.lr", draft["learning_rate"], "TRL trains both with one optimizer")
    if draft["missing_eos_penalty"]:
        rule = "is subtracted in TRL from the scores of responses without end"
        draft.refuse("missing_eos_penalty", rule, "Do so in your reward function.")


def sampling(draft: Draft, gpus: int) -> None:
    """Generation with vLLM, and the correction of its log-probs."""
    draft.set(ROLLOUT + "top_k", draft["top_k"] or -1, explicit=False)
    if not draft["use_vllm"]:
        return
    if draft["vllm_mode"] == "server":
        _server(draft)
    else:
        draft.set(ROLLOUT + "name", "vllm")
        tensor_parallel = draft["vllm_tensor_parallel_size"]
        draft.set(ROLLOUT + "tensor_model_parallel_size", tensor_parallel, explicit=False)
        draft.set(ROLLOUT + "gpu_memory_utilization", draft["vllm_gpu_memory_utilization"])
        draft.set(ROLLOUT + "free_cache_engine", draft["vllm_enable_sleep_mode"])
    if draft["vllm_max_model_length"]:
        draft.set(ROLLOUT + "max_model_len", draft["vllm_max_model_length"])
    name = "vllm_importance_sampling_correction"
    if name not in draft.rows or not draft[name]:
        return
    mode = draft["vllm_importance_sampling_mode"]
    level, _, kind = mode.partition("_")
    low, high = (
        draft["vllm_importance_sampling_clip_min"],
        draft["vllm_importance_sampling_clip_max"],
    )
    if level not in ("token", "sequence") or kind not in ("mask", "truncate"):
        draft.refuse("vllm_importance_sampling_mode", "is not a mode")
        return
    draft.set(CORRECTION + "rollout_is", level)
    bound: Any = high or NO_DUAL_CLIP
    if kind == "mask":
        bound = f"{low or 0:g}_{bound:g}"
    elif low:
        rule = "verlite does not raise small weights"
        draft.refuse("vllm_importance_sampling_clip_min", rule, "Leave it out.")
    note = "TRL corrects vLLM's log-probs unless it is told not to"
    draft.set(CORRECTION + "rollout_is_threshold", bound, note)


def _server(draft: Draft) -> None:
    """A running vLLM server."""
    host, port = draft["vllm_server_host"], draft["vllm_server_port"]
    host = "127.0.0.1" if host == "0.0.0.0" else host
    address = draft["vllm_server_base_url"] or f"http://{host}:{port}"
    draft.set(ROLLOUT + "name", "server")
    note = "start it with `verlite serve generation` (docs/generation_service.md)"
    draft.set(ROLLOUT + "servers", address, note)


# The run


def optimizer(draft: Draft, gpus: int) -> None:
    """Learning rate and schedule. TRL counts updates, verlite training steps."""
    section = ACTOR + "optim."
    draft.set(section + "lr", draft["learning_rate"])
    draft.set(section + "betas", [draft["adam_beta1"], draft["adam_beta2"]], explicit=False)
    name = str(draft["lr_scheduler_type"])
    schedule = draft.choice("lr_scheduler_type", SCHEDULES, name)
    if schedule is None:
        return
    draft.set(section + "lr_scheduler_type", schedule)
    options = draft["lr_scheduler_kwargs"] or {}
    if name == "cosine_with_min_lr":
        ratio = options.get("min_lr_rate")
        if ratio is None:
            ratio = options.get("min_lr", 0.0) / draft["learning_rate"]
        draft.set(section + "min_lr_ratio", ratio)
    elif options:
        draft.refuse("lr_scheduler_kwargs", "only those of cosine_with_min_lr are converted")
    count, warmup = updates(draft, gpus), draft["warmup_steps"]
    if warmup and warmup < 1:  # transformers 5: a fraction of all steps
        draft.set(section + "lr_warmup_steps_ratio", warmup)
    elif warmup:
        note = f"{warmup:g} updates, {count} per training step"
        draft.set(section + "lr_warmup_steps", -(-int(warmup) // count), note)
    elif draft["warmup_ratio"]:
        draft.set(section + "lr_warmup_steps_ratio", draft["warmup_ratio"])
    if not str(draft["optim"]).startswith("adamw"):
        draft.refuse("optim", "the optimizer is AdamW")


def memory(draft: Draft, gpus: int) -> None:
    """Precision and adapters."""
    dtype = "bfloat16" if draft["bf16"] else "float32"
    if draft["fp16"]:
        draft.refuse("fp16", "verlite trains in bfloat16 or float32", "Use bf16.")
    draft.set(ACTOR + "fsdp_config.dtype", dtype)
    if draft["model_init_kwargs"]:
        note = "parameters that the optimizer updates are float32, as fsdp_config.model_dtype says"
        draft.warn("model_init_kwargs", note)
    has_lora = draft.has("lora_r", "lora_alpha", "lora_target_modules", "peft_config")
    if not (draft["use_peft"] or has_lora):
        return
    if draft["lora_dropout"] and draft["lora_dropout"] > 0:
        draft.refuse("lora_dropout", "verlite trains adapters without dropout", "Use 0.")
    # Defaults: TRL's in a YAML file (16, 32), peft's in a script (8, 8).
    rank, alpha = (16, 32) if draft["use_peft"] else (8, 8)
    draft.set(MODEL + "lora_rank", draft["lora_r"] or rank)
    draft.set(MODEL + "lora_alpha", draft["lora_alpha"] or alpha)
    modules = draft["lora_target_modules"]
    note = "" if modules else "peft chooses some layers by default, verlite all linear ones"
    draft.set(MODEL + "target_modules", modules or "all-linear", note)


def data(draft: Draft, gpus: int) -> None:
    """Model, prompts and rewards."""
    model = draft["model_name_or_path"] or (
        "sft_model_path" in draft.rows and draft["sft_model_path"]
    )
    if not model:
        draft.refuse("model_name_or_path", "is missing")
    elif VISION_MODEL.search(str(model)):
        rule = "is by its name a model for images; verlite trains on text"
        draft.problems.append(Problem("model_name_or_path", str(model), rule))
    elif isinstance(model, Computed):
        draft.set(MODEL + "path", "MODEL", f"the script's {model}")
    else:
        draft.set(MODEL + "path", model)
    if draft.command is not PPO:
        tuning_data(draft)
        return
    note = "write prompts and answers of the script's {} into it: data_preprocess/chat_json.py"
    for field, key, split in (
        ("dataset_name", "data.train_files", "dataset_train_split"),
        ("eval_dataset", "data.val_files", "dataset_test_split"),
    ):
        name = draft[field]
        if isinstance(name, str) and not isinstance(name, Computed):
            options = ["--input_key", "prompt"]
            draft.set(key, formulas.prepare_data(draft, name, options, draft[split]))
        elif name is not None or field == "dataset_name":
            file = "train.parquet" if field == "dataset_name" else "val.parquet"
            draft.set(key, file, note.format(name or "data set"))
    _rewards(draft)


def tuning_data(draft: Draft) -> None:
    """Files of rows for main_sft and main_dpo."""
    name, validation = draft["dataset_name"], draft["eval_dataset"]
    evaluates = draft["eval_strategy"] != "no"
    has_name = isinstance(name, str) and not isinstance(name, Computed)
    if has_name and evaluates and (validation is None or isinstance(validation, Computed)):
        validation = name  # TRL's scripts take the other split of the data set
    train, test = draft["dataset_train_split"], draft["dataset_test_split"]
    for files, value, split in (("train", name, train), ("val", validation, test)):
        if isinstance(value, str) and not isinstance(value, Computed):
            draft.set(f"data.{files}_files", formulas.rows_file(draft, value, split))
        elif files == "train" or (value is not None and evaluates):
            note = f"write the rows of the script's {value or 'data set'} into it"
            draft.set(f"data.{files}_files", f"{files}.parquet", note)
    if "assistant_only_loss" not in draft.rows:
        return
    note = "TRL's name of the column. Its text is trained, as in TRL"
    draft.set("data.response_key", "completion", note)
    if not draft["assistant_only_loss"]:
        note = "rows of messages: TRL trains on all their tokens unless assistant_only_loss=True, "
        note += "verlite on the assistant's turns. Rows of text alone need a prompt and a response"
        draft.comments["data.train_files"] = "; ".join(
            filter(None, (draft.comments.get("data.train_files"), note))
        )


def _rewards(draft: Draft) -> None:
    names = ("reward_funcs", "reward_model", "reward_model_path")
    given = [draft[name] for name in names if name in draft.rows and draft[name] is not None]
    shown = str(given[0]).strip("[]").replace("'", "") if given else "reward"
    note = f"write compute_score(data_source, solution_str, ground_truth, extra_info) for {shown}: "
    draft.set("custom_reward_function.path", REWARD_FILE, f"{note}docs/migration/trl.md")
    if "reward_weights" in draft.rows and draft["reward_weights"]:
        draft.warn("reward_weights", "write the weights into your reward function")


def run(draft: Draft, gpus: int) -> None:
    """How long, where, and how often. TRL counts updates, verlite training steps."""
    count = updates(draft, gpus)
    epochs = draft["num_train_epochs"]
    if draft["max_steps"] and draft["max_steps"] > 0:
        steps = -(-int(draft["max_steps"]) // count)
        note = f"{draft['max_steps']} updates, {count} per training step" if count > 1 else ""
        draft.set("trainer.total_training_steps", steps, note)
    elif "trainer.total_training_steps" not in draft.values:
        if epochs != int(epochs):
            draft.refuse("num_train_epochs", "must be a whole number", "Or use max_steps.")
        draft.set("trainer.total_epochs", int(epochs))
    every = f"{{}} updates, {count} per training step"
    if draft["save_strategy"] == "steps":
        _every(draft, "trainer.save_freq", draft["save_steps"], count, every)
        if draft["save_total_limit"]:
            draft.set("trainer.max_actor_ckpt_to_keep", draft["save_total_limit"])
    elif draft["save_strategy"] == "epoch":
        draft.warn("save_strategy", "verlite counts steps: set trainer.save_freq")
    has_rows = "data.val_files" in draft.values
    if draft["eval_strategy"] != "no" and has_rows:
        steps = draft["eval_steps"] or 500
        _every(draft, "trainer.test_freq", steps, count, every)
        draft.set("trainer.val_before_train", draft["eval_on_start"])
    resume = draft["resume_from_checkpoint"]
    draft.set("trainer.resume_mode", "auto" if resume is True else "disable")
    if resume not in (None, True, False):
        draft.warn("resume_from_checkpoint", "verlite cannot load checkpoints of TRL")
    report = draft["report_to"]
    backends = [report] if isinstance(report, str) else list(report or [])
    formulas.trackers(draft, "report_to", backends)


def _every(draft: Draft, key: str, value: Any, count: int, note: str) -> None:
    if value and value < 1:
        draft.warn(key, f"{value:g} is a share of the run in TRL: set a number of steps")
        return
    draft.set(key, -(-int(value) // count), note.format(value) if count > 1 else "")


SHARED = (optimizer, memory, data, run)
FORMULAS = {
    "grpo": (batches, grpo_loss, sampling, *SHARED),
    "rloo": (batches, rloo_loss, sampling, *SHARED),
    "ppo": (ppo_batches, ppo_loss, *SHARED),
    "sft": (tuning_batches, tuning_loss, *SHARED),
    "dpo": (tuning_batches, tuning_loss, *SHARED),
}
