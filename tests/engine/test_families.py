"""Families of models: the engine computes what transformers' own model does for one sequence."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from tests.engine import families
from tests.engine.batches import P, engine, ragged_batch
from tests.models import tiny_model
from verlite.engine import attention, family, model
from verlite.engine.folder import ModelError
from verlite.engine.fsdp import TrainEngine
from verlite.engine.micro import MicroBatching
from verlite.protocol.data import DataProto
from verlite.small_model import small_config
from verlite.spec.roles import ModelSpec

MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

TABLE: dict[str, str] = json.loads(Path(__file__).with_name("families.json").read_text())
"""What is expected of each family. `python -m tests.engine.families` writes it."""


def gradients(path: str, batch: DataProto) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the untouched model's log-probs [B, R], and the gradient of their sum."""
    model = AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="eager", dtype=torch.float32
    ).eval()
    rows = []
    for row in batch.batch:
        ids = row["input_ids"][row["attention_mask"].bool()]
        log_probs = model(ids[None], use_cache=False).logits[0].log_softmax(-1)
        prompt = int(row["attention_mask"][:P].sum())
        chosen = log_probs[prompt - 1 : -1].gather(1, ids[prompt:, None]).squeeze(1)
        rows.append(torch.nn.functional.pad(chosen, (0, len(row["response_mask"]) - len(chosen))))
    found = torch.stack(rows) * batch.batch["response_mask"]
    found.sum().backward()
    named = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return found.detach(), named


def trained_gradient(subject: TrainEngine, batch: DataProto) -> dict[str, Tensor]:
    """Return the engine's gradient of the sum of log-probs, in training mode."""
    kept: dict[str, Tensor] = {}

    def sum_of_log_probs(rows: Any, outputs: dict[str, Tensor], counts: Any) -> Any:
        return outputs["log_probs"].sum(), {}

    def keep() -> float:
        for name, parameter in subject.model.model.named_parameters():
            if parameter.grad is not None:
                kept[name] = parameter.grad.full_tensor().clone()
        return 0.0

    subject._clip = keep  # type: ignore[method-assign]
    subject.update(batch, MicroBatching(size=3), 1.0, sum_of_log_probs)
    return kept


def assert_equals_untouched(path: str, **settings: Any) -> None:
    """Log-probs and gradients of the engine are those of the untouched model."""
    batch = ragged_batch()
    subject = engine(path, train=True, **settings)
    expected, gradient = gradients(path, batch)
    actual = subject.forward(batch, MicroBatching(size=3))["log_probs"]
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-4)
    trained = trained_gradient(subject, batch)
    assert trained.keys() == gradient.keys()
    scale = max(float(g.abs().max()) for g in gradient.values())
    for name, value in gradient.items():
        torch.testing.assert_close(trained[name], value, atol=2e-5 * scale, rtol=1e-3, msg=name)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("arch", "settings"),
    [
        (
            "qwen2_moe",
            MOE
            | {
                "shared_expert_intermediate_size": 32,
                "sliding_window": 3,
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
        ),
        ("phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 3}),
    ],
)
def test_windows_that_only_the_mask_has(
    arch: str, settings: dict[str, Any], packed: bool, tmp_path: Path
) -> None:
    """transformers gives these models' attention no window, but a mask that has it. phimoe's router
    also samples experts in training mode, and needs its jitter as a threshold."""
    assert_equals_untouched(tiny_model(tmp_path, arch, **settings), use_remove_padding=packed)


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 12,
    "short_factor": [1.0] * 4,
    "long_factor": [3.0] * 4,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("arch", "settings"),
    [
        ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 12}),
        ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 12}),
    ],
)
def test_sequences_whose_rotary_embedding_would_depend_on_others_are_refused(
    arch: str, settings: dict[str, Any], packed: bool, tmp_path: Path
) -> None:
    """Beyond 12 positions transformers changes the embedding of every sequence of a pass."""
    path = tiny_model(tmp_path, arch, **settings)
    subject = engine(path, use_remove_padding=packed)
    batch = ragged_batch()
    lengths = batch.batch["attention_mask"].sum(1)
    short = batch[(lengths <= 12).nonzero().flatten()]
    actual = subject.forward(short, MicroBatching(size=3))["log_probs"]
    torch.testing.assert_close(actual, gradients(path, short)[0], atol=2e-5, rtol=1e-4)
    with pytest.raises(ModelError, match=r"rope_type=\w+.* at most 12 tokens"):
        subject.forward(batch, MicroBatching(size=3))


@pytest.mark.process  # about three minutes for all
@pytest.mark.parametrize("name", families.names())
def test_family_is_equal_or_refused(name: str, tmp_path: Path) -> None:
    """Packed, padded and generated log-probs are those of the untouched model, or the family is
    refused: nothing else."""
    assert families.outcome(name, tmp_path) == TABLE[name]


def test_table_has_every_family_and_no_difference() -> None:
    assert sorted(TABLE) == families.names()
    assert not [name for name, outcome in TABLE.items() if "DIFFERS" in outcome]
    assert families.PAGE.read_text() == families.page(TABLE)


def _untouched_train(self: nn.Module, mode: bool = True) -> nn.Module:
    return nn.Module.train(self, mode)


@pytest.mark.parametrize(
    ("arch", "settings", "place", "name", "bug"),
    [
        ("mistral", {"sliding_window": 1000}, attention, "_per_sequence", "window"),
        (
            "qwen2_moe",
            MOE | {"sliding_window": 1000, "use_sliding_window": True, "max_window_layers": 1},
            attention,
            "_per_sequence",
            "window",
        ),
        ("phimoe", {"num_local_experts": 4}, model.HeadedModel, "train", _untouched_train),
    ],
)
def test_self_check_sees_what_short_sequences_do_not_show(
    arch: str,
    settings: dict[str, Any],
    place: Any,
    name: str,
    bug: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The window has 1000 tokens, and training mode samples experts; the load-time check has its
    own small copy with a shorter window, and trains it."""
    original = getattr(place, name)
    if bug == "window":

        def bug(query: Any, key: Any, value: Any, scaling: Any, window: Any, lengths: Any) -> Any:
            return original(query, key, value, scaling, None, lengths)

    path = tiny_model(tmp_path, arch, **settings)
    family._PROVEN.clear()
    engine(path)
    family._PROVEN.clear()
    monkeypatch.setattr(place, name, bug)
    with pytest.raises(ModelError, match="packed sequences differ"):
        engine(path)


def test_self_check_sees_a_lost_cap_of_attention_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers' sdpa ignores the cap, and the logits of small weights are far below it."""
    path = tiny_model(tmp_path, "gemma2", final_logit_softcapping=None)
    padded = ModelSpec(path=path, use_remove_padding=False)
    assert family.check(padded, "lm") == (padded, None)
    original = family.training_config

    def with_sdpa(config: Any, model: Any) -> Any:
        config = original(config, model)
        config._attn_implementation = "sdpa"
        return config

    family._PROVEN.clear()
    monkeypatch.setattr(family, "training_config", with_sdpa)
    with pytest.raises(ModelError, match="differ"):
        family.check(padded, "lm")


def test_a_model_that_is_exact_only_without_shared_prefixes_is_trained_without(
    tiny_qwen2: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    micro = MicroBatching(size=8)
    expected = engine(tiny_qwen2).forward(ragged_batch(), micro)["log_probs"]
    gather = attention.Paths.gather
    family._PROVEN.clear()
    monkeypatch.setattr(attention.Paths, "gather", lambda self, x: -gather(self, x))
    shared = ModelSpec(path=tiny_qwen2)
    trained, warning = family.check(shared, "lm")
    assert trained == dataclasses.replace(shared, share_prefixes=False)
    assert warning is not None and "model.share_prefixes=False: with shared prefixes" in warning
    found = engine(tiny_qwen2).forward(ragged_batch(), micro)["log_probs"]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["dots1", "glm4_moe"])
def test_values_of_a_mixture_of_experts_are_proven(name: str) -> None:
    """transformers has no class for them. Building a model changes its configuration, which then
    asks for what the class does not have."""
    small = families.family_config(name)
    assert small is not None
    assert family._problem(ModelSpec(path="x"), "value", small) is None


def test_a_model_of_images_and_text_is_proven_by_its_text_part() -> None:
    """The sizes of a small copy do not fit its vision part, so only the text part is copied."""
    small = small_config(AutoConfig.for_model("llama4"))
    assert small is not None and small.model_type == "llama4_text"
    problem = family._problem(ModelSpec(path="x", use_remove_padding=False), "lm", small)
    assert problem is not None and "padded sequences differ" in problem


@pytest.mark.parametrize(
    "damage", [{"hidden_size": 10**12}, {"num_hidden_layers": 10**12}, {"hidden_size": [8]}]
)
def test_damaged_sizes_have_no_small_copy(damage: dict[str, Any]) -> None:
    config = AutoConfig.for_model("qwen2")
    vars(config).update(damage)
    assert small_config(config) is None


def test_self_check_without_a_small_copy_says_so(
    tiny_qwen2: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(family, "small_config", lambda config, **options: None)
    _, found = family.check(ModelSpec(path=tiny_qwen2), "lm")
    assert found is not None and "no small copy of a qwen2 model can be built" in found
