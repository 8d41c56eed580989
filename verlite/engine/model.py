"""Models from transformers with the two heads that training needs: log-probs of given tokens, and
values."""

import copy
import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from tensordict import TensorDict
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GenericForTokenClassification
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from verlite.algorithms.logprobs import sum_pi_squared, token_log_probs
from verlite.engine.attention import PACKED_ATTENTION, Select
from verlite.engine.folder import ModelError, load_config, reading
from verlite.engine.micro import ModelInputs, model_inputs
from verlite.spec.roles import ModelSpec
from verlite.spec.rope import beyond_limit, position_limit

# Layers whose output for a token depends only on tokens visible to attention. Other layers (linear
# attention, state spaces, chunked attention) carry state across the sequences of a packed row.
_PACKABLE_LAYERS = {"full_attention", "sliding_attention"}

VALUE_HEADS = ("score", "classifier")
"""transformers' names for the head of a token classification model."""

_FILE_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Dtypes of weights in safetensors files, by their names there."""


_FLOAT32_TOLERANCE = 1e-3  # of the self-check, relative to the largest expected value
_HALF_PRECISION_TOLERANCE = 0.1


def load_model(model: ModelSpec, kind: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load the pretrained model on the CPU, configured for training (see `training_config`).

    Args:
        model: the model's path and options.
        kind: "lm" for a causal language model. "value" for its body with a scalar head per token: a
            token classification model with one label. A checkpoint's own head is kept; otherwise
            the head starts at 0, and so do all values.
        dtype: dtype of the parameters.

    Raises:
        ModelError: the model cannot be loaded, is not supported (`check_supported`), or its
            checkpoint lacks weights, which transformers would fill with random numbers.
    """
    config = training_config(load_config(model), model)
    loader = model_class(config, kind)
    with _quiet(), reading(f"model.path={model.path} cannot be loaded"):
        try:
            loaded, report = loader.from_pretrained(
                model.path,
                config=config,
                dtype=dtype,
                trust_remote_code=model.trust_remote_code,
                output_loading_info=True,
            )
        except KeyError as error:
            if error.args != (PACKED_ATTENTION,):
                raise
            raise _own_attention_error(config.model_type) from error
    check_supported(loaded)
    missing = set(report["missing_keys"])
    if kind == "value":
        missing -= _initialize_value_head(loaded, missing)
    if missing:
        raise ModelError(
            f"model.path={model.path} lacks {len(missing)} weights of its model, "
            f"such as {min(missing)}"
        )
    return loaded


def _initialize_value_head(model: PreTrainedModel, missing: set[str]) -> set[str]:
    """Convert the value head to float32, set parameters missing from the checkpoint to 0, and
    return the head's names."""
    head_name, head = value_head(model)
    head.float()
    parameters = {f"{head_name}.{name}": p for name, p in head.named_parameters()}
    for name in parameters.keys() & missing:
        nn.init.zeros_(parameters[name])
    return set(parameters)


def load_skeleton(
    model: ModelSpec, kind: str, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """Build the model that `load_model` loads without its weights: parameters and persistent
    buffers are on the meta device. Derived tables, such as rotary frequencies, have their values.

    Raises:
        ModelError: the model is not supported (`check_supported`).
    """
    config = training_config(load_config(model), model)
    with torch.device("meta"):
        skeleton = build(config, kind, dtype=dtype, trust_remote_code=model.trust_remote_code)
    check_supported(skeleton)
    _compute_buffers(skeleton)
    for name, tensor in skeleton.state_dict(keep_vars=True).items():
        if _stays_float32(skeleton, name, dtype):
            tensor.data = tensor.data.float()
    if kind == "value":
        value_head(skeleton)[1].float()
    return skeleton


def build(config: PretrainedConfig, kind: str, **options: Any) -> PreTrainedModel:
    """Build a model from its configuration, without the checkpoint's weights.

    Raises:
        ModelError: its class has no packed attention, for which `config` asks.
    """
    loader = model_class(config, kind)
    try:
        if hasattr(loader, "from_config"):
            built: PreTrainedModel = loader.from_config(config, **options)
        else:
            options.pop("trust_remote_code", None)
            built = loader._from_config(config, **options)
    except KeyError as error:
        if error.args != (PACKED_ATTENTION,):
            raise
        raise _own_attention_error(config.model_type) from error
    return built


def _compute_buffers(model: PreTrainedModel) -> None:
    """Compute the buffers that no checkpoint has, as from_pretrained does: the model's own
    `_init_weights` writes them, and leaves the tensors alone that are marked as initialized."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name in module._non_persistent_buffers_set:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
    for tensor in model.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True
    model.initialize_weights()


def _stays_float32(model: PreTrainedModel, name: str, dtype: torch.dtype) -> bool:
    """Return True for the weights that the model's class keeps in float32 in every dtype."""
    patterns = [pattern.replace("*", ".*") for pattern in model._get_dtype_plan(dtype)]
    return any(re.search(pattern, name) for pattern in patterns)


def checkpoint_dtype(path: str) -> torch.dtype | None:
    """Return the dtype that holds every weight of a safetensors checkpoint without rounding.

    A model that is loaded in this dtype is not copied: its weights are views of the mapped files.

    Returns:
        None if the checkpoint is not in safetensors, or has dtypes other than float64, float32,
        float16 and bfloat16.
    """
    found = set()
    try:
        for file in _safetensors_files(path):
            with safe_open(file, "pt") as tensors:
                found |= {tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118
    except Exception:  # from_pretrained says what is wrong
        return None
    floats = {name for name in found if name.startswith(("F", "BF"))}
    if not floats or not floats <= _FILE_DTYPES.keys():
        return None
    return functools.reduce(torch.promote_types, [_FILE_DTYPES[name] for name in floats])


def _safetensors_files(path: str) -> list[str]:
    """Return the checkpoint's files, downloaded if `path` is a name on the hub. Raises OSError if
    there are none."""
    try:
        return [str(cached_file(path, SAFE_WEIGHTS_NAME))]
    except OSError:
        index = cached_file(path, SAFE_WEIGHTS_INDEX_NAME)
        files, _ = get_checkpoint_shard_files(path, index)
        return list(files)


def model_class(config: PretrainedConfig, kind: str) -> Any:
    """Return the auto class or model class that builds the model. Sets one label for values."""
    if kind == "lm":
        return AutoModelForCausalLM
    config.num_labels = 1
    has_body = type(config) in AutoModel._model_mapping
    has_head = type(config) in AutoModelForTokenClassification._model_mapping
    if has_head or not has_body:
        return AutoModelForTokenClassification
    # transformers has no token classification class for this architecture, so define one.
    body: Any = AutoModel._model_mapping[type(config)]
    name = body.__name__.removesuffix("Model") + "ForTokenClassification"
    return type(name, (GenericForTokenClassification, body.__base__), {})


def value_head(model: PreTrainedModel) -> tuple[str, nn.Linear]:
    """Return name and module of a token classification model's head."""
    for name in VALUE_HEADS:
        head = getattr(model, name, None)
        if isinstance(head, nn.Linear):
            return name, head
    raise ModelError(
        f"{type(model).__name__} has no linear layer called {' or '.join(VALUE_HEADS)} "
        "to use as a value head"
    )


def _own_attention_error(model_type: str) -> ModelError:
    return ModelError(
        f"{model_type} has its own attention code instead of transformers' common interface. "
        "Set model.use_remove_padding=False"
    )


def check_supported(model: PreTrainedModel) -> None:
    """Raise ModelError for features that packing, or log-probs computed directly from hidden
    states, would get wrong."""
    name = model.config.model_type
    is_packed = model.config._attn_implementation == PACKED_ATTENTION
    if is_packed and not model._supports_attention_backend:
        raise _own_attention_error(name)
    head = model.get_output_embeddings()
    if head is None:  # a value model
        return
    if getattr(model.config, "final_logit_softcapping", None) is not None:
        raise ModelError(
            f"{name} caps its logits (final_logit_softcapping), which is not supported. If "
            "generation works without the cap too, set "
            "model.override_config.final_logit_softcapping=null"
        )
    if getattr(head, "bias", None) is not None:
        raise ModelError(f"{name} has a bias on its output embedding, which is not supported")


def training_config(config: PretrainedConfig, model: ModelSpec) -> PretrainedConfig:
    """Return a copy of `config` for training: packed or masked attention, no cache, no dropout.

    Without noise, log-probs in training mode equal those of generation. With it, the first PPO
    ratio would not be 1. `HeadedModel.train` turns off the noise of routers.
    """
    config = copy.deepcopy(config)
    if model.use_remove_padding:
        layer_types = set(getattr(config, "layer_types", None) or [])
        unpackable = sorted(layer_types - _PACKABLE_LAYERS)
        if unpackable:
            raise ModelError(
                f"{config.model_type} has layers of type {', '.join(unpackable)}, which mix the "
                "sequences of a packed row. Set model.use_remove_padding=False"
            )
        config._attn_implementation = PACKED_ATTENTION
    elif getattr(config, "attn_logit_softcapping", None) or getattr(config, "alibi", False):
        config._attn_implementation = "eager"  # transformers' sdpa computes something else
    # Otherwise transformers chooses: sdpa if the model supports it.
    config.use_cache = False
    for name, value in config.to_dict().items():
        is_noise = "dropout" in name or "pdrop" in name
        if isinstance(value, float) and is_noise:
            setattr(config, name, 0.0)
    return config


@contextmanager
def _quiet() -> Iterator[None]:
    """Disable progress bars, and the expected report that a head is missing or unused."""
    verbosity = transformers_logging.get_verbosity()
    has_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if has_bars:
            transformers_logging.enable_progress_bar()


class HeadedModel(nn.Module):
    """A transformers model and its head as one module, so that FSDP's hooks see a single forward
    pass.

    kind="lm" computes log-probs and entropies of the trainable tokens, kind="value" their values.
    """

    def __init__(self, model: PreTrainedModel, kind: str):
        super().__init__()
        self.model = model
        self.kind = kind
        if kind == "lm":
            # A method of the output embedding, so that FSDP can gather its weight for the call.
            embedding: Any = model.get_output_embeddings()
            embedding.token_outputs = MethodType(token_outputs, embedding)
        self._position_limit = position_limit(model.config.get_text_config().to_dict())

    def train(self, mode: bool = True) -> "HeadedModel":
        """Set the mode of gradient checkpointing. Everything else stays in evaluation mode, in
        which routers neither sample experts nor add jitter."""
        super().train(False)
        for module in self.modules():
            if hasattr(module, "gradient_checkpointing"):
                module.training = mode
        self.training = mode
        return self

    def forward(
        self,
        inputs: ModelInputs,
        temperature: float = 1.0,
        with_entropy: bool = False,
        with_sum_pi_squared: bool = False,
    ) -> dict[str, Tensor]:
        """Compute the head's outputs for the K trainable tokens, [K] float32 each.

        Only hidden states that predict a trainable token reach the head. Values are not scaled by
        the temperature.

        Returns:
            {"values"}, or {"log_probs"} plus the requested "entropy" and "sum_pi_squared". All but
            "sum_pi_squared" are differentiable.
        """
        hidden: Tensor = Select.apply(self.hidden(inputs), inputs.targets.source)
        return self.head(
            hidden, inputs.targets.labels, temperature, with_entropy, with_sum_pi_squared
        )

    def head(
        self,
        hidden: Tensor,
        labels: Tensor,
        temperature: float,
        with_entropy: bool,
        with_sum_pi_squared: bool = False,
    ) -> dict[str, Tensor]:
        """Compute what `forward` returns from the hidden states [K, H] that predict `labels`
        [K]."""
        if self.kind == "value":
            _, head = value_head(self.model)
            # Cloned because FSDP warns of views. The dtype is float32, that of the head's weights.
            return {"values": head(hidden).squeeze(-1).clone()}
        embedding: Any = self.model.get_output_embeddings()
        temperature = temperature / logit_scale(self.model.config)
        outputs: dict[str, Tensor] = embedding.token_outputs(
            hidden, labels, temperature, with_entropy, with_sum_pi_squared
        )
        return outputs

    def hidden(self, inputs: ModelInputs) -> Tensor:
        """Return the last hidden states of the flattened tokens, [T, H] or [b S', H].

        Raises:
            ModelError: a sequence is longer than the model's rotary embedding allows.
        """
        self._check_positions(inputs)
        layout: dict[str, Any] = {}
        if inputs.sequences is not None:
            layout["sequences"] = inputs.sequences
        body: Any = self.model.base_model
        if body is self.model:  # llama4_text, whose prefix is that of the multimodal model
            body = next(m for m in body.children() if isinstance(m, PreTrainedModel))
        outputs = body(
            input_ids=inputs.input_ids,
            attention_mask=inputs.attention_mask,
            position_ids=inputs.position_ids,
            use_cache=False,
            **layout,
        )
        return outputs.last_hidden_state.flatten(0, 1)

    def _check_positions(self, inputs: ModelInputs) -> None:
        if self._position_limit is None:
            return
        kind, limit = self._position_limit
        if inputs.sequences is not None:
            longest = inputs.sequences.longest
        else:
            longest = int(inputs.position_ids.max()) + 1
        if longest > limit:
            raise ModelError(beyond_limit(kind, limit, longest))

    @torch.no_grad()
    def self_check(
        self,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        shares_prefixes: bool = False,
    ) -> None:
        """Compare this module with transformers' own forward pass on short sequences, which begin
        alike.

        This detects architectures that need more than this module computes, such as soft-capped
        logits, a bias on the output embedding, or state that crosses the sequences of a packed row.
        The ranks of `group` share the row, as in training.

        Raises:
            ModelError: the results differ.
        """
        config = self.model.config
        is_packed = config._attn_implementation == PACKED_ATTENTION
        rows = self._random_rows()
        all_inputs = model_inputs(rows, is_packed, shares_prefixes and is_packed)
        inputs, _ = all_inputs.rank_slice(group).to(device)
        rows = rows.to(device)
        actual = self.hidden(inputs)[inputs.targets.source]
        tolerance = _HALF_PRECISION_TOLERANCE
        if actual.dtype == torch.float32:
            tolerance = _FLOAT32_TOLERANCE
        if self.kind == "lm":
            actual = self.head(actual, inputs.targets.labels, 1.0, False)["log_probs"]
        else:
            actual = actual.float()
        expected = self._expected(rows)
        largest = expected.abs().max().clamp(min=1)
        is_own = torch.isin(all_inputs.targets.destination.to(device), inputs.targets.destination)
        differences = (actual - expected[is_own]).abs().flatten()
        # The extra zero keeps the maximum defined if this rank's slice has no target.
        differences = torch.cat([differences, largest.new_zeros(1)]) / largest
        worst = differences.nan_to_num(torch.inf).max()
        if group is not None:
            dist.all_reduce(worst, dist.ReduceOp.MAX, group)
        gap = float(worst)
        if not gap < tolerance:
            remedy = "This architecture is not supported"
            if is_packed:
                key = "share_prefixes" if shares_prefixes else "use_remove_padding"
                remedy = f"Try model.{key}=False"
            raise ModelError(
                f"{config.model_type}: log-probs differ from those of the model's own forward pass "
                f"by {gap:.2g}. {remedy}"
            )

    def _random_rows(self) -> TensorDict:
        """Return rows of random tokens for the self-check: two that are padded on different sides,
        and one that begins as the first."""
        generator = torch.Generator().manual_seed(0)
        attention_mask = torch.tensor([[1] * 8, [0, 0, 1, 1, 1, 1, 0, 0], [1] * 8])
        embeddings: Any = self.model.get_input_embeddings()
        vocab_size = embeddings.weight.shape[0]
        input_ids = torch.randint(vocab_size, (3, 8), generator=generator)
        input_ids[2, :3] = input_ids[0, :3]
        tensors = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0),
            "response_mask": attention_mask[:, 4:],
        }
        return TensorDict(tensors, batch_size=[3])

    @torch.compiler.set_stance("force_eager")  # or its lengths would be graphs of their own
    def _expected(self, rows: TensorDict) -> Tensor:
        """Return log-probs, or hidden states of a value model, by transformers' own attention, one
        row at a time."""
        config = self.model.config
        implementation = config._attn_implementation
        config._attn_implementation = "eager"
        try:
            parts = []
            for row in rows:
                ids = row["input_ids"][row["attention_mask"].bool()]
                parts.append(self._expected_row(ids, int(row["response_mask"].sum())))
            return torch.cat(parts)
        finally:
            config._attn_implementation = implementation

    def _expected_row(self, ids: Tensor, responses: int) -> Tensor:
        """Return log-probs or hidden states for the last `responses` tokens of one sequence [L]."""
        predicting = slice(-responses - 1, -1)
        if self.kind == "value":
            outputs = self.model.base_model(input_ids=ids[None], use_cache=False)
            return outputs.last_hidden_state[0, predicting].float()
        logits = self.model(input_ids=ids[None], use_cache=False).logits[0, predicting]
        log_probs = torch.log_softmax(logits.float(), -1)
        return log_probs.gather(1, ids[-responses:, None]).squeeze(1)


def token_outputs(
    embedding: nn.Linear,
    hidden: Tensor,
    labels: Tensor,
    temperature: float,
    with_entropy: bool,
    with_sum_pi_squared: bool,
) -> dict[str, Tensor]:
    """Return log-probs of `labels` [K], and what else is asked for, from hidden states [K, H]."""
    log_probs, entropy = token_log_probs(
        hidden, embedding.weight, labels, temperature, with_entropy=with_entropy
    )
    outputs = {"log_probs": log_probs}
    if entropy is not None:
        outputs["entropy"] = entropy
    if with_sum_pi_squared:
        outputs["sum_pi_squared"] = sum_pi_squared(hidden, embedding.weight, temperature)
    return outputs


def logit_scale(config: PretrainedConfig) -> float:
    """Return the factor of the model's logits: Cohere's logit_scale, the inverse of Granite's
    logits_scaling, or 1."""
    scale = getattr(config, "logit_scale", None)
    if scale is not None:
        return float(scale)
    scaling = getattr(config, "logits_scaling", None)
    if scaling is not None:
        return 1.0 / float(scaling)
    return 1.0
