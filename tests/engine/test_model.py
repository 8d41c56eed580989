"""Loading of models: errors, supported architectures and the self-check."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine import programs
from tests.engine.batches import engine
from tests.engine.ranks import Ranks
from tests.models import tiny_model, tiny_tokenizer
from verlite.engine import model
from verlite.engine.folder import ModelError, load_config, load_tokenizer
from verlite.engine.fsdp import NonFiniteError
from verlite.spec.roles import ModelSpec


def test_path_without_a_model(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "nowhere", tmp_path / "empty"):
        with pytest.raises(ValueError, match="model.path=.*is not a model"):
            engine(str(path))
        with pytest.raises(ValueError, match="model.path=.*has no tokenizer"):
            load_tokenizer(ModelSpec(path=str(path)))


@pytest.mark.parametrize("token", ["<eos>", "<tool_call>"])
def test_a_tokenizer_without_its_vocabulary(tmp_path: Path, token: str) -> None:
    """What is left when only tokenizer_config.json was copied: added tokens, special or not."""
    added = {"content": token, "special": token == "<eos>"}
    settings = {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": {"5": added}}
    settings |= {"eos_token": "<eos>", "pad_token": "<pad>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(ModelError, match="its vocabulary is empty"):
        load_tokenizer(ModelSpec(path=str(tmp_path)))


def test_a_small_vocabulary_with_many_special_tokens(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    own = len(tokenizer) - len(tokenizer.get_added_vocab())
    tokenizer.add_special_tokens({"extra_special_tokens": [f"<{i}>" for i in range(own + 1)]})
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    assert len(load_tokenizer(ModelSpec(path=str(tmp_path)))) == len(tokenizer)


class RunsCode:
    """An object whose unpickling creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_hostile_model_folders_run_no_code_and_are_refused(tiny_qwen2: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    code = f"open({str(mark)!r}, 'w')\nclass X: pass\n"
    config = json.loads(Path(tiny_qwen2, "config.json").read_text())
    auto_map = {"AutoConfig": "x.X", "AutoModelForCausalLM": "x.X", "AutoTokenizer": ["x.X", None]}
    weights = Path(tiny_qwen2, "model.safetensors").read_bytes()
    cases: dict[str, dict[str, bytes | None]] = {
        "code": {
            "x.py": code.encode(),
            "config.json": json.dumps({**config, "auto_map": auto_map, "model_type": "x"}).encode(),
        },
        "pickle": {"model.safetensors": None, "pytorch_model.bin": b""},
        "huge header": {"model.safetensors": (1 << 60).to_bytes(8, "little") + weights[8:]},
        "cut": {"model.safetensors": weights[: len(weights) // 2]},
        "an index that is a list": {
            "model.safetensors": None,
            "model.safetensors.index.json": b"[]",
        },
        "a config that is a number": {"config.json": b"12"},
        "a nested config": {"config.json": b"[" * 100_000},
        "an empty list of keys": {"config.json": b"{}"},
        "a size that is text": {"config.json": json.dumps({**config, "hidden_size": "x"}).encode()},
        "no heads": {"config.json": json.dumps({**config, "num_attention_heads": 0}).encode()},
        "a huge vocabulary": {"config.json": json.dumps({**config, "vocab_size": 10**12}).encode()},
        "a tokenizer that is a list": {"tokenizer.json": b"[]"},
        "an empty tokenizer": {"tokenizer.json": b"{}"},
        "a tokenizer's config that is a list": {"tokenizer_config.json": b"[]"},
    }
    for name, files in cases.items():
        folder = Path(shutil.copytree(tiny_qwen2, tmp_path / name))
        for file, content in files.items():
            if content is None:
                (folder / file).unlink()
            else:
                (folder / file).write_bytes(content)
        if name == "pickle":
            torch.save({"w": RunsCode(mark)}, folder / "pytorch_model.bin")
        hostile = ModelSpec(path=str(folder))
        with pytest.raises(ModelError, match=re.escape(f"model.path={folder}")) as caught:
            load_tokenizer(hostile)
            model.load_model(hostile, "lm", torch.float32)
        assert not mark.exists(), name
        if name == "pickle":
            assert "Use a model in safetensors" in str(caught.value)
    known = Path(shutil.copytree(tiny_qwen2, tmp_path / "known"))
    (known / "x.py").write_text(code)
    (known / "config.json").write_text(json.dumps({**config, "auto_map": auto_map}))
    model.load_model(ModelSpec(path=str(known)), "lm", torch.float32)
    assert not mark.exists()


def test_override_config(tiny_qwen2: str) -> None:
    assert (
        load_config(ModelSpec(path=tiny_qwen2, override_config={"rms_norm_eps": 1e-3})).rms_norm_eps
        == 1e-3
    )
    with pytest.raises(ValueError, match="override_config.rms_norm is not a value of Qwen2Config"):
        load_config(ModelSpec(path=tiny_qwen2, override_config={"rms_norm": 1e-3}))


def test_tokenizer(tiny_qwen2: str) -> None:
    assert load_tokenizer(ModelSpec(path=tiny_qwen2)).pad_token_id == 0
    tokenizer = load_tokenizer(
        ModelSpec(path=tiny_qwen2, custom_chat_template="{{ messages[0]['content'] }}!")
    )
    assert (
        tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False) == "Hi!"
    )


def test_missing_and_infinite_weights(tiny_qwen2: str, tmp_path: Path) -> None:
    """transformers would fill missing weights with random numbers and only warn."""
    path = tiny_model(tmp_path, "qwen2")
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    lost = weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(
        ValueError, match="lacks 1 weights of its model, such as model.layers.1.mlp.up_proj.weight"
    ):
        engine(path)
    with pytest.raises(ValueError, match="lacks 1 weights"):
        engine(path, head="value")
    lost[0, 0] = float("inf")
    save_file(weights | {"model.layers.1.mlp.up_proj.weight": lost}, file, {"format": "pt"})
    with pytest.raises(NonFiniteError, match="refusing model.path=.*up_proj"):
        engine(path)


@pytest.mark.process
@pytest.mark.parametrize("head", ["lm", "value"])
def test_only_rank_0_reads_the_checkpoint(
    tiny_llama: str, tmp_path: Path, two_ranks: Ranks, head: str
) -> None:
    """Rank 1 reads only the config. If rank 0 cannot load the weights, all ranks raise."""
    shutil.copy(f"{tiny_llama}/config.json", tmp_path)
    expected = engine(tiny_llama, head=head).fingerprint()
    assert two_ranks.call(programs.build, [tiny_llama, str(tmp_path)], head) == [expected, expected]
    broken = two_ranks.call(programs.build, [str(tmp_path), tiny_llama], head)
    assert broken[0] == broken[1] and "cannot be loaded" in broken[0]
    assert two_ranks.call(programs.reads, tiny_llama, head) == [1, 0]


@pytest.mark.parametrize(
    ("arch", "settings", "message"),
    [
        ("gemma2", {"head_dim": 8}, "caps its logits"),
        ("phi", {}, "bias on its output embedding"),
        ("falcon", {}, "its own attention code.*use_remove_padding=False"),
        ("bloom", {}, "its own attention code.*use_remove_padding=False"),
        (
            "qwen3_next",
            {"num_experts": 4, "num_experts_per_tok": 2},
            "layers of type linear_attention.*use_remove_padding=False",
        ),
        ("nemotron", {}, "did not receive the packing layout.*use_remove_padding=False"),
    ],
)
def test_unsupported_architectures_are_rejected(
    arch: str, settings: dict, message: str, tmp_path: Path
) -> None:
    path = tiny_model(tmp_path, arch, **settings)
    with pytest.raises((ValueError, NotImplementedError), match=message):
        engine(path)
    if "use_remove_padding" in message:
        engine(path, use_remove_padding=False)


@pytest.mark.parametrize("arch", ["granite", "cohere", "mistral", "qwen3", "phi3", "gpt_neox"])
def test_architectures_pass_the_self_check(arch: str, tmp_path: Path) -> None:
    """Scaled logits, sliding windows, head norms, fused projections pass the self-check."""
    settings = {
        "granite": {"logits_scaling": 7.0},
        "cohere": {"logit_scale": 0.3},
        "mistral": {"sliding_window": 3},
        "qwen3": {"head_dim": 8},
    }
    engine(tiny_model(tmp_path, arch, **settings.get(arch, {})))


def test_self_check_detects_an_unknown_logit_scale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model scales its logits by a config value that the engine does not know."""
    monkeypatch.setattr(model, "logit_scale", lambda config: 1.0)
    with pytest.raises(ValueError, match="differ from those of the model's own forward pass"):
        engine(tiny_model(tmp_path, "cohere", logit_scale=0.3))


def test_model_dtype_and_compute_dtype(tiny_qwen2: str) -> None:
    subject = engine(tiny_qwen2, dtype="bfloat16")
    assert {p.dtype for p in subject.parameters} == {torch.float32}
    halved = engine(tiny_qwen2, model_dtype="bfloat16")
    assert {p.dtype for p in halved.parameters} == {torch.bfloat16}
