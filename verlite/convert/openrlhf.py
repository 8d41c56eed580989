"""Convert command lines of OpenRLHF's `train_ppo_ray`, `train_sft` and `train_dpo`.

Flags have any of three spellings. The formulas follow
openrlhf/trainer/ppo_utils/experience_maker.py, openrlhf/models/loss.py, datasets/sft_dataset.py and
datasets/reward_dataset.py of version 0.11.
"""

import json
import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from verlite.config.commands import PPO
from verlite.config.problems import ConfigError, Problem, nearest
from verlite.convert import formulas
from verlite.convert.engine import Draft, apply
from verlite.convert.formulas import COMMANDS, CORRECTION, KL_NAMES, NO_DUAL_CLIP, SCHEDULES
from verlite.convert.rows import ACTOR, MODEL, REF, ROLLOUT, Row, read
from verlite.convert.text import Conversion, unexpanded
from verlite.spec import catalog


def _tuned(row: Row) -> Row:
    """Return a shared row of train_ppo_ray as train_sft and train_dpo have it."""
    also = [re.sub(r"^actor\.(?=adam|max_norm|lr_|min_lr)", "", name) for name in row.also]
    keys = " ".join(filter(None, map(formulas.own_key, row.to.split())))
    return replace(row, to=keys, also=tuple(re.sub(r"^actor\.", "model.", name) for name in also))


DIALECT = read(Path(__file__).with_suffix(".toml"))
FLAGS = DIALECT.sections["train_ppo_ray"]
DIALECT.sections["tuning"] = (
    *(_tuned(row) for row in FLAGS if row.shared),
    *DIALECT.sections["tuning"],
)
TABLES = DIALECT.tables("OpenRLHF")
"""Program -> its flags."""
PROGRAM = re.compile(r"(?:\S*openrlhf[./]cli[./])?(train_\w+?)(?:\.py)?")

PAIRS = ("eps_clip_low_high", "reward_clip_range", "adam_betas", "critic_adam_betas")
"""Flags with two numbers."""
COUNTS = ("train_batch_size", "rollout_batch_size", "n_samples_per_prompt")
"""Flags that other values are divided by."""
MESSAGE_COLUMNS = ("message", "messages", "context_messages", "conversations", "prompt")


def convert(arguments: Sequence[str], version: str | None = None) -> Conversion:
    """Convert a command line.

    Args:
        arguments: the flags. Everything up to the program, such as train_sft, is left out, so a
            whole `ray job submit ... -- python3 -m openrlhf.cli.train_ppo_ray ...` may be given.
            Without a program they are flags of train_ppo_ray.
        version: OpenRLHF's version, whose defaults apply. None: the newest that is known.

    Raises:
        ConfigError: the program has no counterpart, a flag is unknown, abbreviated, or has a wrong
            number of values, or the version is unknown.
    """
    before, program, flags = _split(arguments)
    given, typed = parse(flags, program)
    command = COMMANDS.get(program.removeprefix("train_"), PPO)
    is_ppo = command is PPO
    table = TABLES[program].at(version)
    draft = Draft(
        "OpenRLHF",
        table,
        given,
        lambda name: typed.get(name, f"--{name}"),
        command=command,
        own_key=str if is_ppo else formulas.own_key,
    )
    done = apply(draft, FORMULAS if is_ppo else TUNING_FORMULAS)
    done = replace(done, defaults=TABLES[program].describe(given, version))
    if is_ppo:
        return done
    found = formulas.processes(before)
    more = "" if "torchrun" in before else formulas.start_text(found, found.nodes)
    return replace(done, launch=_launch(before, found), defaults=done.defaults + more)


# The command line


def parse(
    arguments: Sequence[str], program: str = "train_ppo_ray"
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return {flag's name in the table: value} and {name: the flag as it was typed}.

    Raises:
        ConfigError: see `convert`.
    """
    words = [word for word in arguments if word == "" or word.strip().strip("\\")]
    known = spellings(TABLES[program].rows)
    given: dict[str, Any] = {}
    typed: dict[str, str] = {}
    problems: list[Problem] = []
    while words:
        word, equals, attached = words.pop(0).partition("=")
        row = known.get(_plain(word)) if word.startswith("--") else None
        if row is None:
            problems.append(_unknown(word, known, program))
            _take(words)
            continue
        values = [attached] if equals else _take(words)
        value, rule = _value(row, values)
        if rule:
            problems.append(Problem(word, " ".join(values) or None, rule))
        given[row.name], typed[row.name] = value, word
    if problems:
        raise ConfigError(problems)
    return given, typed


def spellings(table: Sequence[Row]) -> dict[str, Row]:
    """Return every spelling of every flag, with underscores for hyphens and dots."""
    return {_plain(name): row for row in table for name in (row.name, *row.also)}


def _split(arguments: Sequence[str]) -> tuple[list[str], str, list[str]]:
    """Return the words before the program, the program, and its flags."""
    words = list(arguments)
    for place, word in enumerate(words):
        found = PROGRAM.fullmatch(word)
        if found and found[1] not in TABLES:
            remedy = f"verlite has those of {', '.join(TABLES)}."
            raise ConfigError([Problem(word, None, "has no counterpart in verlite", remedy)])
        if found:
            return words[:place], found[1], words[place + 1 :]
    return [], "train_ppo_ray", words


def _launch(before: Sequence[str], found: formulas.Processes) -> str:
    """Return how to start main_sft or main_dpo, from the words that start OpenRLHF's program."""
    if "torchrun" in before:
        words = list(before[before.index("torchrun") :])
        return shlex.join(words if words[-1] == "-m" else [*words, "-m"])
    if before and "deepspeed" not in before:
        return formulas.launch(1)
    return formulas.launch(found.per_node, found.nodes)


def _plain(word: str) -> str:
    return re.sub(r"[-.]", "_", word.lstrip("-"))


def _take(words: list[str]) -> list[str]:
    """Remove and return the words before the next flag."""
    end = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    taken, words[:] = words[:end], words[end:]
    return taken


def _unknown(word: str, known: dict[str, Row], program: str) -> Problem:
    plain = _plain(word)
    if not word.startswith("--"):
        remedy = "Flags begin with --."
        if word.endswith((".sh", ".bash", ".slurm")):
            remedy = (
                "Give the command that the script starts, behind --: verlite convert openrlhf -- "
                "python3 -m openrlhf.cli.train_ppo_ray --pretrain ..."
            )
        return Problem(word, None, "is not a flag", remedy)
    longer = sorted({f"--{row.name}" for name, row in known.items() if name.startswith(plain)})
    if longer:
        remedy = f"Write it in full: {' or '.join(longer[:3])}."
        return Problem(word, None, "is an abbreviation, or not a flag", remedy)
    near = nearest(plain, known, 1)
    remedy = f"Did you mean --{known[near[0]].name}?" if near else ""
    return Problem(word, None, f"is not a flag of {program}", remedy)


def _value(row: Row, words: list[str]) -> tuple[Any, str]:
    """Return the value of a flag, and the violated rule or ""."""
    unset = unexpanded(words)
    if unset:
        return None, unset
    if row.kind == "switch":
        return True, "takes no value" if words else ""
    if row.kind == "words":
        values = [_number(word, float) for word in words]
        wrong = "needs values" if not words else ""
        if row.name in PAIRS and (None in values or len(values) != 2):
            wrong = "needs two numbers"
        return (words if None in values else values), wrong
    if len(words) != 1:
        return None, "needs a value" if not words else "takes one value"
    if row.kind == "text":
        return words[0], ""
    number = _number(words[0], int if row.kind == "int" else float)
    if number is None:
        return None, f"must be a number ({row.kind})"
    return number, "must be at least 1" if row.name in COUNTS and number < 1 else ""


def _number(word: str, kind: type[int] | type[float]) -> Any:
    """Return the finite number, or None."""
    try:
        number = kind(word)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


# The formulas


def devices(draft: Draft) -> None:
    """All roles on the same devices, or each group of roles on devices of its own."""
    nodes, gpus = draft["actor_num_nodes"], draft["actor_num_gpus_per_node"]
    tensor_parallel = draft["vllm_tensor_parallel_size"]
    reference = draft["ref_num_nodes"] * draft["ref_num_gpus_per_node"]
    engines = draft["vllm_num_engines"]
    everything, is_async = draft["colocate_all_models"], draft["async_train"]
    if everything:
        given = draft.has("ref_num_nodes") or draft.has("ref_num_gpus_per_node")
        if given and _has_reference(draft) and reference != nodes * gpus:
            rule = f"colocated models share devices: {reference} here, {nodes * gpus} for the actor"
            draft.refuse("ref_num_nodes", rule)
    if everything and not is_async:
        if engines and engines * tensor_parallel != nodes * gpus:
            rule = f"{engines} engines x {tensor_parallel} GPUs are not the {nodes * gpus} GPUs"
            draft.refuse("vllm_num_engines", rule, "OpenRLHF refuses that, too.")
        draft.set("trainer.nnodes", nodes)
        draft.set("trainer.n_gpus_per_node", gpus)
        return
    if not engines:
        why = "With --async_train" if is_async else "Without --colocate_all_models"
        draft.refuse("vllm_num_engines", "is missing", f"{why} it is needed.")
        return
    groups = {"actor": nodes * gpus}
    if everything:  # with --async_train: all but the engines
        also = ",ref" * _has_reference(draft) + ",critic" * _has_critic(draft)
        groups = {f"actor{also}": nodes * gpus}
    elif _has_reference(draft) and draft["colocate_actor_ref"]:
        groups = {"actor,ref": nodes * gpus}
    elif _has_reference(draft):
        groups["ref"] = reference
    if _has_critic(draft) and not everything:
        groups["critic"] = draft["critic_num_nodes"] * draft["critic_num_gpus_per_node"]
    groups["rollout"] = engines * tensor_parallel
    placement, first = {}, 0
    for roles, size in groups.items():
        placement[roles] = f"{first}-{first + size - 1}" if size > 1 else str(first)
        first += size
    per_node = first if first <= 8 else next(n for n in range(8, 0, -1) if first % n == 0)
    comment = f"{first} devices in all: the groups of OpenRLHF, each on its own. Set both numbers "
    comment += "to your machines"
    draft.set("trainer.nnodes trainer.n_gpus_per_node", None, comment)
    draft.values |= {"trainer.nnodes": first // per_node, "trainer.n_gpus_per_node": per_node}
    draft.set("cluster.component_placement", placement)


def lengths(draft: Draft) -> None:
    """Limits of prompt and response, from whichever of the flags are given."""
    longest, prompt = draft["max_len"], draft["prompt_max_len"]
    response = draft["max_new_tokens"] or draft["generate_max_len"]
    side = "right" if prompt else "left"
    if longest and response and not prompt:
        prompt = longest - response
    elif longest and prompt and not response:
        response = longest - prompt
    elif response and not longest and not prompt:
        prompt, side = 1024, "right"
    elif prompt and not response:
        response = 1024
    if not prompt or not response or prompt < 0 or response < 0:
        rule = "gives prompt and response one limit; verlite has one for each"
        remedy = "Add --prompt_max_len N: responses then have the rest. Take the longest prompt."
        draft.refuse("max_len", rule, remedy)
        return
    if longest and prompt + response > longest:
        total = prompt + response
        draft.warn("max_len", f"verlite allows {total} tokens, the sum of the other two limits")
    cut = {"right": "lose their end", "left": "lose their beginning"}[side]
    draft.set("data.max_prompt_length", prompt)
    draft.set("data.max_response_length", response)
    draft.set("data.truncation", side, f"longer prompts {cut}, as in OpenRLHF")


def batches(draft: Draft) -> None:
    """Responses per optimizer step become prompts per optimizer step."""
    n, responses = draft["n_samples_per_prompt"], draft["train_batch_size"]
    if responses % n:
        rule = f"must be divisible by n_samples_per_prompt={n}: verlite counts whole prompts"
        draft.refuse("train_batch_size", rule)
        return
    unit = f"train_batch_size {responses} responses -> ppo_mini_batch_size {responses // n} prompts"
    draft.set(ACTOR + "ppo_mini_batch_size", responses // n, f"{unit} of {n} responses")
    passes = [ROLLOUT] + [REF] * _has_reference(draft)
    dynamic = draft["use_dynamic_batch"]
    if dynamic:
        tokens = draft["train_max_tokens_per_gpu"]
        draft.set(ACTOR + "ppo_max_token_len_per_gpu", tokens)
        for section in passes:
            rollout = draft["rollout_max_tokens_per_gpu"] or tokens
            draft.set(section + "log_prob_max_token_len_per_gpu", rollout)
    else:
        draft.set(ACTOR + "ppo_micro_batch_size_per_gpu", draft["micro_train_batch_size"])
        for section in passes:
            size = draft["micro_rollout_batch_size"]
            draft.set(section + "log_prob_micro_batch_size_per_gpu", size)
    if not dynamic and draft["ring_attn_size"] == 1 and draft["ds_tensor_parallel_size"] == 1:
        draft.set(ACTOR + "shuffle", True, explicit=False)
    generated = draft["vllm_generate_batch_size"]
    if generated and generated != draft["rollout_batch_size"]:
        draft.refuse(
            "vllm_generate_batch_size",
            "verlite generates the prompts of one step at a time",
            "Leave it out. With --async_train, --async_queue_size says how many steps' prompts are "
            "sampled ahead; with dynamic filtering use data.gen_batch_size.",
        )


def estimator(draft: Draft) -> None:
    """OpenRLHF's estimator: baseline, then KL per token, then whitening."""
    name = draft["advantage_estimator"]
    in_reward = _has_reference(draft) and not draft["use_kl_loss"]
    own = {
        "gae": "gae",
        "reinforce": "reinforce_plus_plus",
        "rloo": "rloo_token_kl",
        "reinforce_baseline": "grpo" if in_reward else "reinforce_plus_plus_baseline",
        "group_norm": "grpo",
        "dr_grpo": "grpo",
    }
    chosen = draft.choice("advantage_estimator", own)
    if chosen is None:
        return
    if catalog.estimator(chosen).compares and draft["n_samples_per_prompt"] == 1:
        rule = "compares the samples of one prompt, so n_samples_per_prompt must be at least 2"
        draft.refuse("advantage_estimator", rule, "Give several, such as --n_samples_per_prompt 8.")
    comment = f"OpenRLHF's {name}"
    if chosen == "grpo":
        draft.set("algorithm.norm_adv_by_std_in_grpo", name == "group_norm", explicit=False)
        if in_reward:
            draft.set("algorithm.kl_in_reward_mode", "token")
    if name == "reinforce_baseline" and in_reward:
        draft.set("algorithm.whiten_advantages", True)
    if name == "rloo":
        comment = "OpenRLHF's rloo: each token pays for its own and later KL"
        draft.set(
            "algorithm.whiten_advantages",
            False,
            "OpenRLHF up to 0.8.0, and LMM-R1, whiten rloo's advantages: set true to follow them",
        )
    draft.set("algorithm.adv_estimator", chosen, comment)
    if name in ("gae", "reinforce"):
        draft.set("algorithm.gamma", draft["gamma"], explicit=False)
    elif draft["gamma"] != 1:
        draft.warn("gamma", f"OpenRLHF uses 1 with {name}, and so does verlite")
    if name == "gae":
        draft.set("algorithm.lam", draft["lambd"], explicit=False)
    if draft["no_advantage_std_norm"] and name in ("gae", "reinforce", "reinforce_baseline"):
        remedy = "Leave it out, or use dr_grpo, which subtracts the mean of each prompt only."
        draft.refuse("no_advantage_std_norm", "verlite divides by the standard deviation", remedy)
    _clip_of_rewards(draft, name)


def _clip_of_rewards(draft: Draft, name: str) -> None:
    """OpenRLHF clips after the baseline."""
    if name in ("gae", "reinforce", "rloo"):  # no baseline, or an estimator that clips after it
        draft.set("reward.clip_range", draft["reward_clip_range"])
    elif draft["reward_clip_range"] != [-10.0, 10.0]:
        rule = f"OpenRLHF clips after the baseline of {name}, verlite before it"
        draft.refuse("reward_clip_range", rule, "Use rloo, which clips after it, or leave it out.")


def kl(draft: Draft) -> None:
    """The KL term, in the reward or in the loss."""
    coefficient = draft["init_kl_coef"]
    kind = "k3" if draft["use_kl_estimator_k3"] else draft["kl_estimator"]
    if not _has_reference(draft):
        return
    estimator = draft.choice("kl_estimator", KL_NAMES, kind)
    if estimator is None:
        return
    if draft["use_kl_loss"]:
        draft.set(ACTOR + "use_kl_loss", True)
        draft.set(ACTOR + "kl_loss_coef", coefficient)
        draft.set(ACTOR + "kl_loss_type", estimator)
        return
    draft.set("algorithm.use_kl_in_reward", True)
    draft.set("algorithm.kl_penalty", estimator)
    draft.set("algorithm.kl_ctrl.kl_coef", coefficient)
    if draft["kl_target"]:
        draft.set("algorithm.kl_ctrl.type", "adaptive")
        draft.set("algorithm.kl_ctrl.target_kl", draft["kl_target"])
        draft.set("algorithm.kl_ctrl.horizon", draft["kl_horizon"])


def loss(draft: Draft) -> None:
    """The policy's and the critic's loss."""
    low, high = draft["eps_clip_low_high"] or (None, None)
    if low is None:
        draft.set(ACTOR + "clip_ratio", draft["eps_clip"], explicit=draft.has("eps_clip"))
    else:
        draft.set(ACTOR + "clip_ratio_low", low)
        draft.set(ACTOR + "clip_ratio_high", high)
    if draft["policy_loss_type"] == "gspo":
        draft.set(ACTOR + "policy_loss.loss_mode", "gspo")
        draft.set(ACTOR + "loss_agg_mode", "seq-mean-token-mean")
    else:
        draft.set(ACTOR + "loss_agg_mode", draft["loss_agg_mode"], explicit=False)
        formulas.dual_clip(draft, draft["dual_clip"], "OpenRLHF")
    entropy = draft["entropy_loss_coef"]
    if entropy is not None:
        draft.set(ACTOR + "entropy_coeff", entropy, explicit=False)
        draft.set(ACTOR + "calculate_entropy", entropy == 0, explicit=False)
    if _has_critic(draft):
        draft.set("critic.cliprange_value", draft["value_clip"])


def optimizers(draft: Draft) -> None:
    """Learning rates and schedules of both optimizers."""
    _schedule(draft, ACTOR + "optim.", "")
    updates = draft["rollout_batch_size"] * draft["n_samples_per_prompt"]
    updates = updates // draft["train_batch_size"] * draft["max_epochs"]
    if updates > 1 and draft.values.get(ACTOR + "optim.lr_scheduler_type") != "constant":
        draft.comments[ACTOR + "optim.lr_scheduler_type"] = (
            f"moves once per training step; OpenRLHF's moves with each of its {updates} updates"
        )
    if not _has_critic(draft):
        return
    draft.set("critic.optim.lr", draft["critic_learning_rate"])
    _schedule(draft, "critic.optim.", "critic_")
    draft.set("critic.optim.betas", draft["critic_adam_betas"] or draft["adam_betas"])
    draft.set("critic.optim.eps", draft["critic_adam_eps"] or draft["adam_eps"], explicit=False)
    draft.set("critic.grad_clip", draft["critic_max_norm"] or draft["max_norm"], explicit=False)
    if draft["critic_pretrain"]:
        draft.set("critic.model.path", draft["critic_pretrain"])
    steps = draft["freezing_actor_steps"]
    if steps >= 0:
        comment = f"OpenRLHF's steps count from 0 and {steps} is the last one without updates"
        draft.set("trainer.critic_warmup", steps + 2, comment)


def _schedule(draft: Draft, section: str, prefix: str) -> None:
    def own(name: str) -> Any:
        value = draft[prefix + name] if prefix else None
        return draft[name] if value is None else value

    name = own("lr_scheduler")
    schedule = draft.choice(prefix + "lr_scheduler", SCHEDULES, name)
    if schedule is None:
        return
    draft.set(section + "lr_scheduler_type", schedule)
    if name != "constant":  # transformers' constant schedule has no warm-up
        draft.set(section + "lr_warmup_steps_ratio", own("lr_warmup_ratio"))
    if name == "cosine_with_min_lr":
        draft.set(section + "min_lr_ratio", own("min_lr_ratio"))
    decay = own("l2")
    comment = "also of biases and norms, which OpenRLHF leaves out" if decay else ""
    draft.set(section + "weight_decay", decay, comment)


def correction(draft: Draft) -> None:
    """Importance weights between vLLM and the trainer."""
    low, high = ([0.0, *draft["vllm_is_truncated_threshold"]])[-2:]
    kind = draft["vllm_is_correction_type"]
    level, mode = draft["is_correction_level"], draft["is_correction_mode"]
    if level != "off":  # 0.11.2
        kind = "seq-mask-tis" if level == "seq" else {"mask": "icepop", "clip": "tis"}[mode]
    elif not draft["enable_vllm_is_correction"]:
        return
    band = f"{low:g}_{high:g}"
    draft.set(CORRECTION + "rollout_is", "token")
    if kind == "tis":
        comment = f"weights below {low:g} stay as they are; OpenRLHF raises them to {low:g}"
        draft.set(CORRECTION + "rollout_is_threshold", high, comment if low > 0 else "")
    elif kind == "icepop":
        draft.set(CORRECTION + "rollout_is_threshold", band)
    elif kind == "seq-mask-tis":
        draft.set(CORRECTION + "rollout_is_threshold", NO_DUAL_CLIP, "weights are not truncated")
        draft.set(CORRECTION + "rollout_rs", "seq_mean_k1")
        comment = "rejected responses are not in the mean of the loss; in OpenRLHF they count as 0"
        draft.set(CORRECTION + "rollout_rs_threshold", band, comment)
    else:
        draft.refuse(
            "vllm_is_correction_type", "is not a type", "Known: tis, icepop, seq-mask-tis."
        )


def asynchronous(draft: Draft) -> None:
    """Sampling while the policy is updated. A batch leaves OpenRLHF's queue, and frees its place,
    before it is trained: the queue's size is the steps that are sampled ahead."""
    if not draft["async_train"]:
        for name in ("async_queue_size", "partial_rollout"):
            if draft.has(name):
                draft.warn(name, "it has no effect without --async_train")
        return
    ahead = draft["async_queue_size"]
    comment = (
        "OpenRLHF limits the queue, not the age. Higher, with the same depth: steps wait less "
    )
    draft.set("trainer.mode", "async")
    draft.set("async_training.depth", ahead)
    draft.set("async_training.max_age", ahead, f"{comment}for slow samples")
    draft.set("async_training.partial_rollout", draft["partial_rollout"])
    if CORRECTION + "rollout_is" not in draft.values:
        rule = "trains on samples of older weights, for which verlite needs a correction"
        remedy = "Add --enable_vllm_is_correction, or --is_correction_level token; or leave it out "
        draft.refuse("async_train", rule, f"{remedy}to train on fresh samples.")
    if draft["vllm_enable_sleep"]:
        comment = "engines do not sleep: they sample while the others train"
        draft.set(ROLLOUT + "free_cache_engine", False, comment)


def rewards(draft: Draft) -> None:
    """Where rewards come from, dynamic filtering and the length penalty."""
    urls = [url for url in (draft["remote_rm_url"] or "").split(",") if url]
    if not urls and not draft.has("reward_pretrain", "agent_func_path"):
        remedy = "Give --remote_rm_url: an address, several with commas, or a Python file."
        draft.refuse("remote_rm_url", "no reward is given", remedy)
    elif urls:
        reward_source(draft, urls)
    if draft["dynamic_filtering"]:
        draft.set("algorithm.filter_groups.enable", True)
        draft.set("algorithm.filter_groups.metric", "score", explicit=False)
        if draft["dynamic_filtering_reward_range"] != [0.0, 1.0]:
            rule = "verlite leaves out prompts whose samples have equal scores, whatever they are"
            draft.refuse("dynamic_filtering_reward_range", rule, "Only 0 1 has a counterpart.")
        comment = "leaves out prompts whose samples have equal scores; OpenRLHF those with a mean "
        draft.comments["algorithm.filter_groups.enable"] = comment + "of 0 or 1"
    if draft["overlong_buffer_len"]:
        draft.set("reward.overlong_buffer.enable", True)
        draft.set("reward.overlong_buffer.len", int(draft["overlong_buffer_len"]))
        factor = draft["overlong_penalty_factor"]
        draft.set("reward.overlong_buffer.penalty_factor", factor, explicit=False)


def reward_source(draft: Draft, urls: list[str]) -> None:
    """A reward service, or a Python file."""
    if len(urls) > 1 and any(url.endswith(".py") for url in urls):
        rule = "has a Python file beside other addresses; verlite has one source of rewards"
        draft.refuse("remote_rm_url", rule, "Keep one of them.")
        return
    if not urls[0].endswith(".py"):
        is_loopback = re.search(r"//(127\.|localhost|\[::1\])", draft["remote_rm_url"])
        comment = "every node asks its own 127.0.0.1: give the name of the service's host"
        several = is_loopback and draft["actor_num_nodes"] > 1
        address = urls if len(urls) > 1 else urls[0]
        draft.set("reward.remote.url", address, comment if several else "")
        return
    comment = "its reward_func is called with one response at a time, in lists of one entry"
    draft.set("custom_reward_function.path", urls[0], comment)
    draft.set("custom_reward_function.name", "reward_func")


def data(draft: Draft) -> None:
    """Prompts: data_preprocess/chat_json.py writes them in verlite's format."""
    for name in ("pretrain", "prompt_data"):
        if not draft[name]:
            draft.refuse(name, "is missing")
    if not draft["prompt_data"]:
        return
    options = ["--input_key", draft["input_key"]]
    for name in ("label_key", "input_template"):
        if draft[name]:
            options += [f"--{name}", draft[name]]
    draft.set("data.train_files", formulas.prepare_data(draft, draft["prompt_data"], options))
    _probabilities(draft, "prompt_data_probs", draft["prompt_data"])
    if not draft["apply_chat_template"] and draft["input_key"] not in MESSAGE_COLUMNS:
        formulas.verbatim(draft)
    samples = draft["max_samples"]
    if samples is not None:
        comment = "of more rows, a random choice; OpenRLHF takes the first ones of each file"
        draft.set("data.train_max_samples", samples, comment)
    if draft["eval_dataset"]:
        draft.set("data.val_files", formulas.prepare_data(draft, draft["eval_dataset"], options))
        draft.set("trainer.test_freq", draft["eval_steps"])
        draft.set("trainer.val_before_train", False)
        draft.set(ROLLOUT + "val_kwargs.do_sample", True)
        draft.set(ROLLOUT + "val_kwargs.temperature", draft["eval_temperature"])
        draft.set(ROLLOUT + "val_kwargs.n", draft["eval_n_samples_per_prompt"])


def _probabilities(draft: Draft, name: str, files: str) -> None:
    if draft.has(name) and "," in files:
        rule = "mixes data sets with these probabilities; verlite concatenates its files"
        draft.refuse(name, rule, "Leave it out, or write one file with the mixture.")
    elif draft.has(name):
        draft.warn(name, "it has no effect with a single data set")


def memory(draft: Draft) -> None:
    """Sharding, offload, precision, adapters."""
    stage = draft["zero_stage"]
    draft.set(ACTOR + "fsdp_config.reshard_after_forward", stage == 3)
    if stage < 2:
        draft.warn("zero_stage", "FSDP2 always shards gradients and optimizer state, as in stage 2")
    if draft.command is PPO and draft["deepspeed_enable_sleep"]:
        draft.set(f"{ACTOR}fsdp_config.param_offload {ACTOR}fsdp_config.optimizer_offload", True)
    if draft["lora_rank"]:
        draft.set(MODEL + "lora_alpha", draft["lora_alpha"])
        modules = draft["target_modules"] or "all-linear"
        draft.set(MODEL + "target_modules", modules, explicit=False)


def outputs(draft: Draft) -> None:
    """Checkpoints, the final weights and trackers."""
    run_directory = draft["ckpt_path"].rstrip("/")
    is_ppo = draft.command is PPO
    if is_ppo and draft["actor_num_nodes"] > 1 and not run_directory.startswith(("/", "~")):
        note = "the run directory: make it absolute, on a folder that all nodes share"
        draft.comments["trainer.default_local_dir"] = note
    if draft.has("save_path"):
        where = f"save_path {draft['save_path']} -> {run_directory}/huggingface"
        draft.set("trainer.export_hf", True, where)
        if not is_ppo:
            draft.comments["trainer.default_local_dir"] = where
    if draft["save_steps"] > 0:
        draft.set("trainer.max_actor_ckpt_to_keep", draft["max_ckpt_num"])
    if is_ppo and draft["save_hf_ckpt"] and draft["save_steps"] > 0:
        contents = ["model", "optimizer", "extra", "hf_model"]
        comment = "Hugging Face folders: global_step_N/actor/huggingface, deleted with their "
        draft.set(ACTOR + "checkpoint.save_contents", contents, comment + "checkpoint")
    if draft["disable_ds_ckpt"]:
        draft.warn("disable_ds_ckpt", "a checkpoint always contains what a resume needs")
    trackers = ["console"]
    if draft["use_wandb"]:
        trackers.append("wandb")
        comment = "set WANDB_API_KEY in the environment, or run `wandb login`"
        draft.comments["trainer.logger"] = comment
    if draft["use_tensorboard"]:
        trackers.append("tensorboard")
    draft.set("trainer.logger", trackers, explicit=False)


def _has_reference(draft: Draft) -> bool:
    return bool(draft["init_kl_coef"] > 0)


def _has_critic(draft: Draft) -> bool:
    return bool(draft["advantage_estimator"] == "gae")


FORMULAS = (
    devices,
    lengths,
    batches,
    estimator,
    kl,
    loss,
    optimizers,
    correction,
    asynchronous,
    rewards,
    data,
    memory,
    outputs,
)

# SFT and DPO


def tuning_schedule(draft: Draft) -> None:
    """The learning rate moves with each optimizer step in both."""
    _schedule(draft, "optim.", "")


def tuning_data(draft: Draft) -> None:
    """Files of rows, and their lengths."""
    for name in ("pretrain", "dataset"):
        if not draft[name]:
            draft.refuse(name, "is missing")
    if not draft["dataset"]:
        return
    draft.set(
        "data.train_files", formulas.rows_file(draft, draft["dataset"], draft["dataset_split"])
    )
    _probabilities(draft, "dataset_probs", draft["dataset"])
    draft.set("data.max_length", draft["max_len"])
    note = "longer rows lose their end. OpenRLHF leaves out rows whose prompt alone is too long; "
    draft.set("data.truncation", "right", f"{note}verlite refuses them")
    if draft["eval_dataset"]:
        draft.set(
            "data.val_files", formulas.rows_file(draft, draft["eval_dataset"], draft["eval_split"])
        )
        note = "OpenRLHF: after each epoch. -1: once, at the end" if draft["eval_steps"] < 0 else ""
        draft.set("trainer.test_freq", draft["eval_steps"], note)
    (sft_columns if "input_key" in draft.rows else dpo_columns)(draft)


def sft_columns(draft: Draft) -> None:
    """Prompt and response, or a conversation."""
    key, response = draft["input_key"], draft["output_key"]
    if not draft["apply_chat_template"] and (draft["multiturn"] or not response):
        name = "multiturn" if draft["multiturn"] else "output_key"
        rule = "needs --apply_chat_template" if draft["multiturn"] else "is missing"
        draft.refuse(name, rule, "Without --apply_chat_template rows have a prompt and a response.")
    elif draft["multiturn"] and response:
        draft.refuse("output_key", "is another column of a conversation", "Write one column.")
    elif response:
        draft.set("data.prompt_key", key)
        draft.set("data.response_key", response, "text, which then ends with the end token")
    else:
        note = "OpenRLHF trains on the last message only, unless --multiturn is given; verlite on "
        note = "" if draft["multiturn"] else f"{note}all of the assistant's"
        draft.set("data.messages_key", key, note)
    tuning_template(draft)


def dpo_columns(draft: Draft) -> None:
    """Prompt, better and worse response."""
    formulas.same_reference(draft, "ref_pretrain", "pretrain")
    if draft["prompt_key"]:
        draft.set("data.prompt_key", draft["prompt_key"])
    elif not draft["apply_chat_template"]:
        remedy = "Give it, or --apply_chat_template for columns of messages."
        draft.refuse("prompt_key", "is missing", remedy)
    tuning_template(draft)


def tuning_template(draft: Draft) -> None:
    """The chat template: the tokenizer's, a given one, or one that writes input_template."""
    if draft["apply_chat_template"]:
        if draft["tokenizer_chat_template"]:
            draft.set(MODEL + "custom_chat_template", draft["tokenizer_chat_template"])
        return
    template = draft["input_template"]
    if template and "{}" in template:  # OpenRLHF ignores others
        start, end = map(json.dumps, template.split("{}", 1))
        text = f"{{% for m in messages %}}{{{{ {start} + m.content + {end} }}}}{{% endfor %}}"
        draft.set(MODEL + "custom_chat_template", text, "writes --input_template around the prompt")
    else:
        formulas.verbatim(draft)


TUNING_FORMULAS = (tuning_data, tuning_schedule, memory, outputs)
