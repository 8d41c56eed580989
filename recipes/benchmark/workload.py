"""The workloads for comparing whole steps with other frameworks: models with random weights,
prompts and a reward.

w25: a Qwen2 of 25.2M parameters, 16 prompts x 8 samples a step, up to 128 new tokens. Dominated by
    compute.
wtiny: a Qwen2 of 0.3M parameters, 64 prompts x 8 samples a step, up to 64 new tokens. Dominated by
    the framework's overhead.
w25p: w25's model, 8 prompts of 512 tokens x 8 samples a step, up to 128 new tokens. Most tokens are
    prompts, as with instructions, examples or documents.

All: GRPO, one update a step over all samples, no KL, learning rate 1e-5, temperature 1, float32.
    Prompts are sums such as "37+48=", w25p's many of them; the reward counts the character 1, so
    any text can score.
"""

import random
import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

BUILD = Path(__file__).resolve().parent / "build"
VOCABULARY = 128


@dataclass(frozen=True)
class Workload:
    """A workload. `shape` are arguments of Qwen2Config; `prompt_tokens` 0 stands for one sum,
    5.8 characters on average."""

    prompts: int
    samples: int
    new_tokens: int
    shape: dict[str, int]
    prompt_tokens: int = 0

    @property
    def rows(self) -> int:
        return self.prompts * self.samples

    def distinct(self, tokens: float) -> float:
        """Return the share of a step's tokens that is left if each prompt is computed once."""
        prompt = self.prompt_tokens or 5.8
        return 1 - self.prompts * (self.samples - 1) * prompt / tokens


_W25 = {
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
WORKLOADS = {
    "w25": Workload(16, 8, 128, _W25),
    "w25p": Workload(8, 8, 128, _W25, prompt_tokens=512),
    "wtiny": Workload(
        64,
        8,
        64,
        {
            "hidden_size": 128,
            "num_hidden_layers": 2,
            "intermediate_size": 256,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
    ),
}


def prompts(count: int, length: int = 0, seed: int = 0) -> list[str]:
    """Return sums of 4 to 6 characters, or texts of `length` characters with many sums."""
    rng = random.Random(seed)

    def sums() -> str:
        text = f"{rng.randint(0, 99)}+{rng.randint(0, 99)}="
        while len(text) < length:
            text = f"{rng.randint(0, 99)}+{rng.randint(0, 99)}={rng.randint(0, 198)} {text}"
        return text[-length:]

    return [sums() for _ in range(count)]


def reward(completion: str) -> float:
    """Count the character 1."""
    return float(completion.count("1"))


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict
) -> float:
    """The reward in the form of a verlite reward function."""
    return reward(solution_str)


def model_of(name: str) -> Path:
    """Return the folder of a workload's model and character tokenizer; created if missing."""
    return model_in(
        BUILD / name, vocab_size=VOCABULARY, max_position_embeddings=1024, **WORKLOADS[name].shape
    )


def w128() -> Path:
    """Return the folder of a model with 128 million parameters in 11 layers."""
    return model_in(
        BUILD / "w128",
        vocab_size=VOCABULARY,
        max_position_embeddings=1024,
        hidden_size=1024,
        num_hidden_layers=11,
        intermediate_size=2816,
        num_attention_heads=16,
        num_key_value_heads=8,
    )


def model_in(folder: Path, device: str = "cpu", dtype: str = "float32", **shape: Any) -> Path:
    """Return a folder with a random Qwen2 and the character tokenizer; created on `device` if
    missing."""
    if (folder / "config.json").exists():
        return folder
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

    # Every id is a token, so no engine masks any.
    tokens = [
        "<|endoftext|>",
        "<|im_end|>",
        "<bos>",
        *("Ġ" if c == " " else c for c in string.printable[:95]),
        "Ċ",
    ]
    tokens += [f"<x{i}>" for i in range(VOCABULARY - len(tokens))]
    tokenizer = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=[],
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        bos_token="<bos>",
        unk_token="<|endoftext|>",
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    config = Qwen2Config(
        tie_word_embeddings=True, bos_token_id=2, eos_token_id=1, pad_token_id=0, **shape
    )
    torch.manual_seed(0)
    tokenizer.save_pretrained(folder)
    with torch.device(device):
        model = Qwen2ForCausalLM(config)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


def data_of(name: str, steps: int) -> Path:
    """Write a parquet file with the prompts of that many steps."""
    workload, file = WORKLOADS[name], BUILD / f"{name}-{steps}.parquet"
    file.parent.mkdir(exist_ok=True)
    rows = [
        {
            "data_source": "benchmark",
            "prompt": [{"role": "user", "content": text}],
            "reward_model": {"style": "rule", "ground_truth": ""},
        }
        for text in prompts(workload.prompts * steps, workload.prompt_tokens)
    ]
    pq.write_table(pa.Table.from_pylist(rows), file)
    return file
