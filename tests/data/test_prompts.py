"""Prompt building: with and without a chat template, and the four truncation modes."""

import pytest

from tests.models import tiny_tokenizer
from verlite.data.prompts import PromptTooLong, build_prompt, build_prompts, truncate

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<{{ message.role }}>{{ message.content }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if think is defined and not think %}<empty>"
    "{% endif %}{% endif %}"
)


def test_template_adds_special_tokens_once() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    ids = build_prompt(tokenizer, MESSAGES)
    assert tokenizer.decode(ids) == "<bos><system>Be brief.\n<user>2+2?\n<assistant>"
    assert ids.count(tokenizer.bos_token_id) == 1 and all(type(i) is int for i in ids)
    assert tokenizer.decode(
        build_prompt(tokenizer, MESSAGES, template_kwargs={"think": False})
    ).endswith("<assistant><empty>")


def test_without_template_contents_are_joined_and_encoded() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    assert build_prompt(tokenizer, MESSAGES) == tokenizer.encode("Be brief.\n2+2?")
    assert tokenizer.decode(build_prompt(tokenizer, MESSAGES[1:])) == "2+2?"


@pytest.mark.parametrize("template", [TEMPLATE, None], ids=["template", "none"])
def test_batched_prompts_equal_single_prompts(template: str | None) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    conversations = [
        MESSAGES,
        MESSAGES[1:],
        [{"role": "user", "content": "α\u2028 " * 40}],
        [{"role": "user", "content": ""}],
    ]
    options = {"think": False} if template else {}
    alone = [
        build_prompt(tokenizer, messages, template_kwargs=options) for messages in conversations
    ]
    assert (
        build_prompts(tokenizer, conversations, template_kwargs=options) == alone
        and len({len(ids) for ids in alone}) == 4
    )
    assert build_prompts(tokenizer, []) == []


@pytest.mark.parametrize(
    ("truncation", "limit", "kept"),
    [
        ("left", 3, [3, 4, 5]),
        ("right", 3, [1, 2, 3]),
        ("error", 5, [1, 2, 3, 4, 5]),
        ("middle", 3, [1, 4, 5]),
        ("middle", 4, [1, 2, 4, 5]),
        ("middle", 1, [5]),
    ],
)
def test_truncation(truncation: str, limit: int, kept: list[int]) -> None:
    assert truncate([1, 2, 3, 4, 5], limit, truncation) == kept


def test_too_long_prompts_and_unknown_modes_are_errors() -> None:
    tokenizer = tiny_tokenizer()
    with pytest.raises(PromptTooLong, match="the prompt has 13 tokens, 12 are allowed") as caught:
        build_prompt(tokenizer, MESSAGES, max_length=12)
    assert (caught.value.length, caught.value.limit) == (13, 12)
    assert build_prompt(tokenizer, MESSAGES, max_length=4, truncation="left") == tokenizer.encode(
        "2+2?"
    )
    with pytest.raises(
        ValueError, match="data.truncation='centre' is not one of error, left, right, middle"
    ):
        build_prompt(tokenizer, MESSAGES, max_length=100, truncation="centre")
