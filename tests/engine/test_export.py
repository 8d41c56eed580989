"""Weights out of the engine: whole, under the names that transformers and vLLM load."""

import json
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from tests.engine import programs
from tests.engine.batches import engine, ragged_batch
from tests.engine.ranks import Ranks
from tests.models import tiny_model
from verlite.engine import export
from verlite.engine.folder import load_tokenizer
from verlite.engine.micro import MicroBatching
from verlite.weights.fingerprint import fingerprint

pytestmark = pytest.mark.process

MOE = {
    "num_experts": 3,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts_per_tok": 2,
}


def assert_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


@pytest.mark.parametrize(
    ("arch", "settings"),
    [("qwen2", {}), ("llama", {"tie_word_embeddings": True}), ("gpt2", {}), ("qwen2_moe", MOE)],
    ids=lambda v: str(v)[:9],
)
def test_export_equals_the_original_file(
    arch: str, settings: dict, tmp_path: Path, two_ranks: Ranks
) -> None:
    """Names and values equal the file's, also for tied, transposed and fused expert weights."""
    path = tiny_model(tmp_path / "model", arch, **settings)
    file = load_file(f"{path}/model.safetensors")
    ones = [programs.export(path, str(tmp_path / "one"))]
    for exported in ones + two_ranks.call(programs.export, path, str(tmp_path / "two")):
        assert_equal(exported["weights"], file)
        assert exported["fingerprint"] == fingerprint(file.items())
        assert exported["bf16"] == fingerprint(file.items(), torch.bfloat16)
    for folder in ("one", "two"):
        assert_equal(load_file(tmp_path / folder / "model.safetensors"), file)


def test_replicas_are_exported_and_saved_once(
    tiny_llama: str, tmp_path: Path, two_ranks: Ranks
) -> None:
    """With fsdp_size=1 every rank has all weights. Files and fingerprint are as on one rank."""
    file = load_file(f"{tiny_llama}/model.safetensors")
    for exported in two_ranks.call(programs.export_replicas, tiny_llama, str(tmp_path)):
        assert_equal(exported["weights"], file)
        assert exported["fingerprint"] == fingerprint(file.items())
    restored = engine(tiny_llama)
    restored.load(tmp_path / "checkpoint")
    assert restored.fingerprint() == fingerprint(file.items())
    assert sum(
        len(load_file(shard)) for shard in (tmp_path / "checkpoint" / "shards").iterdir()
    ) == len(file)


def test_a_full_disk_on_the_writing_rank_does_not_keep_the_others_waiting(
    tiny_llama: str, tmp_path: Path, two_ranks: Ranks
) -> None:
    raised = two_ranks.call(programs.export_to_a_full_disk, tiny_llama, str(tmp_path / "out"))
    assert raised == ["OSError", "nothing"]


def test_saved_folder_loads_with_transformers(tmp_path: Path) -> None:
    """Tokenizer, generation config, and the original config, including its dropout."""
    path = tiny_model(tmp_path / "model", "gpt2", resid_pdrop=0.25)
    subject = engine(path, train=True, lr=1e-2)
    subject.update(ragged_batch(), MicroBatching(size=8), 1.0, programs.weighted_loss("token-mean"))
    subject.save_pretrained(tmp_path / "out", tokenizer=load_tokenizer(subject.model_config))
    before, after = (
        json.loads((folder / "config.json").read_text())
        for folder in (Path(path), tmp_path / "out")
    )
    assert before == after and after["resid_pdrop"] == 0.25
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert_equal(dict(reloaded.named_parameters()), dict(subject.export()))
    assert reloaded.generation_config.eos_token_id == 1
    assert AutoTokenizer.from_pretrained(tmp_path / "out").decode([45, 74]) == "He"


def test_dtype_and_shards(tiny_qwen2: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "SHARD_BYTES", 20_000)
    subject = engine(tiny_qwen2)
    subject.save_pretrained(tmp_path, dtype=torch.bfloat16)
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 1 and not list(
        tmp_path.glob("*.tmp")
    )
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert reloaded.dtype == torch.bfloat16
    assert_equal(
        dict(reloaded.named_parameters()),
        {name: tensor.bfloat16() for name, tensor in subject.export()},
    )
    assert all(tensor.dtype == torch.bfloat16 for _, tensor in subject.export(torch.bfloat16))
    assert (
        subject.fingerprint(torch.bfloat16)
        == fingerprint(subject.export(torch.bfloat16))
        != subject.fingerprint()
    )


def test_value_model_is_saved_and_loaded(tmp_path: Path) -> None:
    """Also for an architecture without a token classification class in transformers."""
    for arch, known in (("qwen2", True), ("olmo2", False)):
        folder = tmp_path / arch
        path = tiny_model(folder / "model", arch)
        subject = engine(path, train=True, head="value", lr=1e-2)
        subject.update(ragged_batch(), MicroBatching(size=8), 1.0, programs.squared_error)
        subject.save_pretrained(folder / "out")
        values = subject.forward(ragged_batch(), MicroBatching(size=8))["values"]
        assert values.any()
        again = engine(str(folder / "out"), head="value")
        assert torch.equal(again.forward(ragged_batch(), MicroBatching(size=8))["values"], values)
        assert json.loads((folder / "out" / "config.json").read_text())["architectures"] == [
            f"{arch.capitalize()}ForTokenClassification"
        ]
        if known:
            assert AutoModelForTokenClassification.from_pretrained(folder / "out").num_labels == 1


def test_export_keeps_one_layer_in_memory_and_is_a_snapshot(tmp_path: Path) -> None:
    subject = engine(tiny_model(tmp_path, "qwen2", num_hidden_layers=6), train=True, lr=1e-2)
    seen = []
    alive = []
    for _, tensor in subject.export():
        seen.append(weakref.ref(tensor))
        alive.append(sum(reference() is not None for reference in seen))
    assert (
        max(alive)
        <= len(list(subject.model.model.base_model.layers[0].parameters())) + 1
        < len(seen) / 4
    )
    snapshot = dict(subject.export())
    copies = {name: tensor.clone() for name, tensor in snapshot.items()}
    subject.update(ragged_batch(), MicroBatching(size=8), 1.0, programs.weighted_loss("token-mean"))
    assert_equal(snapshot, copies)
    assert not torch.equal(dict(subject.export())["model.norm.weight"], copies["model.norm.weight"])
