"""Counts of a model, against sums by hand and published parameter counts."""

import pytest

from tests.sizing.conftest import config_folder
from verlite.engine.folder import ModelError
from verlite.sizing.facts import model_facts
from verlite.spec.roles import ModelSpec


def test_half_billion_by_hand(tmp_path):
    facts = model_facts(ModelSpec(path=str(config_folder(tmp_path, "qwen2.5-0.5b"))))
    h, mlp, layers = 896, 4864, 24
    attention = h * h + h + 2 * (h * 128 + 128) + h * h  # q and its bias, k, v, o
    assert facts.kinds == {
        "MLP": layers * 3 * h * mlp,
        "embedding": 151936 * h,
        "attention": layers * attention,
        "norm": (2 * layers + 1) * h,
    }
    assert facts.parameters == facts.trained == facts.exported == 494_032_768  # as published
    # Every matrix once, and the output head although it is the embedding table.
    matrices = layers * (2 * h * h + 2 * h * 128 + 3 * h * mlp) + 151936 * h
    assert facts.matmul == matrices
    assert facts.kv_bytes("bfloat16") == 2 * layers * 2 * 64 * 2 == 12288
    # A token attends to itself and those before it: 1 of 1, then 1.5 of 2 on average. Each costs
    # 2 x 64 operations a head for its score, and as many for its value.
    pair = layers * 14 * 2 * (2 * 64)
    assert facts.forward_flops(1) == 2 * matrices + pair
    assert facts.forward_flops(2) == 2 * matrices + 1.5 * pair
    assert facts.update_flops(2, recomputes=False) == 3 * facts.forward_flops(2)
    assert facts.update_flops(2, recomputes=True) == 4 * facts.forward_flops(2)
    assert facts.update_flops(2, recomputes="attention") == 8 * matrices + 4.5 * pair
    assert facts.update_flops(2, recomputes="products") == 3 * facts.forward_flops(2)


def test_seven_billion_as_published(tmp_path):
    model = ModelSpec(path=str(config_folder(tmp_path, "qwen2.5-7b")))
    facts = model_facts(model)
    assert facts.parameters == 7_615_616_512
    assert facts.parameters - facts.kinds["embedding"] - facts.kinds["output head"] == 6_525_621_760
    # The embedding table, biases (q 3584, k and v 512 each) and norms multiply nothing.
    small = 28 * (3584 + 2 * 512) + 57 * 3584
    assert facts.matmul == facts.parameters - 152064 * 3584 - small
    assert facts.kv_bytes("bfloat16") == 57344
    critic = model_facts(model, "value")
    assert critic.parameters == facts.parameters - 152064 * 3584 + 3584 + 1


def test_lora_trains_its_adapters_and_exports_the_model(tmp_path):
    folder = str(config_folder(tmp_path, "tiny"))
    whole = model_facts(ModelSpec(path=folder))
    facts = model_facts(ModelSpec(path=folder, lora_rank=4))
    sides = [(64, 64), (64, 32), (64, 32), (64, 64), (64, 96), (64, 96), (96, 64)]
    assert facts.trained == 8 * sum(4 * (a + b) for a, b in sides) == facts.kinds["adapters"]
    assert facts.exported == whole.exported == whole.parameters


def test_experts_count_as_often_as_a_token_visits_them(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"model_type": "qwen3_moe", "vocab_size": 100, "hidden_size": 32, "head_dim": 8,'
        ' "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,'
        ' "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16,'
        ' "tie_word_embeddings": false}'
    )
    facts = model_facts(ModelSpec(path=str(tmp_path)))
    attention = 2 * 32 * 32 + 2 * 32 * 16
    router = 32 * 8
    assert facts.matmul == 2 * (attention + router + 2 * 3 * 32 * 16) + 100 * 32
    assert facts.kinds["MLP"] == 2 * (router + 8 * 3 * 32 * 16)


def test_a_folder_without_config_is_named(tmp_path):
    with pytest.raises(
        ModelError, match=f"model.path={tmp_path} is not a folder with a config.json"
    ):
        model_facts(ModelSpec(path=str(tmp_path)))
