"""Loading: every weight and table equals transformers' own, and nothing is copied on the way."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tests.engine import programs
from tests.engine.batches import engine
from tests.engine.ranks import Ranks
from tests.models import tiny_model
from verlite.engine import loading
from verlite.engine.lora import initial_weights
from verlite.engine.model import checkpoint_dtype, load_model
from verlite.spec.roles import ModelSpec

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen2": {"tie_word_embeddings": True},
    "mixtral": {"num_local_experts": 4},  # transformers fuses the experts in memory
    "gemma3_text": {"head_dim": 8},  # a table whose value depends on the dtype
    "deepseek_v3": {  # a buffer that stays float32
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
    },
}


def halve(folder: str) -> None:
    """Round the weights of a model folder to bfloat16."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.save_pretrained(folder)


def tensors(model: nn.Module) -> dict[str, Tensor]:
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return {name: getattr(t.detach(), "full_tensor", t.detach)() for name, t in named}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_weights_and_tables_equal_from_pretrained(arch: str, dtype: str, tmp_path: Path) -> None:
    """The checkpoint is in bfloat16, the model in `dtype`: values and dtypes are transformers'."""
    path = tiny_model(tmp_path, arch, **ARCHITECTURES[arch])
    halve(path)
    expected = tensors(AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)))
    actual = tensors(engine(path, model_dtype=dtype).model.model)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype, name
        assert torch.equal(actual[name], value), name


def test_the_checkpoint_is_mapped_and_the_model_has_no_memory(tiny_qwen2: str) -> None:
    """What rank 0 reads are views of the file, and the model to shard is on the meta device."""
    model, weights = loading.read_on_rank_zero(ModelSpec(path=tiny_qwen2), "lm", torch.bfloat16)
    assert all(parameter.is_meta for parameter in model.parameters())
    maps = Path("/proc/self/maps").read_text().splitlines()
    mapped = [line.split()[0].split("-") for line in maps if line.endswith(".safetensors")]
    ranges = [(int(start, 16), int(end, 16)) for start, end in mapped]
    for name, weight in weights.tensors.items():
        address = weight.data_ptr()
        assert any(start <= address < end for start, end in ranges), name


def test_checkpoint_dtype_rounds_nothing(tmp_path: Path) -> None:
    def write(**dtypes: torch.dtype) -> str:
        folder = tmp_path / "-".join(str(dtype) for dtype in dtypes.values())
        folder.mkdir()
        values = {name: torch.ones(2).to(dtype) for name, dtype in dtypes.items()}
        save_file(values, folder / "model.safetensors")
        return str(folder)

    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    assert checkpoint_dtype(write(a=bf16, b=torch.int64)) == bf16
    assert checkpoint_dtype(write(a=bf16, b=fp32)) == fp32
    assert checkpoint_dtype(write(a=bf16, b=fp16)) == fp32
    assert checkpoint_dtype(write(a=bf16, b=torch.float8_e4m3fn)) is None
    assert checkpoint_dtype(str(tmp_path)) is None


def test_checkpoint_in_torch_format(tiny_qwen2: str, tmp_path: Path) -> None:
    """Without safetensors the model is read as a whole, with the same result."""
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen2)
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    assert engine(str(tmp_path)).fingerprint() == engine(tiny_qwen2).fingerprint()


@pytest.mark.process
@pytest.mark.process
def test_different_values_of_tied_weights_stay_different(tmp_path: Path, two_ranks: Ranks) -> None:
    """config.json ties head and embeddings, but the checkpoint has two. Like transformers, every
    rank keeps both."""
    path = tiny_model(tmp_path, "qwen2", tie_word_embeddings=True)
    file = f"{path}/model.safetensors"
    weights = load_file(file)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] * 2
    save_file(weights, file, {"format": "pt"})
    one = engine(path)
    actual = tensors(one.model.model)
    assert torch.equal(actual["lm_head.weight"], weights["lm_head.weight"])
    assert torch.equal(actual["model.embed_tokens.weight"], weights["model.embed_tokens.weight"])
    expected = one.fingerprint()
    assert two_ranks.call(programs.build, [path, path], "lm") == [expected, expected]


@pytest.mark.process
def test_every_rank_refuses_another_model_of_one_rank(
    tiny_qwen2: str, tiny_llama: str, two_ranks: Ranks
) -> None:
    refusals = two_ranks.call(programs.build, [tiny_qwen2, tiny_llama], "lm")
    assert all("has another model on rank 1 than on rank 0" in str(r) for r in refusals)


def test_a_seed_gives_the_adapters_that_peft_gives(tiny_qwen2: str) -> None:
    config = ModelSpec(path=tiny_qwen2, lora_rank=4)
    torch.manual_seed(3)
    adapted, weights = loading.read_on_rank_zero(config, "lm", torch.float32)
    drawn = {name: weights.tensors[name] for name in initial_weights(adapted, config)}
    peft = pytest.importorskip("peft")
    model = load_model(config, "lm")
    settings = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    torch.manual_seed(3)
    peft.inject_adapter_in_model(settings, model)
    expected = {name: p for name, p in model.named_parameters() if "lora_" in name}
    assert drawn.keys() == expected.keys()
    assert all(torch.equal(drawn[name], value) for name, value in expected.items())
