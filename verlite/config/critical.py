"""Settings that must not change between a checkpoint and a run that resumes from it."""

import functools
import hashlib
import os
from pathlib import Path
from typing import Any

from verlite.config import plan
from verlite.config.schema import AlgorithmConfig, Config, ModelConfig
from verlite.config.sft import TuningConfig
from verlite.hub import HubError, local_file
from verlite.importing import module_path
from verlite.spec.catalog import ENV_FACTORIES, ESTIMATORS, estimator, reads

ESTIMATOR = {
    "gamma": "gamma",
    "lam": "lam",
    "norm_adv_by_std_in_grpo": "norm_adv_by_std_in_grpo",
    "gdpo_reward_keys": "gdpo_rewards",
    "gdpo_reward_weights": "gdpo_reward_weights",
    "adv_kwargs": "extra",
}
"""Keys of the section algorithm that define the advantages -> the input of the estimator.

A built-in estimator reads some; a user's own may read all.
"""
AGENT_LENGTHS = ("max_start_length", "max_prompt_length", "max_response_length", "max_obs_length")
LORA = ("lora_rank", "lora_alpha", "target_modules", "exclude_modules")
CONTENT = "contents of data.train_files (SHA-256)"
MODEL_CONTENT = "contents of the model's files (SHA-256)"
TEACHER_CONTENT = "contents of the teacher's files (SHA-256)"
TOOLS_CONTENT = "env.kwargs with the contents of the file of tools (SHA-256)"
FOLDERS = {
    "path": MODEL_CONTENT,
    "tokenizer_path": "contents of the tokenizer's files (SHA-256)",
    "lora_adapter_path": "contents of the LoRA adapter's files (SHA-256)",
}
"""Keys of a section `model`."""
CONTENT_OF = {
    **{f"actor_rollout_ref.model.{key}": name for key, name in FOLDERS.items()},
    **{f"model.{key}": name for key, name in FOLDERS.items()},
    "data.train_files": CONTENT,
    "env.kwargs": TOOLS_CONTENT,
    f"{plan.TEACHER}model_path": TEACHER_CONTENT,
}
"""Keys whose paths may change if the contents under them do not."""
TOKENIZER_FILES = (
    *("token*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt"),
    *("chat_template*", "additional_chat_templates/*"),
)
WEIGHTS = ("*.safetensors", "*.bin")
FILES = {
    "path": (("config.json", *TOKENIZER_FILES), WEIGHTS),
    "tokenizer_path": (TOKENIZER_FILES, ()),
    "lora_adapter_path": (("adapter_config.json",), WEIGHTS),
}
"""Files that change results by the key of their folder: those read whole, and those of weights."""
SAMPLE_BYTES = 1 << 16
"""Bytes that are read at eight places of a file of weights."""
VERL_FILES = ("tool_config_path", "agent_loop_config_path")
"""Entries of `env.kwargs` of the environments for verl's code (VERL): files."""
VERL = "verlite.compat."
ROWS = (
    *("train_files", "train_batch_size", "train_max_samples", "max_length", "truncation"),
    *("prompt_key", "response_key", "messages_key", "tools_key", "chosen_key", "rejected_key"),
    *("prompt_dict_keys", "response_dict_keys", "apply_chat_template_kwargs", "shuffle"),
)
"""Keys of the section data of main_sft and main_dpo, as far as a command has them."""
CODE = "code"
"""Folder in the run directory with the functions of a run from Python."""


def contents(files: Any) -> list[str]:
    """Return the first digits of each file's SHA-256, as it was when the run began.

    A file that cannot be read has "".
    """
    return [_digest(name) for name in plan.files_of(files)]


def model_settings(model: ModelConfig, section: str) -> dict[str, Any]:
    """Return the settings of a section `model` that change results, with the folders' contents."""
    return {
        **{f"{section}.{name}": getattr(model, name) for name in (*FOLDERS, *LORA)},
        **{
            name: model_contents(getattr(model, key), key, model.trust_remote_code)
            for key, name in FOLDERS.items()
        },
    }


def model_contents(path: str | None, key: str = "path", code: bool = False) -> dict[str, str]:
    """Return the first digits of a SHA-256 of each file of a model folder that changes results.

    With `code` its Python files count, which are then run. Of a file of weights, its size and
    SAMPLE_BYTES at eight places count, the first of which has the names and shapes of a safetensors
    file. {} for a model from the hub, and without a path.
    """
    if path is None:
        return {}
    folder = Path(path).expanduser()
    whole, weights = FILES[key]
    whole += ("*.py",) * code
    files = {file: False for pattern in whole for file in folder.glob(pattern)}
    files |= {file: True for pattern in weights for file in folder.glob(pattern)}
    return {
        file.relative_to(folder).as_posix(): _digest(str(file), samples)
        for file, samples in sorted(files.items())
        if file.is_file()
    }


def code_contents(config: Config) -> dict[str, str]:
    """Return the first digits of the SHA-256 of the user's own files, as they were when the run
    began, by the key that names them: the reward function, the environment, the data set and the
    sampler.

    What these files import does not count, nor do files that `verlite.train` writes.
    """
    places = {
        "custom_reward_function.path": config.custom_reward_function.path,
        "data.custom_cls.path": config.data.custom_cls.path,
        "data.sampler.class_path": config.data.sampler.class_path,
    }
    if plan.max_turns(config) and plan.env_name(config) not in ENV_FACTORIES:
        places["env.name"] = config.env.name.partition(":")[0]
    places["agent.command"] = plan.program_code(config)
    written = Path(config.trainer.default_local_dir) / CODE
    found = {}
    for key, place in places.items():
        if not place or place.startswith("verlite."):
            continue
        file = module_path(place)
        if file and file.parent != written:
            found[key] = _digest(str(file))
    return found


def begin_run() -> None:
    """Let `contents` and `code_contents` read the files again."""
    _digest.cache_clear()


@functools.cache
def _digest(name: str, samples: bool = False) -> str:
    """Return the first digits of a file's SHA-256, or of its size and samples. "": unreadable."""
    try:
        with local_file(name).open("rb") as file:
            if samples:
                size = file.seek(0, os.SEEK_END)
                digest = hashlib.sha256(str(size).encode())
                for part in range(8):
                    file.seek(max(0, size - SAMPLE_BYTES) * part // 7)
                    digest.update(file.read(SAMPLE_BYTES))
                return digest.hexdigest()[:12]
            return hashlib.file_digest(file, "sha256").hexdigest()[:12]
    except (OSError, HubError):
        return ""


def _environment(config: Config) -> dict[str, Any]:
    """Return the settings of a multi-turn run's environment."""
    settings = {
        "env.name": plan.env_name(config),
        "env.kwargs": config.env.kwargs,
        **{f"data.{name}": getattr(config.data, name) for name in AGENT_LENGTHS},
    }
    if plan.env_name(config) == "search":
        settings["retriever.topk"] = config.retriever.topk
    files = {name: config.env.kwargs.get(name) for name in VERL_FILES}
    named = {name: _digest(file) for name, file in files.items() if isinstance(file, str)}
    if named and config.env.name.startswith(VERL):
        others = {name: repr(value) for name, value in config.env.kwargs.items()}
        settings[TOOLS_CONTENT] = others | named
    return settings


def _estimator(config: Config) -> dict[str, Any]:
    """Return the advantage estimator, the settings that it reads (all for a user's own), and
    whether its advantages are whitened unless it does that by itself."""
    algorithm: AlgorithmConfig = config.algorithm
    name = algorithm.adv_estimator
    used = [key for key, field in ESTIMATOR.items() if reads(ESTIMATORS, name, field)]
    if not estimator(name).whitens:
        used.append("whiten_advantages")
    settings = {f"algorithm.{key}": getattr(algorithm, key) for key in ("adv_estimator", *used)}
    if reads(ESTIMATORS, name, "reward_clip_range"):
        settings["reward.clip_range"] = config.reward.clip_range
    return settings


def critical_settings(config: Config) -> dict[str, Any]:
    """Return the settings whose change would change the results of a resumed run."""
    actor = config.actor_rollout_ref.actor
    rollout = config.actor_rollout_ref.rollout
    return {
        **model_settings(config.actor_rollout_ref.model, "actor_rollout_ref.model"),
        "actor_rollout_ref.rollout.n": rollout.n,
        "actor_rollout_ref.rollout.seed": rollout.seed,
        "actor_rollout_ref.actor.ppo_mini_batch_size": actor.ppo_mini_batch_size,
        "actor_rollout_ref.actor.ppo_epochs": actor.ppo_epochs,
        **_estimator(config),
        "data.train_files": config.data.train_files,
        CONTENT: contents(config.data.train_files),
        "data.train_batch_size": config.data.train_batch_size,
        "data.seed": config.data.seed,
        "data.shuffle": config.data.shuffle,
        "data.custom_cls.name": config.data.custom_cls.name,
        "data.sampler.class_name": config.data.sampler.class_name,
        "data.extra": config.data.extra,
        "max_turns": plan.max_turns(config),
        **(_environment(config) if plan.max_turns(config) else {}),
        **(_agent(config) if plan.program(config) else {}),
        **(_teacher(config) if plan.computes_teacher(config) else {}),
    }


def _agent(config: Config) -> dict[str, Any]:
    """Return the settings of agent programs, without those that only time and machines decide."""
    names = ["command", "reward", "credit"]
    if config.agent.verifiers is not None:
        names += ["verifiers", "kwargs", "renderer"]
    settings = {f"agent.{name}": getattr(config.agent, name) for name in names}
    lengths = ("max_prompt_length", "max_response_length")
    return settings | {f"data.{name}": getattr(config.data, name) for name in lengths}


def _teacher(config: Config) -> dict[str, Any]:
    """Return the teacher that the run computes, with its folder's contents."""
    path = config.distillation.teacher_models.teacher_model.model_path
    code = config.actor_rollout_ref.model.trust_remote_code
    return {f"{plan.TEACHER}model_path": path, TEACHER_CONTENT: model_contents(path, code=code)}


def tuning_settings(config: TuningConfig) -> dict[str, Any]:
    """Return the same for main_sft and main_dpo."""
    data = {name: value for name, value in vars(config.data).items() if name in ROWS}
    return {
        **model_settings(config.model, "model"),
        "model.custom_chat_template": config.model.custom_chat_template,
        **{f"data.{name}": value for name, value in data.items()},
        **{name: value for name, value in vars(config).items() if name == "beta"},
        CONTENT: contents(config.data.train_files),
        "trainer.seed": config.trainer.seed,
    }
