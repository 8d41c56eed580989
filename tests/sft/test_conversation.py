"""Which tokens of a conversation are trained: equal to two oracles, or an error."""

import random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from verlite.sft.conversation import tokenize

CHATML = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}"
    "{% for call in message.tool_calls %}<call>{{ call.function | tojson }}</call>{% endfor %}"
    "<|im_end|>{% endgeneration %}"
    "{% else %}{{ message.content }}<|im_end|>{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INLINE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %}[{{ message.role }}]{{ message.content }}[/]{% endif %}{% endfor %}"
)
NO_END = (
    "{% for message in messages %}### {{ message.role }}\n{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}\n{% endgeneration %}{% else %}{{ message.content }}\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}### assistant\n{% endif %}"
)
FORGETFUL = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if loop.last and message.role == 'assistant' %}<think>{% endif %}"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = (
    "Which number follows 12? It is 13, I think. \u00dcber caf\u00e9 \U0001f600 {x: [1, 2]}\n\n"
    "assistant\n"
)
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def tokenizer():
    """A byte-level BPE with merges, so that tokens have several characters."""
    core = Tokenizer(BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    core.train_from_iterator([WORDS, CHATML, INLINE] * 9, trainer)
    core.add_special_tokens([AddedToken(t) for t in ("<|im_start|>", "<|im_end|>", "<s>")])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        bos_token="<s>",
        extra_special_tokens=["<|im_start|>"],
    )


def without_marks(template):
    return template.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def conversations(count):
    """Return random conversations of up to four turns, some with tools."""
    draw = random.Random(7)
    words = WORDS.split(" ")

    def text():
        return " ".join(draw.choices(words, k=draw.randint(1, 12))).strip()

    for _ in range(count):
        messages = [{"role": "system", "content": text()}] if draw.random() < 0.5 else []
        for _ in range(draw.randint(1, 4)):
            messages.append({"role": "user", "content": text()})
            if draw.random() < 0.3:
                call = {"function": {"name": "add", "arguments": {"a": draw.randint(0, 99)}}}
                messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
                messages.append({"role": "tool", "content": text()})
            messages.append({"role": "assistant", "content": text()})
        if draw.random() < 0.2:
            messages.append({"role": "user", "content": text()})
        yield messages, TOOLS if draw.random() < 0.4 else None


def by_token_prefixes(tokenizer, messages, tools):
    """The naive method: tokenize what precedes each turn and what ends with it."""
    whole = tokenizer.apply_chat_template(messages, tools=tools, return_dict=False)
    mask = [0] * len(whole)
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            before = tokenizer.apply_chat_template(
                messages[:number], tools=tools, add_generation_prompt=True, return_dict=False
            )
            after = tokenizer.apply_chat_template(
                messages[: number + 1], tools=tools, return_dict=False
            )
            assert whole[: len(before)] == before and whole[: len(after)] == after
            for index in range(len(before), len(after)):
                mask[index] = 1
    return whole, mask


@pytest.mark.parametrize("template", [CHATML, INLINE, NO_END])
def test_the_tokens_of_text_prefixes_are_those_of_marks_and_of_token_prefixes(tokenizer, template):
    newline = tokenizer.encode("\n")
    turns = 0
    for messages, tools in conversations(150):
        tokenizer.chat_template = template
        ids, marked = tokenize(tokenizer, messages, tools)
        tokenizer.chat_template = without_marks(template)
        assert tokenize(tokenizer, messages, tools) == (ids, marked)
        whole, naive = by_token_prefixes(tokenizer, messages, tools)
        assert whole == ids
        edges = [i for i in range(len(ids)) if naive[i] and not marked[i]]
        assert all([ids[i]] == newline and ids[i - 1] == tokenizer.eos_token_id for i in edges)
        assert all(naive[i] for i in range(len(ids)) if marked[i])
        turns += sum(message["role"] == "assistant" for message in messages)
        if template == CHATML:
            assert len(edges) == sum(message["role"] == "assistant" for message in messages)
    assert turns > 300


def test_the_trained_text_is_what_the_assistant_says(tokenizer):
    tokenizer.chat_template = without_marks(CHATML)
    messages = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "assistant\n2?"},
        {"role": "assistant", "content": "yes, 2"},
    ]
    ids, mask = tokenize(tokenizer, messages)
    kept = tokenizer.decode([token for token, trained in zip(ids, mask, strict=True) if trained])
    assert kept == "2<|im_end|>yes, 2<|im_end|>"


@pytest.mark.parametrize(
    ("template", "roles", "words"),
    [
        (None, "ua", "no chat template"),
        (without_marks(CHATML), "u", "nothing to learn"),
        (without_marks(CHATML), "au", "the first message is the assistant's"),
        (FORGETFUL, "uaua", "message 1: the chat template writes this turn differently"),
        (
            "{% for m in messages %}{{ m.role }}{% endfor %}{% generation %}{% endgeneration %}",
            "ua",
            "around no token",
        ),
        ("{{ raise_exception('roles must alternate') }}", "uaa", "roles must alternate"),
        ("{{ messages | length }}", "uaua", "writes what is before this turn differently"),
        (
            "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
            "ua",
            "writes nothing",
        ),
    ],
)
def test_what_cannot_be_decided_is_an_error(tokenizer, template, roles, words):
    names = {"u": "user", "a": "assistant"}
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=words):
        tokenize(tokenizer, [{"role": names[role], "content": "hello"} for role in roles])


def test_a_token_across_the_edge_of_a_turn_is_an_error(tokenizer):
    """A prompt that ends with a space: the model reads it as a token of its own, while in the
    whole text it is a part of the answer's first word."""
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    messages = [{"role": "user", "content": "12?"}, {"role": "assistant", "content": "think"}]
    with pytest.raises(ValueError, match="message 1: .* The chat template puts white space there"):
        tokenize(tokenizer, messages)
    messages[1]["content"] = "think\n"
    with pytest.raises(ValueError, match="message 1: .* Remove the white space at the beginning"):
        tokenize(tokenizer, messages)


def test_a_forgetful_template_can_be_used_for_single_turns(tokenizer):
    tokenizer.chat_template = FORGETFUL
    ids, mask = tokenize(
        tokenizer, [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    )
    kept = tokenizer.decode([token for token, trained in zip(ids, mask, strict=True) if trained])
    assert kept == "<think>2<|im_end|>"
