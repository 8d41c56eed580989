"""The self-check of a model's architecture: a small copy of the model, as the engine trains it,
against transformers' own, untouched model.

The copy (small_model.py) runs sequences that are longer than its windows, chunks and position
thresholds, packed or padded in one pass, with gradient checkpointing as configured. The reference
has eager attention and runs one sequence alone, without padding and without a cache. Log-probs (or
values) and gradients must be equal. So an architecture that this package has never seen is proven
or refused when it is loaded. The check takes about a third of a second on a CPU, once per process
and configuration.
"""

import dataclasses
import functools
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from verlite.engine.folder import ModelError, load_config
from verlite.engine.micro import ModelInputs, model_inputs
from verlite.engine.model import HeadedModel, build, check_supported, training_config
from verlite.engine.sharding import checkpoint_layers
from verlite.small_model import sequences, small_config, small_model, unsuitable
from verlite.spec.roles import ModelSpec

_TOLERANCE = 1e-3  # relative to the largest expected value or gradient
_PROVEN: set[str] = set()
"""What `_problem` found nothing wrong with in this process."""


def check(model: ModelSpec, kind: str) -> tuple[ModelSpec, str | None]:
    """Prove on a small copy that the engine computes what transformers' model does.

    Args:
        model: the model, with or without shared prefixes.
        kind: "lm" or "value"; see `load_model`.

    Returns:
        The model as it is trained: `model` itself, or without share_prefixes if the copy is right
        only where each sample is computed alone.
        A warning, None without: of that; or that no small copy can be built, so that only
        `HeadedModel.self_check` checks the model.

    Raises:
        ModelError: the engine computes something else, or cannot run such a model. The message says
            what to change, if anything helps.
    """
    config = load_config(model)
    small = small_config(config, trust_remote_code=model.trust_remote_code)
    if small is None:
        return model, (
            f"model.path={model.path}: no small copy of a {config.model_type} model can be built, "
            "so its architecture is checked with short sequences only. Compare log-probs with "
            "those of transformers on your longest sequences"
        )
    problem = _problem(model, kind, small)
    if problem is None:
        return model, None
    named = f"model.path={model.path} ({config.model_type})"
    found = f"{named} cannot be trained: {problem}"
    if model.use_remove_padding:
        flat = dataclasses.replace(model, share_prefixes=False)
        if model.share_prefixes and _problem(flat, kind, small) is None:
            return flat, (
                f"{named} computes each sample alone, as with model.share_prefixes=False: with "
                f"shared prefixes {problem}"
            )
        padded = dataclasses.replace(model, use_remove_padding=False)
        other = _problem(padded, kind, small)
        if other is None:
            raise ModelError(f"{found}. Set model.use_remove_padding=False")
        if other != problem:
            found += f"; with model.use_remove_padding=False: {other}"
    if "et model." not in found and "Set it" not in found:
        found += ". Use a model of another architecture (docs/models.md)"
    raise ModelError(found)


def _problem(model: ModelSpec, kind: str, small: PretrainedConfig) -> str | None:
    """Return what is wrong with the small copy; None if it is equal to the reference."""
    shares = model.use_remove_padding and model.share_prefixes
    settings = (model.use_remove_padding, shares, model.enable_gradient_checkpointing, kind)
    key = f"{settings} {type(small).__name__} {small.to_json_string(use_diff=False)}"
    if key in _PROVEN:
        return None
    with torch.random.fork_rng(devices=[]):
        problem = _compare(model, kind, small)
    if problem is None:
        _PROVEN.add(key)
    return problem


def _compare(model: ModelSpec, kind: str, small: PretrainedConfig) -> str | None:
    rows = _rows(_begin_alike(sequences(small)))
    try:
        reference = small_model(
            small,
            functools.partial(
                build,
                kind=kind,
                trust_remote_code=model.trust_remote_code,
                attn_implementation="eager",
            ),
        )
        expected = _reference_outputs(reference, rows)
        expected.sum().backward()
        reason = unsuitable(reference)
        if reason is not None:
            return reason
    except Exception as error:  # the library's own model
        return f"transformers' own model fails on a small copy ({type(error).__name__}: {error})"
    gradients = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    try:
        subject = _subject(model, kind, small, reference)
        inputs = model_inputs(rows, model.use_remove_padding, model.share_prefixes)
        return _difference(subject, inputs, expected.detach(), gradients)
    except ModelError as error:
        return _without_remedy(error)
    except Exception as error:  # an architecture that differs from what the engine expects
        return f"a small copy fails ({type(error).__name__}: {_without_remedy(error)})"


def _subject(
    model: ModelSpec, kind: str, small: PretrainedConfig, reference: PreTrainedModel
) -> HeadedModel:
    """Return the small copy as the engine trains it, with the reference's weights."""
    config = training_config(small, model)
    trust = model.trust_remote_code
    built = build(config, kind, dtype=torch.float32, trust_remote_code=trust)
    check_supported(built)
    built.load_state_dict(reference.state_dict())
    if model.enable_gradient_checkpointing:
        checkpoint_layers(built, model.enable_gradient_checkpointing, offload=False)
    return HeadedModel(built, kind).train()


def _begin_alike(ids: list[Tensor]) -> list[Tensor]:
    """Return the sequences with the first third of the shortest in all: a tree if prefixes are
    shared."""
    shared = min(map(len, ids)) // 3
    return [torch.cat([ids[0][:shared], sequence[shared:]]) for sequence in ids]


def _rows(ids: list[Tensor]) -> TensorDict:
    """Return the sequences as rows that are padded on both sides. Everything but the first token is
    a response."""
    longest = max(map(len, ids))
    width = longest + 2
    tokens = torch.zeros(len(ids), width, dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    response = torch.zeros(len(ids), width - 1, dtype=torch.int64)
    for row, sequence in enumerate(ids):
        place = slice(row % 3, row % 3 + len(sequence))
        tokens[row, place] = sequence
        mask[row, place] = 1
        response[row, row % 3 : row % 3 + len(sequence) - 1] = 1
    tensors = {
        "input_ids": tokens,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        "response_mask": response,
    }
    return TensorDict(tensors, batch_size=[len(ids)])


def _reference_outputs(model: PreTrainedModel, rows: TensorDict) -> Tensor:
    """Return the log-probs or values [K] of all responses, one sequence alone."""
    parts = []
    for row in rows:
        ids = row["input_ids"][row["attention_mask"].bool()]
        outputs = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        if outputs.shape[1] > 1:
            outputs = outputs.log_softmax(-1).gather(1, ids[1:, None])
        parts.append(outputs.squeeze(1))
    return torch.cat(parts)


def _difference(
    subject: HeadedModel, inputs: ModelInputs, expected: Tensor, gradients: dict[str, Any]
) -> str | None:
    (actual,) = subject(inputs).values()
    layout = "padded" if inputs.sequences is None else "packed"
    gap = _relative(actual.detach() - expected, float(expected.abs().max().clamp(min=1)))
    if not gap < _TOLERANCE:
        return (
            f"outputs for {layout} sequences differ from those of the model's own forward pass by "
            f"{gap:.2g} on a small copy"
        )
    actual.sum().backward()
    largest = max(float(g.abs().max()) for g in gradients.values())
    worst = ("", 0.0)
    for name, parameter in subject.model.named_parameters():
        own = parameter.grad
        expected_gradient = gradients.get(name)
        if own is None and expected_gradient is None:
            continue
        zero = torch.zeros_like(parameter)
        difference = (zero if own is None else own) - (
            zero if expected_gradient is None else expected_gradient
        )
        gap = _relative(difference, largest)
        if not gap <= worst[1]:
            worst = (name, gap)
    if not worst[1] < _TOLERANCE:
        return (
            f"the gradient of {worst[0]} from {layout} sequences differs from that of the model's "
            f"own pass by {worst[1]:.2g} on a small copy"
        )
    return None


def _without_remedy(error: Exception) -> str:
    """Return the message without the remedy, which `check` tries before it names it."""
    return str(error).replace(". Set model.use_remove_padding=False", "")


def _relative(difference: Tensor, scale: float) -> float:
    return float(difference.abs().nan_to_num(torch.inf).max()) / scale
