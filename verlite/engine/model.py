"""Models from transformers, with the two heads that training needs: log-probs of given tokens, and values."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
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
from transformers.utils import logging as transformers_logging

from verlite.algorithms.logprobs import sum_pi_squared, token_log_probs
from verlite.config.schema import ModelConfig
from verlite.engine.attention import PACKED_ATTENTION
from verlite.engine.folder import ModelError, load_config
from verlite.engine.micro import ModelInputs, model_inputs

# Layers whose output for a token depends only on the tokens that attention lets it see. Others (linear attention, state
# spaces, chunked attention) carry state across the sequences of a packed row.
_PACKABLE_LAYERS = {"full_attention", "sliding_attention"}

VALUE_HEADS = ("score", "classifier")
"""What transformers calls the head of a token classification model."""

_OWN_ATTENTION = "{} has an attention of its own, not transformers' common one; set model.use_remove_padding=False"


def load_model(
    model: ModelConfig, kind: str, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """The pretrained model on the CPU, ready for training (see `_training_config`).

    kind="lm": a causal language model. kind="value": its body with a scalar head for each token, as a token classification
    model with one label; a checkpoint that has such a head keeps it, otherwise the head starts at 0, and with it all values.
    Raises ModelError when the model cannot be loaded, is not supported (`_check_supported`), or its checkpoint lacks weights, which
    transformers would fill with random numbers.
    """
    loader, config = _architecture(model, kind)
    try:
        with _quiet():
            loaded, report = loader.from_pretrained(
                model.path,
                config=config,
                dtype=dtype,
                trust_remote_code=model.trust_remote_code,
                output_loading_info=True,
            )
    except (OSError, ValueError) as error:
        raise ModelError(f"model.path={model.path} cannot be loaded: {error}") from error
    except KeyError as error:
        if error.args != (PACKED_ATTENTION,):
            raise
        raise ModelError(_OWN_ATTENTION.format(config.model_type)) from error
    _check_supported(loaded)
    missing = set(report["missing_keys"])
    if kind == "value":
        head_name, head = value_head(loaded)
        head.float()
        fresh = {f"{head_name}.{name}": parameter for name, parameter in head.named_parameters()}
        for name in fresh.keys() & missing:
            nn.init.zeros_(fresh[name])
        missing -= fresh.keys()
    if missing:
        raise ModelError(
            f"model.path={model.path} lacks {len(missing)} weights of its model, such as {min(missing)}"
        )
    return loaded


def load_skeleton(model: ModelConfig, kind: str) -> PreTrainedModel:
    """The same modules without any memory: parameters and buffers are on the meta device."""
    loader, config = _architecture(model, kind)
    with torch.device("meta"):
        if hasattr(loader, "from_config"):
            return loader.from_config(config, trust_remote_code=model.trust_remote_code)
        return loader(config)


def _architecture(model: ModelConfig, kind: str) -> tuple[Any, PretrainedConfig]:
    """What builds the model, an auto class or a model class, and the config to build it with."""
    config = _training_config(load_config(model), model)
    if kind == "lm":
        return AutoModelForCausalLM, config
    config.num_labels = 1
    if (
        type(config) in AutoModel._model_mapping
        and type(config) not in AutoModelForTokenClassification._model_mapping
    ):
        body = AutoModel._model_mapping[
            type(config)
        ]  # transformers has no such class for this architecture; make it
        name = body.__name__.removesuffix("Model") + "ForTokenClassification"
        return type(name, (GenericForTokenClassification, body.__base__), {}), config
    return AutoModelForTokenClassification, config


def value_head(model: PreTrainedModel) -> tuple[str, nn.Linear]:
    """Name and module of a token classification model's last layer."""
    for name in VALUE_HEADS:
        if isinstance(head := getattr(model, name, None), nn.Linear):
            return name, head
    raise ModelError(
        f"{type(model).__name__} has no linear layer called score or classifier to use as a value head"
    )


def _check_supported(model: PreTrainedModel) -> None:
    """Refuse what packing, and log-probs straight from hidden states and the output embedding, would get wrong."""
    name, head = model.config.model_type, model.get_output_embeddings()
    if (
        model.config._attn_implementation == PACKED_ATTENTION
        and not model._supports_attention_backend
    ):
        raise ModelError(_OWN_ATTENTION.format(name))
    if head is None:  # a value model
        return
    if getattr(model.config, "final_logit_softcapping", None) is not None:
        raise ModelError(
            f"{name} caps its logits (final_logit_softcapping), which is not built in; where generation can do without it too, "
            "set model.override_config.final_logit_softcapping=null"
        )
    if getattr(head, "bias", None) is not None:
        raise ModelError(f"{name} has a bias on its output embedding, which is not built in")


def _training_config(config: PretrainedConfig, model: ModelConfig) -> PretrainedConfig:
    """`config` for training: packed or masked attention, no cache, and no noise.

    Without dropout and jitter, log-probs in training mode are those of generation; with them the first PPO ratio is not 1.
    """
    config = copy.deepcopy(config)
    layer_types = set(getattr(config, "layer_types", None) or [])
    if model.use_remove_padding and not layer_types <= _PACKABLE_LAYERS:
        raise ModelError(
            f"{config.model_type} has layers of type {', '.join(sorted(layer_types - _PACKABLE_LAYERS))}, which mix the sequences of a "
            "packed row; set model.use_remove_padding=False"
        )
    if model.use_remove_padding:
        config._attn_implementation = (
            PACKED_ATTENTION  # else what transformers prefers: sdpa where the model has it
        )
    config.use_cache = False
    for name, value in config.to_dict().items():
        if isinstance(value, float) and ("dropout" in name or "pdrop" in name or "jitter" in name):
            setattr(config, name, 0.0)
    return config


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars, and no report that a head is missing or left over, which is expected here."""
    verbosity, bars = (
        transformers_logging.get_verbosity(),
        transformers_logging.is_progress_bar_enabled(),
    )
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


class HeadedModel(nn.Module):
    """A transformers model and what is asked of it, as one module, so that FSDP's hooks see one forward pass.

    kind="lm": log-probs and entropies of the trainable tokens. kind="value": their values.
    """

    def __init__(self, model: PreTrainedModel, kind: str):
        super().__init__()
        self.model = model
        self.kind = kind

    def forward(
        self,
        inputs: ModelInputs,
        temperature: float = 1.0,
        with_entropy: bool = False,
        with_sum_pi_squared: bool = False,
    ) -> dict[str, Tensor]:
        """[K] float32 for the K trainable tokens: {"log_probs", "entropy" and "sum_pi_squared" if asked for}, or {"values"}. The first
        two and values are differentiable.

        Only hidden states that predict a trainable token reach the head. Values are not scaled by the temperature.
        """
        return self.head(
            self.hidden(inputs)[inputs.targets.source],
            inputs.targets.labels,
            temperature,
            with_entropy,
            with_sum_pi_squared,
        )

    def head(
        self,
        hidden: Tensor,
        labels: Tensor,
        temperature: float,
        with_entropy: bool,
        with_sum_pi_squared: bool = False,
    ) -> dict[str, Tensor]:
        """From the hidden states [K, H] that predict `labels` [K] to what forward returns."""
        if self.kind == "value":
            return {
                "values": value_head(self.model)[1](hidden).squeeze(-1).clone()
            }  # float32 as its weights; FSDP warns of views
        embedding = self.model.get_output_embeddings()
        temperature = temperature / logit_scale(self.model.config)
        log_probs, entropy = token_log_probs(
            hidden, embedding.weight, labels, temperature, with_entropy=with_entropy
        )
        outputs = {"log_probs": log_probs} | ({} if entropy is None else {"entropy": entropy})
        return outputs | (
            {"sum_pi_squared": sum_pi_squared(hidden, embedding.weight, temperature)}
            if with_sum_pi_squared
            else {}
        )

    def hidden(self, inputs: ModelInputs) -> Tensor:
        """Last hidden states of the flattened tokens, [T, H] or [b S', H]."""
        layout: dict[str, Any] = {} if inputs.sequences is None else {"sequences": inputs.sequences}
        outputs = self.model.base_model(
            input_ids=inputs.input_ids,
            attention_mask=inputs.attention_mask,
            position_ids=inputs.position_ids,
            use_cache=False,
            **layout,
        )
        return outputs.last_hidden_state.flatten(0, 1)

    @torch.no_grad()
    def self_check(self, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        """Compare this module with transformers' own forward pass on two short sequences, each alone.

        An architecture that needs more than is done here, be it soft-capped logits, a bias on the output embedding or state that
        crosses the sequences of a packed row, would otherwise train on wrong numbers. The ranks of `group` share the row, as they do in
        training. Raises ModelError when they differ.
        """
        config, packed = (
            self.model.config,
            self.model.config._attn_implementation == PACKED_ATTENTION,
        )
        generator = torch.Generator().manual_seed(0)
        attention_mask = torch.tensor([[1] * 8, [0, 0, 1, 1, 1, 1, 0, 0]])
        rows = TensorDict(
            {
                "input_ids": torch.randint(
                    self.model.get_input_embeddings().weight.shape[0], (2, 8), generator=generator
                ),
                "attention_mask": attention_mask,
                "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0),
                "response_mask": attention_mask[:, 4:],
            },
            batch_size=[2],
        )
        every = model_inputs(rows, packed)
        inputs, rows = every.cut(group).to(device), rows.to(device)
        hidden = self.hidden(inputs)[inputs.targets.source]
        ours = (
            self.head(hidden, inputs.targets.labels, 1.0, False)["log_probs"]
            if self.kind == "lm"
            else hidden.float()
        )
        implementation, config._attn_implementation = (
            config._attn_implementation,
            "sdpa" if self.model._supports_sdpa else "eager",
        )
        try:
            theirs = torch.cat(
                [
                    self._plain(
                        row["input_ids"][row["attention_mask"].bool()],
                        int(row["response_mask"].sum()),
                    )
                    for row in rows
                ]
            )
        finally:
            config._attn_implementation = implementation
        largest = theirs.abs().max().clamp(min=1)
        mine = torch.isin(every.targets.destination.to(device), inputs.targets.destination)
        differences = (
            torch.cat([(ours - theirs[mine]).abs().flatten(), largest.new_zeros(1)]) / largest
        )  # a slice may hold no target
        worst = differences.nan_to_num(torch.inf).max()
        if group is not None:
            dist.all_reduce(worst, dist.ReduceOp.MAX, group)
        gap = float(worst)
        if not gap < (1e-3 if hidden.dtype == torch.float32 else 0.1):
            remedy = (
                "try model.use_remove_padding=False"
                if packed
                else "this architecture is not supported"
            )
            raise ModelError(
                f"{config.model_type}: log-probs differ from those of the model's own forward pass, by {gap:.2g}; {remedy}"
            )

    def _plain(self, ids: Tensor, responses: int) -> Tensor:
        """Of one sequence [L], for its last `responses` tokens: log-probs by the model's own forward pass, or hidden states."""
        if self.kind == "value":
            return (
                self.model.base_model(input_ids=ids[None], use_cache=False)
                .last_hidden_state[0, -responses - 1 : -1]
                .float()
            )
        logits = self.model(input_ids=ids[None], use_cache=False).logits[0, -responses - 1 : -1]
        return torch.log_softmax(logits.float(), -1).gather(1, ids[-responses:, None]).squeeze(1)


def logit_scale(config: PretrainedConfig) -> float:
    """What the model multiplies its logits with: Cohere's logit_scale, the inverse of Granite's logits_scaling, else 1."""
    if (scale := getattr(config, "logit_scale", None)) is not None:
        return float(scale)
    if (scaling := getattr(config, "logits_scaling", None)) is not None:
        return 1.0 / float(scaling)
    return 1.0
