"""Model folders, adapters and tokenizers."""

import json
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from verlite import hub
from verlite.config import plan
from verlite.config.keys import get
from verlite.config.problems import Problem
from verlite.config.rules.context import Context, nearest_legal
from verlite.config.rules.devices import shared_sequences
from verlite.config.rules.errors import MODEL, OPTIMIZER, violations
from verlite.config.schema import Config, ModelConfig
from verlite.spec.rope import position_limit

POLICY = "actor_rollout_ref.model."
CRITIC = "critic.model."
TEACHER = plan.TEACHER + "model_path"
TOKENIZER_FILES = ("tokeniz*", "vocab*", "merges.txt", "*.model", "*.tiktoken", "tekken.json")
COPY_AGAIN = "Copy or download the whole folder again."
LFS_POINTER, LFS_BYTES = b"version https://git-lfs", 1024
"""Start of the text file that a repository has in place of a large one, and the most it has."""
TEXT_CLASSES = ("gemma3", "gemma3n", "gemma4", "llama4", "mllama", "qwen3_5", "qwen3_5_moe")
"""Models of images and text whose text part transformers loads as a language model."""
VLLM_CPU_HEADS = (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes of attention heads for which vLLM 0.32 has kernels on CPUs. With another one it starts, and
fails in its first pass."""
GIVE_MODEL = (
    "Give a folder with a Hugging Face model, or a name on the hub such as Qwen/Qwen2.5-0.5B."
)


def _models(context: Context) -> dict[str, ModelConfig]:
    """Return the sections of the models that are trained."""
    models = {POLICY: context.config.actor_rollout_ref.model}
    if plan.needs_critic(context.config):
        models[CRITIC] = context.config.critic.model
    return models


def settings(context: Context) -> Iterator[Problem]:
    """The settings of each model are consistent."""
    fsdp = {POLICY: "actor_rollout_ref.actor.fsdp_config", CRITIC: "critic.model.fsdp_config"}
    for section, model in _models(context).items():
        yield from model_settings(section, model, context.config, fsdp[section])


def model_settings(section: str, model: ModelConfig, config: Any, fsdp: str) -> Iterator[Problem]:
    """Check adapters, what layers keep, and the chat template.

    fsdp: the section of `config` with the model's sharding.
    """
    yield from violations(MODEL, model, section=section)
    kept = model.enable_gradient_checkpointing
    if isinstance(kept, str) and get(config, f"{fsdp}.use_torch_compile"):
        rule = f"layers that {fsdp}.use_torch_compile=true compiles cannot keep a part"
        remedy = "Use true or false, or do not compile."
        yield Problem(section + "enable_gradient_checkpointing", kept, rule, remedy)
    template = model.custom_chat_template
    if template is not None and "{" not in template:
        remedy = "Give the text of the template."
        if Path(template).is_file():
            remedy = (
                f'Give the text of the file: {section}custom_chat_template="$(cat {template})".'
            )
        yield Problem(section + "custom_chat_template", template, "is not a Jinja template", remedy)


def optimizers(c: Context) -> Iterator[Problem]:
    """The settings of each optimizer are consistent."""
    for section, optim in (
        ("actor_rollout_ref.actor.optim.", c.actor.optim),
        ("critic.optim.", c.critic.optim),
    ):
        yield from violations(OPTIMIZER, optim, section=section)


def adapters(context: Context) -> Iterator[Problem]:
    """Adapters to start from exist."""
    for section, model in _models(context).items():
        yield from adapter_files(section, model)


def adapter_files(section: str, model: ModelConfig) -> Iterator[Problem]:
    """Check the folder of the adapter to start from."""
    if model.lora_adapter_path is None:
        return
    folder = Path(model.lora_adapter_path).expanduser()
    wanted = ("adapter_config.json", "adapter_model.safetensors")
    missing = [name for name in wanted if not (folder / name).is_file()]
    why = _why_not_a_folder(folder)
    if not why and missing:
        why = f"is not an adapter: it has no {' and no '.join(missing)}"
    why = why or _why_unreadable(folder / wanted[1])
    if why:
        remedy = "Give a folder that peft wrote, such as huggingface/lora_adapter of a run."
        yield Problem(f"{section}lora_adapter_path", model.lora_adapter_path, why, remedy)


def _why_not_a_folder(path: Path) -> str:
    """Return what a path is instead of a folder; "" if it is one."""
    if path.is_dir():
        return ""
    return "is a file, not a folder" if path.exists() else "does not exist"


def is_hub_name(path: str) -> bool:
    """Return whether a text can only be a model name on the hub."""
    return not Path(path).exists() and hub.NAME.fullmatch(path) is not None


def model_folders(context: Context) -> Iterator[Problem]:
    """Model folders are complete."""
    for key, path in _folders(context).items():
        described, problem = _read_config(key, path)
        problem = problem or not_text(key, path, described)
        if problem:
            yield problem
        else:
            yield from weights_of(key, path)


def weights_of(key: str, path: str) -> Iterator[Problem]:
    """Check that a model folder has all its weights. Of each file the header and the length are
    read."""
    folder = Path(path)
    weights = [file for file in folder.iterdir() if file.suffix in (".safetensors", ".bin")]
    if not weights:
        why = "is not a model: it has no weights (*.safetensors)"
        yield Problem(key, path, why, "Copy or download the whole folder.")
    for file in weights:
        if file.stat().st_size < LFS_BYTES and file.read_bytes().startswith(LFS_POINTER):
            why = f"its {file.name} is a Git LFS pointer, not the weights"
            yield Problem(key, path, why, "Run `git lfs pull` there.")
            return
    why = next(
        filter(None, [*map(_why_unreadable, weights), *map(_why_missing, _indices(folder))]), ""
    )
    if why:
        yield Problem(key, path, why, COPY_AGAIN)


def _indices(folder: Path) -> list[Path]:
    """Return the indices of weights in several files. One beside a whole file is not used:
    transformers leaves it there when it saves again in one file."""
    names = ("model.safetensors", "pytorch_model.bin")
    found = [folder / f"{name}.index.json" for name in names if not (folder / name).is_file()]
    return [index for index in found if index.is_file()]


def _why_missing(index: Path) -> str:
    """Return which file an index names that is not there, or why it cannot be read; or ""."""
    try:
        named = set(json.loads(index.read_text())["weight_map"].values())
        missing = sorted(name for name in named if not (index.parent / name).is_file())
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        return f"its {index.name} cannot be read: {type(error).__name__}: {error}"
    return f"{missing[0]} is missing, and its {index.name} names it" if missing else ""


def _why_unreadable(weights: Path) -> str:
    """Return why a file of weights cannot be opened, such as one that was copied in part; or ""."""
    if weights.suffix != ".safetensors":
        return ""
    try:
        with safe_open(weights, framework="np"):
            return ""
    except SafetensorError as error:
        return f"its {weights.name} is incomplete or broken: {error}"
    except OSError as error:
        return f"its {weights.name} cannot be read: {type(error).__name__}: {error}"


def model_fits(context: Context) -> Iterator[Problem]:
    """Lengths and devices fit what the model's config.json says."""
    for key, path in _folders(context).items():
        described, _ = _read_config(key, path)
        if not described:
            continue
        if key == f"{POLICY}path":
            described |= context.config.actor_rollout_ref.model.override_config
            yield from _policy_fits(context, described)
        yield from rotary_limit(context.config, described)
        yield from _heads_fit(context, key, described)


def _folders(context: Context) -> dict[str, str]:
    """Return the models that are folders, by key."""
    paths = {f"{section}path": model.path for section, model in _models(context).items()}
    if plan.computes_teacher(context.config):
        paths[TEACHER] = context.teacher.model_path or ""
    return {key: path for key, path in paths.items() if path is not None and not is_hub_name(path)}


def _read_config(key: str, path: str) -> tuple[dict[str, Any], Problem | None]:
    """Return the model's config.json, or why there is none."""
    folder = Path(path)
    why = _why_not_a_folder(folder)
    if why:
        return {}, Problem(key, path, why, GIVE_MODEL)
    try:
        return json.loads((folder / "config.json").read_text()), None
    except FileNotFoundError:
        return {}, Problem(key, path, *_why_not_a_model(folder))
    except ValueError as error:
        why = f"its config.json cannot be read: {error}"
        return {}, Problem(key, path, why, "Write the model again.")


def not_text(key: str, path: str, described: dict[str, Any]) -> Problem | None:
    """Report a model of images or sound, unless its text part is a language model of its own."""
    kind = described.get("model_type")
    own_class = "AutoModelForCausalLM" in (described.get("auto_map") or {})
    if not {"vision_config", "audio_config"} & described.keys() or own_class:
        return None
    if kind in TEXT_CLASSES:
        return None
    rule = f"is a model of images or sound and text ({kind}); this version trains on text only"
    return Problem(key, path, rule, "Give a language model, such as Qwen/Qwen2.5-0.5B.")


def folder_of_text(key: str, path: str) -> Problem | None:
    """Report a folder with a model of images or sound. What else is wrong is found when it is
    loaded."""
    return not_text(key, path, _read_config(key, path)[0])


def _why_not_a_model(folder: Path) -> tuple[str, str]:
    """Return rule and remedy for a folder without config.json."""
    if (folder / "adapter_config.json").is_file():
        remedy = "Give its base model here, and this folder as model.lora_adapter_path."
        return "is a LoRA adapter, not a model", remedy
    if (folder / "huggingface" / "config.json").is_file():
        return "is a run directory, not a model", f"Its model is {folder / 'huggingface'}."
    if (folder / "actor").is_dir() or any(folder.glob("global_step_*")):
        remedy = f"Write a model from it: verlite export {folder} FOLDER --model MODEL."
        return "is a checkpoint of training, not a model", remedy
    if any(folder.glob("*.gguf")):
        remedy = "Give the model that it was made from, with config.json and safetensors."
        return "is a GGUF model, which cannot be trained", remedy
    remedy = "Give a folder written by save_pretrained or verlite export."
    return "is not a model: it has no config.json", remedy


def _policy_fits(context: Context, described: dict[str, Any]) -> Iterator[Problem]:
    """The model has enough positions, and the engine can compute its heads on its devices."""
    data = context.config.data
    rollout = context.config.actor_rollout_ref.rollout
    positions = described.get("max_position_embeddings")
    longest = context.longest
    parameters = described.get("rope_parameters") or {}
    scaled = described.get("rope_scaling") or "factor" in parameters
    if isinstance(positions, int) and not scaled and positions < longest:
        yield Problem(
            "data.max_response_length",
            data.max_response_length,
            f"data.max_prompt_length={data.max_prompt_length} + data.max_response_length = "
            f"{longest} tokens, but the model has {positions} positions",
            "Lower one of the two, or use a model with a longer context.",
        )
    heads = described.get("num_attention_heads")
    size = rollout.tensor_model_parallel_size
    if not isinstance(heads, int) or context.engine != "vllm":
        return
    head_size = described.get("head_dim") or described.get("hidden_size", 0) // max(heads, 1)
    on_cpu = plan.resolve_device(context.trainer.device) == "cpu"
    if on_cpu and head_size and head_size not in VLLM_CPU_HEADS and "kv_lora_rank" not in described:
        yield Problem(
            "actor_rollout_ref.rollout.name",
            rollout.name,
            "vLLM's attention on CPUs has kernels for heads of size "
            f"{', '.join(map(str, VLLM_CPU_HEADS))}; the model's have {head_size}",
            "Use actor_rollout_ref.rollout.name=hf.",
        )
    if size > 0 and heads % size:
        rule = f"must divide the model's {heads} attention heads"
        remedy = nearest_legal(heads, size)
        yield Problem("actor_rollout_ref.rollout.tensor_model_parallel_size", size, rule, remedy)


def rotary_limit(config: Config, described: Mapping[str, Any]) -> Iterator[Problem]:
    """Report sequences beyond the tokens up to which a model's rotary embedding of a sequence does
    not depend on the others of its pass.

    Args:
        described: the values of the model's config.json, or of its text_config.
    """
    limit = position_limit(described)
    longest, chosen = plan.longest_sequence(config), config.actor_rollout_ref.rollout.max_model_len
    if limit is None or max(longest, chosen or 0) <= limit[1]:
        return
    key, value = "data.max_response_length", config.data.max_response_length
    if longest <= limit[1]:
        key, value = "actor_rollout_ref.rollout.max_model_len", chosen or 0
    yield Problem(
        key,
        value,
        f"beyond {limit[1]} tokens the model's rotary embedding (rope_type={limit[0]}) of a "
        "sequence depends on the longest sequence of its pass",
        f"Lower data.max_prompt_length + data.max_response_length = {longest}, and "
        f"rollout.max_model_len if it is set, to {limit[1]}.",
    )


def _heads_fit(context: Context, key: str, described: dict[str, Any]) -> Iterator[Problem]:
    """The model's heads divide among the devices that share its sequences."""
    heads = described.get("num_attention_heads")
    if not isinstance(heads, int):
        return
    critic_has_own = context.config.critic.model.path is not None
    reported = set()
    for role, size_key, size in shared_sequences(context):
        own = role == "critic" and critic_has_own
        model = f"{CRITIC}path" if own else TEACHER if role == "teacher" else f"{POLICY}path"
        if model == key and heads % size and size_key not in reported:
            reported.add(size_key)
            rule = f"must divide the model's {heads} attention heads"
            yield Problem(size_key, size, rule, nearest_legal(heads, size))


def tokenizer(context: Context) -> Iterator[Problem]:
    """The tokenizer's folder has a tokenizer."""
    model = context.config.actor_rollout_ref.model
    path = model.tokenizer_path or model.path
    key = f"{POLICY}tokenizer_path" if model.tokenizer_path else f"{POLICY}path"
    if is_hub_name(path):
        return
    folder = Path(path)
    why = _why_not_a_folder(folder)
    if why:
        remedy = "Give a folder with a tokenizer, or a name on the hub; null uses the model's own."
        yield Problem(key, path, why, remedy)
        return
    names = [file.name for file in folder.iterdir()]
    if not any(fnmatchcase(name, pattern) for name in names for pattern in TOKENIZER_FILES):
        remedy = (
            "Put tokenizer.json and tokenizer_config.json there, or set "
            f"{POLICY}tokenizer_path to a folder that has them."
        )
        yield Problem(key, path, "has no tokenizer: none of the usual files exists", remedy)
