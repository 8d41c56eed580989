"""Every family of text models in transformers, as small models, and what verlite does with each."""

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.engine.batches import engine
from tests.models import tiny_tokenizer
from verlite.engine.micro import MicroBatching
from verlite.protocol.data import DataProto
from verlite.rollout.engines.hf import HFCore
from verlite.rollout.types import EngineOptions, Sampling
from verlite.small_model import small_config, small_model
from verlite.spec.roles import GenerationSpec, ModelSpec

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
_FACTORS = {"short_factor": [1.0] * 64, "long_factor": [4.0] * 64}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": (
        "deepseek_v2",
        {
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 1408,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "dots1": ("dots1", {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2}),
    "falcon_alibi": ("falcon", {"alibi": True, "hidden_size": 512, "num_attention_heads": 8}),
    "falcon": ("falcon", {"hidden_size": 512, "num_attention_heads": 8}),
    "gemma2_without_the_final_cap": ("gemma2", {"final_logit_softcapping": None}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {"head_dim": 64}),
    "hunyuan_v1_moe": (
        "hunyuan_v1_moe",
        {"head_dim": 64, "num_experts": 4, "moe_topk": 2, "use_mixed_mlp_moe": False},
    ),
    "lfm2_convolutions": ("lfm2", {"full_attn_idxs": [2, 5, 8, 10, 12, 14]}),
    "lfm2_moe": (
        "lfm2_moe",
        {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2},
    ),
    "llama_dynamic_ntk": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "llama_yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 1024,
            }
        },
    ),
    "ministral": ("ministral", {"head_dim": 128}),
    "nemotron": ("nemotron", {"head_dim": 128, "num_key_value_heads": 8}),
    "phi3_longrope": (
        "phi3",
        {
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "original_max_position_embeddings": 4096,
            "max_position_embeddings": 131072,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "original_max_position_embeddings": 4096,
                **_FACTORS,
            },
        },
    ),
    "phimoe_window": ("phimoe", {"sliding_window": 2047}),
    "qwen2_window": ("qwen2", {"use_sliding_window": True, "max_window_layers": 14}),
    "qwen2_moe_window": ("qwen2_moe", {"use_sliding_window": True, "max_window_layers": 12}),
    "qwen3_window": ("qwen3", {"use_sliding_window": True, "max_window_layers": 14}),
}
"""Settings without which a family does not run, and windows and embeddings that are off by
default."""


def names() -> list[str]:
    """Return transformers' decoder-only text models, by their own list, and the variants."""
    found = []
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        kind = CONFIG_MAPPING[name]
        is_text = not kind.sub_configs or name in ("dbrx", "mpt")
        fields = getattr(kind, "__dataclass_fields__", {})
        names = {"type_vocab_size", "decoder_layers", "encoder_layers", "num_encoder_layers"}
        is_encoder = bool(names & fields.keys())
        if is_text and not is_encoder and name not in VARIANTS:
            found.append(name)
    return sorted([*found, *VARIANTS])


def family_config(name: str) -> PretrainedConfig | None:
    """Return the configuration of a small model; None if transformers cannot run one."""
    kind, settings = VARIANTS.get(name, (name, {}))
    try:
        return small_config(AutoConfig.for_model(kind, **settings))
    except Exception:  # some configurations have no defaults
        return None


def outcome(name: str, folder: Path) -> str:
    """Return what verlite does with a family: packed and padded "equal" or the refusal; the hf
    engine "cached", "recomputed" or the refusal. Everything that is not refused is compared with
    the untouched model."""
    config = family_config(name)
    if config is None:
        return "transformers cannot run a small one"
    model = small_model(config, attn_implementation="eager")
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder / "tokenizer")
    reference = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()
    longest = _positions(config)
    return "; ".join(
        [
            "packed " + _trained(folder, reference, longest, True),
            "padded " + _trained(folder, reference, longest, False),
            "hf " + _generated(folder, reference, longest),
        ]
    )


def _positions(config: PretrainedConfig) -> int:
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        return int(rope["original_max_position_embeddings"])
    return 40


def _batch(longest: int) -> DataProto:
    """Return three rows of other lengths; a prompt of up to 7 tokens, the rest is a response."""
    lengths = [longest, longest * 5 // 8, longest * 3 // 4]
    width = longest - 5
    generator = torch.Generator().manual_seed(1)
    mask = torch.zeros(3, 7 + width, dtype=torch.int64)
    for row, length in enumerate(lengths):
        mask[row, 7 - 5 : 7 - 5 + length] = 1
    ids = torch.randint(4, 128, mask.shape, generator=generator).masked_fill(mask == 0, 0)
    return DataProto.from_dict(
        {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
            "response_mask": mask[:, 7:].clone(),
        }
    )


def _expected(model: Any, batch: DataProto) -> Tensor:
    rows = []
    width = batch.batch["response_mask"].shape[1]
    for row in batch.batch:
        ids = row["input_ids"][row["attention_mask"].bool()]
        log_probs = model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
        chosen = log_probs[4:-1].gather(1, ids[5:, None]).squeeze(1)
        rows.append(torch.nn.functional.pad(chosen, (0, width - len(chosen))))
    return torch.stack(rows) * batch.batch["response_mask"]


def _trained(
    folder: Path, reference: Any, longest: int, packed: bool, checkpointing: bool = True
) -> str:
    """Compare log-probs and the gradient of their sum with the untouched model's."""
    batch = _batch(longest)
    options = {"use_remove_padding": packed, "enable_gradient_checkpointing": checkpointing}
    try:
        subject = engine(str(folder), train=True, **options)
    except ValueError as error:
        found = f"refused ({_reason(error, folder)})"
        if not packed and "enable_gradient_checkpointing=True" in found:
            found += "; without checkpointing "
            found += _trained(folder, reference, longest, packed, checkpointing=False)
        return found
    expected = _expected(reference, batch)
    reference.zero_grad()
    expected.sum().backward()
    actual = subject.forward(batch, MicroBatching(size=3))["log_probs"]
    gap = float((actual - expected).abs().max().detach())
    if not gap < 2e-3:
        return f"DIFFERS by {gap:.2g}"
    gradients: dict[str, Tensor] = {}

    def keep() -> float:
        for name, parameter in subject.model.model.named_parameters():
            if parameter.grad is not None:
                gradients[name] = parameter.grad.full_tensor().clone()
        return 0.0

    subject._clip = keep  # type: ignore[method-assign]
    subject.update(
        batch, MicroBatching(size=3), 1.0, lambda rows, out, counts: (out["log_probs"].sum(), {})
    )
    wanted = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    scale = max(float(g.abs().max()) for g in wanted.values())
    for name in wanted.keys() | gradients.keys():
        zero = torch.zeros_like(wanted.get(name, gradients.get(name)))
        off = float((gradients.get(name, zero) - wanted.get(name, zero)).abs().max()) / scale
        if not off < 2e-3:
            return f"DIFFERS in the gradient of {name} by {off:.2g}"
    return "equal"


def _generated(folder: Path, reference: Any, longest: int) -> str:
    """Compare the log-probs of sampled tokens with those of the untouched model."""
    options = EngineOptions(
        ModelSpec(path=str(folder), tokenizer_path=str(folder / "tokenizer")),
        GenerationSpec(max_num_seqs=3),
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_model_len=longest,
        seed=0,
        pretrained=True,
    )
    try:
        core = HFCore(options)
    except ValueError as error:
        return f"refused ({_reason(error, folder)})"
    batch = _batch(longest - 6).batch
    prompts = [row["input_ids"][row["attention_mask"].bool()].tolist() for row in batch]
    for number, prompt in enumerate(prompts):
        core.add(number, prompt, Sampling(max_tokens=6, ignore_eos=True))
    worst = 0.0
    while core.pending():
        for done in core.step():
            prompt = prompts[done.request_id]
            ids = torch.tensor([*prompt, *done.ids])
            with torch.no_grad():
                logits = reference(input_ids=ids[None], use_cache=False).logits[0]
            rows = logits[len(prompt) - 1 : -1].log_softmax(-1)
            expected = rows.gather(1, ids[len(prompt) :, None]).squeeze(1)
            gap = (torch.tensor(done.log_probs) - expected).abs().max()
            worst = max(worst, float(gap.nan_to_num(torch.inf)))
    if not worst < 2e-3:
        return f"DIFFERS by {worst:.2g}"
    return "cached" if core._is_caching else "recomputed"


def _reason(error: Exception, folder: Path) -> str:
    text = " ".join(str(error).replace(str(folder), "FOLDER").split())
    return re.sub(r"(by|at least) [0-9]([0-9.e+-]*[0-9])?", r"\1 X", text)


INTRO = """# Models

verlite trains any causal language model of transformers whose numbers it can prove. When a model
is loaded, a small copy of it (few and narrow layers, short windows, chunks and position
thresholds) runs sequences that are longer than all of them, packed or padded as configured, with
gradients. Its reference is transformers' own, untouched model with eager attention, one sequence
alone. The hf engine does the same with its cache. If the numbers differ, the model is refused,
and the message says what to change. So architectures that are not on this page are proven or
refused, too. If no small copy can be built, a warning says so. A model that differs only where
samples share their prompt (`model.share_prefixes`) computes each sample alone, and a warning
says so.

Models whose rotary embedding changes with the longest sequence of a pass (`rope_type` `longrope`
or `dynamic`) are limited to the length up to which it does not: beyond it a sequence would have
other log-probs alone than beside a longer one.

The lists are those of a test (`tests/engine/test_families.py`) with transformers {version}. A
name is the `model_type` of config.json, or it with a variant. vLLM has its own list of models;
the log-prob gap and the probe compare it with training.
"""


def page(table: dict[str, str]) -> str:
    """Return docs/models.md."""
    packed, padded, refused, unknown = [], [], [], []
    for name, found in table.items():
        if "packed equal" in found:
            packed.append(name)
        elif "padded equal" in found:
            padded.append(name)
        elif "refused" in found:
            why = found.split("padded refused (")[1].split("); hf ")[0].split("); without")[0]
            why = why.split("cannot be trained: ")[-1].replace(" by X on a small copy", "")
            refused.append((name, why.split(". Use a model of another")[0]))
        else:
            unknown.append(name)
    slow = [name for name, found in table.items() if found.endswith("hf recomputed")]
    rows = "".join(f"| `{name}` | {why} |\n" for name, why in refused)
    return (
        INTRO.format(version=transformers.__version__)
        + f"\n**Packed and padded** ({len(packed)}): {_names(packed)}.\n"
        + f"\n**With `model.use_remove_padding=False` only** ({len(padded)}): {_names(padded)}.\n"
        + f"\n**Not trained** ({len(refused)}), with what a padded start says:\n\n"
        + f"| model_type | why |\n|---|---|\n{rows}"
        + f"\n**Generated by the hf engine without a cache**, which is slow: {_names(slow)}.\n"
        + f"\n**Not tried**, because transformers' defaults do not run: {_names(unknown)}.\n"
    )


def _names(found: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in found)


def main() -> None:
    """Write families.json and docs/models.md."""
    with tempfile.TemporaryDirectory() as folder:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{folder}/r", rank=0, world_size=1)
        table = {name: outcome(name, Path(folder, name)) for name in names()}
        dist.destroy_process_group()
    file = Path(__file__).with_name("families.json")
    file.write_text(json.dumps(table, indent=1) + "\n")
    PAGE.write_text(page(table))


if __name__ == "__main__":
    main()
