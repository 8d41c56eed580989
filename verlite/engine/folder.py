"""Tokenizer and configuration of a model, read from its folder or from the hub before the model is
built."""

import hashlib
import json
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from verlite import hub
from verlite.spec.roles import ModelSpec


class ModelError(ValueError):
    """A model cannot be loaded or is not supported. The message names the key, its value and the
    remedy."""


class HubUnreachable(ModelError):
    """A model is neither a folder here nor in the hub's cache, and the hub cannot be reached."""


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Convert what libraries raise about a model's files, which may be anything, to ModelError.

    Args:
        what: key, value and what is wrong with it, for the message.
    """
    try:
        yield
    except (ModelError, MemoryError, torch.OutOfMemoryError):
        raise
    except (OSError, ValueError) as error:
        raise ModelError(f"{what}: {error}") from error
    except pickle.UnpicklingError as error:
        raise ModelError(
            f"{what}: a *.bin file has other pickled objects than tensors. They could run code, so "
            "they are not read. Use a model in safetensors"
        ) from error
    except Exception as error:
        raise ModelError(f"{what}: {type(error).__name__}: {error}") from error


def load_tokenizer(model: ModelSpec) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer.

    Applies custom_chat_template if it is set. The EOS token serves as the pad token if the
    tokenizer has none.

    Raises:
        ModelError: the path has no usable tokenizer.
    """
    key = "model.tokenizer_path" if model.tokenizer_path else "model.path"
    path = model.tokenizer_path or model.path
    with reading(f"{key}={path} has no tokenizer"):
        tokenizer = _from_folder_or_hub(AutoTokenizer, key, path, model)
    # Without a file of the vocabulary, transformers returns one of special and added tokens.
    added = tokenizer.get_added_vocab().keys()
    if not tokenizer.get_vocab().keys() - added - set(tokenizer.all_special_tokens):
        raise ModelError(
            f"{key}={path} has no tokenizer: its vocabulary is empty. Put tokenizer.json and "
            "tokenizer_config.json there, or set model.tokenizer_path to a folder that has them"
        )
    if model.custom_chat_template is not None:
        tokenizer.chat_template = model.custom_chat_template
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def vocabulary_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a SHA-256 of the tokens and their ids, added ones included. Tokenizers with the same
    read the same text in the same ids."""
    pairs = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()


def load_config(model: ModelSpec) -> PretrainedConfig:
    """Load the model's config.json and apply override_config.

    Raises:
        ModelError: the path is not a model, or override_config has an unknown key.
    """
    with reading(f"model.path={model.path} is not a model that transformers can load"):
        config = _from_folder_or_hub(AutoConfig, "model.path", model.path, model)
    for key, value in model.override_config.items():
        if not hasattr(config, key):
            raise ModelError(
                f"model.override_config.{key} is not a value of {type(config).__name__}"
            )
        setattr(config, key, value)
    return config


def vocab_size(config: PretrainedConfig) -> int | None:
    """Return how many tokens the model has, as far as its config.json says it."""
    size: int | None = getattr(config.get_text_config(), "vocab_size", None)
    return size


def experts_of(config: PretrainedConfig) -> tuple[int, int]:
    """Return the experts of a layer and how many of them each token visits, by the names that
    transformers uses; (0, 0) without experts."""
    text = config.get_text_config()

    def first(*names: str) -> int:
        """Return the first that is given; the largest of a list with one for each layer."""
        given = next((n for n in (getattr(text, name, None) for name in names) if n), 0)
        return max(given) if isinstance(given, list) else int(given)

    experts = first("num_experts", "num_local_experts", "n_routed_experts")
    if experts < 2:
        return 0, 0
    return experts, first("num_experts_per_tok", "moe_topk") or 1


def _from_folder_or_hub(kind: Any, key: str, path: str, model: ModelSpec) -> Any:
    """Return `kind.from_pretrained` of a folder, or of a name on the hub.

    Raises:
        HubUnreachable: the hub cannot be reached, and its cache does not have the name.
        ModelError: the hub does not have the name, or no access to it.
        OSError: the path is neither a folder here nor a name on the hub.
    """
    trust = model.trust_remote_code
    if Path(path).exists():
        return kind.from_pretrained(path, trust_remote_code=trust)
    if hub.NAME.fullmatch(path) is None:
        raise FileNotFoundError(
            "it is not a folder here, and not a valid name on the hub. "
            f"{hub.neighbors(path)}Correct it"
        )
    why = hub.unreachable()
    try:
        return kind.from_pretrained(path, trust_remote_code=trust, local_files_only=why is not None)
    except OSError as error:
        remedy = (
            f"{hub.neighbors(path)}Correct the path, or download the model where the hub can be "
            f"reached (hf download {path} --local-dir FOLDER) and give its folder"
        )
        if why is None:
            raise ModelError(
                f"{key}={path} is not a folder here, and cannot be read from the hub at "
                f"{hub.endpoint()}: {hub.reason(error)}. {remedy}"
            ) from error
        raise HubUnreachable(
            f"{key}={path} is not a folder here, and the hub at {hub.endpoint()} cannot be reached "
            f"({why}). {remedy}"
        ) from error
