"""Tiny random models and a character tokenizer, saved in the Hugging Face format."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>"]
ASCII = ["\n", *map(chr, range(32, 127))]
GREEK = [chr(0x3B1 + i) for i in range(28)]  # 4 + 96 + 28 = 128 ids
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one id per character.

    The ids are <pad>=0, <eos>=1, <bos>=2, <unk>=3, newline=4, space=5 and so on to 127. It adds no
    BOS token. It is a byte-level BPE without merges, because AutoTokenizer loads the vocabulary of
    a Qwen2 model as byte-level BPE and ignores the model type in tokenizer.json.
    """
    # Names of non-printing bytes in byte-level BPE.
    spelled = {"\n": "\u010a", " ": "\u0120"}
    vocab = {token: i for i, token in enumerate(SPECIAL + [spelled.get(c, c) for c in ASCII])}
    tokenizer = Tokenizer(BPE(vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(letter, normalized=False) for letter in GREEK])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def tiny_model(path: str | Path, arch: str = "qwen2", seed: int = 0, **overrides: Any) -> str:
    """Save a random 2-layer float32 model and the character tokenizer to `path`.

    `arch` is a transformers model type whose config has the field names of Qwen2 and Llama.
    `overrides` replaces or adds config values. vLLM needs a head size of at least 32, so pass
    hidden_size=128 for it. Biases and norm weights are random too, so that a test fails if one of
    them is lost. Returns `path` as a string.
    """
    sizes: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
    }
    config = AutoConfig.for_model(arch, **(sizes | overrides))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return str(path)
