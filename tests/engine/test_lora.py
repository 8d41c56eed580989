"""LoRA: initialization, training, merged export, checkpoints, and the base model as the
reference."""

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.engine import programs
from tests.engine.batches import engine, naive_log_probs, ragged_batch
from tests.engine.ranks import Ranks
from tests.models import tiny_model
from verlite.engine.folder import ModelError
from verlite.engine.micro import MicroBatching
from verlite.weights.fingerprint import fingerprint

pytestmark = pytest.mark.process

ALL = MicroBatching(size=8)
Results = dict[str, Any]


@pytest.fixture(scope="module")
def results(tiny_qwen2: str, tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("adapters")
    return {"folder": folder} | programs.lora_updates(tiny_qwen2, str(folder))


def test_lora_starts_from_the_base_model(tiny_qwen2: str) -> None:
    """B is 0 and A is not: log-probs, weights and checksum equal the model's, bit for bit."""
    base = engine(tiny_qwen2)
    adapted = engine(tiny_qwen2, train=True, **programs.LORA)
    assert torch.equal(
        adapted.forward(ragged_batch(), ALL)["log_probs"],
        base.forward(ragged_batch(), ALL)["log_probs"],
    )
    assert adapted.fingerprint() == base.fingerprint()
    weights = dict(adapted.model.model.named_parameters())
    adapters = [name for name in weights if "lora_" in name]
    assert len(adapters) == 2 * 2 * 7 and all(
        weights[name].full_tensor().any() == ("lora_A" in name) for name in adapters
    )


def test_only_adapters_change(results: Results, tiny_qwen2: str) -> None:
    """Every adapter has a gradient and changes. The other weights do not, and have no moments."""
    start = results["start"]
    end = results["end"]
    adapters = {name for name in start if "lora_" in name}
    assert (
        {name for name in start if not torch.equal(start[name], end[name])}
        == adapters
        == results["gradients"][-1].keys()
    )
    assert all(gradient.any() for gradient in results["gradients"][-1].values())
    file = load_file(f"{tiny_qwen2}/model.safetensors")
    assert all(
        torch.equal(end[name], file[name.replace(".base_layer", "")])
        for name in end.keys() - adapters
    )
    assert {name.rsplit(".", 1)[0] for name in results["state"].keys() - end.keys()} == adapters


def test_lora_updates_equal_peft(results: Results, tiny_qwen2: str) -> None:
    """Compare with four AdamW steps on peft's model in float64, starting from the same A."""
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen2, dtype=torch.float64)
    config = peft.LoraConfig(r=4, lora_alpha=12, target_modules="all-linear", task_type="CAUSAL_LM")
    oracle = peft.get_peft_model(model, config).double().train()
    named = {name.removeprefix("base_model.model."): p for name, p in oracle.named_parameters()}
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(results["start"][name])
    optimizer = torch.optim.AdamW(
        [p for p in named.values() if p.requires_grad], lr=3e-3, weight_decay=0.01
    )
    batch = ragged_batch()
    t = batch.batch
    for gradients in results["gradients"]:
        optimizer.zero_grad()
        log_probs = torch.zeros(())
        for row in range(len(batch)):
            ids = t["input_ids"][row][t["attention_mask"][row].bool()]
            responses = int(t["attention_mask"][row, 7:].sum())
            logits = oracle(ids[None]).logits[0, -responses - 1 : -1] / programs.TEMPERATURE
            new = torch.log_softmax(logits, -1).gather(1, ids[-responses:, None]).squeeze(1)
            log_probs = (
                log_probs
                + (
                    new * t["advantages"][row, :responses] * t["response_mask"][row, :responses]
                ).sum()
            )
        (-log_probs / t["response_mask"].sum()).backward()
        expected = {name: p.grad for name, p in named.items() if p.grad is not None}
        assert expected.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(
                gradient.double(),
                expected[name],
                rtol=1e-3,
                atol=1e-5,
                msg=lambda m, name=name: f"{name}: {m}",
            )
        optimizer.step()
    # Adam divides by the square root of a gradient's square: where that is near 0, rounding decides
    # on which side.
    for name, parameter in named.items():
        assert (results["end"][name] - parameter).norm() < 1e-3 * (
            results["end"][name] - results["start"][name]
        ).norm() + 1e-12


def test_merged_weights_equal_the_adapted_model(results: Results, tiny_qwen2: str) -> None:
    """The export has the model's names and loads without peft. Its weights equal W + s B A."""
    file = load_file(f"{tiny_qwen2}/model.safetensors")
    end = results["end"]
    assert results["weights"].keys() == file.keys()
    for name, weight in results["weights"].items():
        module = name.removesuffix(".weight")
        expected = file[name].double()
        if f"{module}.lora_A.default.weight" in end:
            a, b = (end[f"{module}.lora_{x}.default.weight"].double() for x in "AB")
            expected = expected + 12 / 4 * b @ a
        torch.testing.assert_close(weight.double(), expected, rtol=1e-6, atol=1e-7)
    merged = engine(f"{results['folder']}/hf").forward(ragged_batch(), ALL)["log_probs"]
    assert (merged - results["log_probs"]).abs().max() < 1e-5
    assert (
        results["log_probs"] - results["reference"]
    ).abs().max() > 0.1  # there is something to lose
    oracle, _ = naive_log_probs(
        AutoModelForCausalLM.from_pretrained(results["folder"] / "hf", dtype=torch.float64),
        ragged_batch(),
    )
    assert (oracle - results["log_probs"]).abs().max() < 1e-4


def test_fingerprint_is_that_of_the_merged_weights(results: Results) -> None:
    first, second = results["fingerprints"]
    assert first == fingerprint(results["weights"].items())
    assert second == fingerprint(results["bf16"].items()) and all(
        w.dtype == torch.bfloat16 for w in results["bf16"].values()
    )


def test_reference_is_the_base_model(results: Results, tiny_qwen2: str) -> None:
    frozen = engine(tiny_qwen2)
    assert torch.equal(
        results["reference"], frozen.forward(ragged_batch(), MicroBatching(size=3))["log_probs"]
    )


def test_adapters_are_enabled_again_after_a_reference_pass(tiny_qwen2: str) -> None:
    """The adapters are active again after the reference pass, also if it raises."""
    subject = engine(tiny_qwen2, train=True, lr=1e-2, **programs.LORA)
    subject.update(ragged_batch(), ALL, 1.0, programs.weighted_loss("token-mean"))
    before = subject.forward(ragged_batch(), ALL)["log_probs"]
    with pytest.raises(ZeroDivisionError), subject.without_adapters():
        raise ZeroDivisionError
    assert torch.equal(subject.forward(ragged_batch(), ALL)["log_probs"], before)
    caught = programs.catch_gradients(subject)
    subject.update(ragged_batch(), ALL, 1.0, programs.weighted_loss("token-mean"))
    assert len(caught) == 28 and all(gradient.any() for gradient in caught.values())


def test_lora_resume_is_exact(results: Results) -> None:
    assert results["again"] == results["history"][2:]
    assert results["resumed"].keys() == results["state"].keys()
    assert [
        name
        for name, value in results["state"].items()
        if not torch.equal(value, results["resumed"][name])
    ] == []


def test_lora_checkpoint_has_adapters_and_checks_the_base_model(
    results: Results, tiny_qwen2: str, tmp_path: Path
) -> None:
    names = [
        name
        for file in (results["folder"] / "checkpoint" / "shards").iterdir()
        for name in load_file(file)
    ]
    assert len(names) == 28 * 3 and all("lora_" in name for name in names)
    alone = engine(tiny_qwen2, **programs.LORA)  # as `verlite export` reads it
    alone.load(results["folder"] / "checkpoint")
    assert (
        alone.forward(ragged_batch(), ALL)["log_probs"] - results["reference"]
    ).abs().max() > 0.1
    with pytest.raises(ValueError, match="has adapters of another base model than model.path="):
        engine(tiny_model(tmp_path, "qwen2", seed=1), train=True, **programs.LORA).load(
            results["folder"] / "checkpoint"
        )


def test_lora_checkpoint_with_the_fingerprint_of_an_older_version_is_loaded(
    results: Results, tiny_qwen2: str, tmp_path: Path
) -> None:
    folder = shutil.copytree(results["folder"] / "checkpoint", tmp_path / "checkpoint")
    state = json.loads((folder / "state.json").read_text())
    state["schedule"]["frozen"] = state["schedule"].pop("frozen_weights") ^ 1
    (folder / "state.json").write_text(json.dumps(state))
    engine(tiny_qwen2, **programs.LORA).load(folder)


def test_lora_on_two_ranks_equals_one(
    results: Results, tiny_qwen2: str, two_ranks: Ranks, tmp_path: Path
) -> None:
    first, second = two_ranks.call(programs.lora_updates, tiny_qwen2, str(tmp_path))
    for name, value in results["gradients"][0].items():
        torch.testing.assert_close(first["gradients"][0][name], value, rtol=1e-4, atol=1e-6)
    for name, value in results["end"].items():
        assert torch.equal(first["end"][name], second["end"][name])
        assert (first["end"][name] - value).norm() <= 1e-3 * (value - results["start"][name]).norm()
    both = torch.cat([first["log_probs"], second["log_probs"]])
    torch.testing.assert_close(both, results["log_probs"], rtol=0, atol=1e-3)
    # The ranks' rows are other trees, whose products have other shapes: only rounding may differ.
    both = torch.cat([first["reference"], second["reference"]])
    torch.testing.assert_close(both, results["reference"], rtol=1e-6, atol=1e-6)
    assert first["fingerprints"] == second["fingerprints"]
    assert first["fingerprints"] == [
        fingerprint(first["weights"].items()),
        fingerprint(first["bf16"].items()),
    ]
    assert [again["again"] for again in (first, second)] == [
        straight["history"][2:] for straight in (first, second)
    ]


@pytest.mark.parametrize("ranks", [1, 2])
def test_base_and_adapters_apart_add_up_to_the_merged_weights(
    results: Results, tiny_qwen2: str, two_ranks: Ranks, tmp_path: Path, ranks: int
) -> None:
    """W + (s B) A with the exported W, A and s B, and the base model's own values and names."""
    found = results
    if ranks == 2:
        found = two_ranks.call(programs.lora_updates, tiny_qwen2, str(tmp_path))[0]
    base, adapters = found["parts"]["base"], found["parts"]["adapters"]
    file = load_file(f"{tiny_qwen2}/model.safetensors")
    assert base.keys() == file.keys() == found["weights"].keys()
    assert all(torch.equal(base[name], file[name]) for name in file)
    for part in ("base", "adapters"):
        assert found["part_fingerprints"][part] == fingerprint(found["parts"][part].items())
    changed = set()
    for name, weight in found["weights"].items():
        layer = name.removesuffix(".weight")
        if f"{layer}.lora_A.weight" in adapters:
            a, b = (adapters.pop(f"{layer}.lora_{key}.weight") for key in "AB")
            assert a.shape[0] == b.shape[1] == 4 and a.dtype == b.dtype == torch.float32
            changed.add(name)
            torch.testing.assert_close(weight, base[name] + b @ a, rtol=0, atol=1e-6)
        else:
            assert torch.equal(weight, base[name])
    assert len(changed) == 2 * 7 and not adapters
    assert all(not torch.equal(found["weights"][name], base[name]) for name in changed)


def test_adapters_are_exported_from_host_memory(
    tiny_qwen2: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sync of adapters alone does not bring the parameters back to the device."""
    monkeypatch.setattr("verlite.engine.offload._lock_pages", lambda memory, device: None)
    monkeypatch.setattr("verlite.engine.fsdp.has_own_memory", lambda device: True)
    subject = engine(tiny_qwen2, train=True, param_offload=True, **programs.LORA)
    expected = dict(subject.export(part="adapters"))
    subject.offload()
    assert subject._host_parameters.is_holding
    away = dict(subject.export(part="adapters"))
    assert away.keys() == expected.keys()
    assert all(torch.equal(away[name], expected[name]) for name in expected)
    assert subject.fingerprint(part="adapters") == fingerprint(expected.items())
    assert subject._host_parameters.is_holding


def test_lora_with_replicas_and_uneven_shapes(tmp_path: Path, two_ranks: Ranks) -> None:
    """Replicas (fsdp_size=1), and shapes that two ranks do not divide."""
    path = tiny_model(
        tmp_path / "odd",
        "qwen2",
        hidden_size=24,
        num_key_value_heads=1,
        intermediate_size=7,
        vocab_size=129,
    )
    for folder, program in (
        ("sharded", programs.lora_updates),
        ("replicas", programs.lora_updates_on_replicas),
    ):
        first, second = two_ranks.call(program, path, str(tmp_path / folder))
        assert (
            first["fingerprints"]
            == second["fingerprints"]
            == [fingerprint(first[k].items()) for k in ("weights", "bf16")]
        )
        merged = engine(str(tmp_path / folder / "hf")).forward(ragged_batch(), ALL)["log_probs"]
        assert (merged - torch.cat([first["log_probs"], second["log_probs"]])).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("arch", "settings"),
    [
        ("gpt2", {}),
        ("llama", {"tie_word_embeddings": True}),
        (
            "qwen2_moe",
            {
                "num_experts": 3,
                "moe_intermediate_size": 16,
                "shared_expert_intermediate_size": 16,
                "num_experts_per_tok": 2,
            },
        ),
    ],
    ids=lambda v: str(v)[:9],
)
def test_lora_on_other_layer_types(arch: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """Transposed linear layers, tied embeddings, and fused experts, which get no adapter."""
    path = tiny_model(tmp_path / "model", arch, **settings)
    subject = engine(path, train=True, lr=1e-2, **programs.LORA)
    before = subject.forward(ragged_batch(), ALL)["log_probs"]
    for _ in range(2):
        subject.update(ragged_batch(), ALL, 1.0, programs.weighted_loss("token-mean"))
    subject.save_pretrained(tmp_path / "out")
    after = subject.forward(ragged_batch(), ALL)["log_probs"]
    merged = engine(str(tmp_path / "out")).forward(ragged_batch(), ALL)["log_probs"]
    assert (after - before).abs().max() > 0.1 and (merged - after).abs().max() < 2e-5
    assert subject.fingerprint() == fingerprint(subject.export())
    assert (
        load_file(tmp_path / "out" / "model.safetensors").keys()
        == load_file(f"{path}/model.safetensors").keys()
    )


def test_saved_adapter_loads_in_peft_and_here(results: Results, tiny_qwen2: str) -> None:
    folder = results["folder"] / "hf" / "lora_adapter"
    theirs = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tiny_qwen2, dtype=torch.float64), folder
    ).double()
    log_probs, _ = naive_log_probs(theirs.eval(), ragged_batch())
    assert (log_probs - results["log_probs"]).abs().max() < 1e-4
    ours = engine(tiny_qwen2, train=True, lora_adapter_path=str(folder), lr=1e-2)
    assert torch.equal(
        ours.forward(ragged_batch(), MicroBatching(size=3))["log_probs"], results["log_probs"]
    )
    with ours.without_adapters():
        assert torch.equal(
            ours.forward(ragged_batch(), MicroBatching(size=3))["log_probs"], results["reference"]
        )


def test_mismatched_adapter_is_rejected(results: Results, tiny_qwen2: str, tmp_path: Path) -> None:
    folder = results["folder"] / "hf" / "lora_adapter"
    other = tiny_model(tmp_path / "other", "qwen2", intermediate_size=48)
    with pytest.raises(
        ModelError, match="another model's adapter: 6 weights differ, such as base_model"
    ):
        engine(other, lora_adapter_path=str(folder))
    for change, message in (
        ({"use_dora": True}, "has use_dora"),
        ({"modules_to_save": ["lm_head"]}, "has modules_to_save"),
        ({"bias": "all"}, "bias"),
    ):
        config = peft.LoraConfig.from_pretrained(folder)
        for name, value in change.items():
            setattr(config, name, value)
        config.save_pretrained(tmp_path / message)
        save_file({}, tmp_path / message / "adapter_model.safetensors")
        with pytest.raises(ModelError, match=f"{message}.*, which is not supported"):
            engine(tiny_qwen2, lora_adapter_path=str(tmp_path / message))


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["q_projj"], "cannot be adapted"),
        (["lm_head"], "lm_head is the output head"),
        (["embed_tokens"], "is not a linear layer"),
    ],
)
def test_unsupported_target_modules_are_rejected(
    tiny_qwen2: str, targets: list[str], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        engine(tiny_qwen2, lora_rank=2, target_modules=targets)


def test_target_modules_select_layers(tiny_qwen2: str) -> None:
    def adapted(**settings: Any) -> set[str]:
        named = engine(tiny_qwen2, lora_rank=2, **settings).model.model.named_parameters()
        return {name.split(".lora_")[0].split(".")[-1] for name, _ in named if "lora_" in name}

    assert adapted(target_modules=["q_proj", "v_proj"]) == {"q_proj", "v_proj"}
    assert adapted(target_modules=r".*\.mlp\..*_proj", exclude_modules=["up_proj"]) == {
        "gate_proj",
        "down_proj",
    }


def test_lora_value_model_trains_its_head(tiny_qwen2: str, tmp_path: Path) -> None:
    subject = engine(tiny_qwen2, train=True, head="value", lr=1e-2, **programs.LORA)
    start = {
        name: p.detach().full_tensor().clone() for name, p in subject.model.model.named_parameters()
    }
    for _ in range(3):
        subject.update(ragged_batch(), ALL, 1.0, programs.squared_error)
    moved = {
        name
        for name, p in subject.model.model.named_parameters()
        if not torch.equal(p.detach().full_tensor(), start[name])
    }
    assert moved == {name for name in start if "lora_" in name or name.startswith("score.")}
    values = subject.forward(ragged_batch(), ALL)["values"]
    subject.save_pretrained(tmp_path / "out")
    assert (
        engine(str(tmp_path / "out"), head="value").forward(ragged_batch(), ALL)["values"] - values
    ).abs().max() < 1e-5
    subject.save(tmp_path / "checkpoint")
    again = engine(tiny_qwen2, train=True, head="value", lr=1e-2, **programs.LORA)
    again.load(tmp_path / "checkpoint")
    assert torch.equal(again.forward(ragged_batch(), ALL)["values"], values)


def test_bfloat16_base_with_float32_adapters(tiny_qwen2: str) -> None:
    """Frozen weights are bfloat16, adapters float32, and merged weights are rounded once."""
    subject = engine(tiny_qwen2, train=True, lr=1e-2, model_dtype="bfloat16", **programs.LORA)
    for _ in range(2):
        subject.update(ragged_batch(), ALL, 1.0, programs.weighted_loss("token-mean"))
    named = {name: p.detach().full_tensor() for name, p in subject.model.model.named_parameters()}
    assert all(
        p.dtype == (torch.float32 if "lora_" in name else torch.bfloat16)
        for name, p in named.items()
    )
    prefix = "model.layers.0.mlp.up_proj"
    a, b = (named[f"{prefix}.lora_{x}.default.weight"] for x in "AB")
    expected = named[f"{prefix}.base_layer.weight"].float() + 3 * b @ a
    whole = dict(subject.export(torch.float32))
    half = dict(subject.export())
    torch.testing.assert_close(whole[f"{prefix}.weight"], expected, rtol=1e-6, atol=1e-7)
    assert torch.equal(half[f"{prefix}.weight"], whole[f"{prefix}.weight"].bfloat16())
    assert subject.fingerprint() == fingerprint(half.items()) and all(
        w.dtype == torch.bfloat16 for w in half.values()
    )
