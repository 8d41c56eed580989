"""What a model's folder says before anything of the model is built: its tokenizer and its configuration."""

from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from verlite.config.schema import ModelConfig


class ModelError(ValueError):
    """The model's folder, or its name on the hub, does not hold what it should. The message names the key, its value and the remedy."""


def load_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """The model's tokenizer, with custom_chat_template if set, and a pad token (the EOS token where it has none). Raises ModelError."""
    path, key = (
        model.tokenizer_path or model.path,
        f"model.{'tokenizer_path' if model.tokenizer_path else 'path'}",
    )
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ModelError(f"{key}={path} gives no tokenizer: {error}") from error
    if len(tokenizer) <= len(
        set(tokenizer.all_special_ids)
    ):  # what transformers makes up for a folder without tokenizer files
        raise ModelError(
            f"{key}={path} gives no tokenizer: its vocabulary is empty. Put tokenizer.json and tokenizer_config.json there, "
            "or set tokenizer_path, beside this key, to a folder that has them"
        )
    if model.custom_chat_template is not None:
        tokenizer.chat_template = model.custom_chat_template
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_config(model: ModelConfig) -> PretrainedConfig:
    """The model's config.json with override_config applied. Raises ModelError for a path that is no model, or an unknown key."""
    try:
        config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"model.path={model.path} is not a model that transformers can load: {error}"
        ) from error
    for key, value in model.override_config.items():
        if not hasattr(config, key):
            raise ModelError(
                f"model.override_config.{key}: {type(config).__name__} has no such value"
            )
        setattr(config, key, value)
    return config
