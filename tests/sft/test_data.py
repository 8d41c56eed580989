"""SFT examples: tokens of prompts, responses and conversations, and invalid files."""

import csv
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from tests.sft.rows import read_examples
from verlite.config.sft import SFTDataConfig
from verlite.data.dataset import DataError
from verlite.sft.checks import endless_examples
from verlite.sft.data import Example, chat_or_text


@pytest.fixture
def tokenizer(tiny_qwen2):
    return AutoTokenizer.from_pretrained(tiny_qwen2)


def parquet(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def test_text_and_messages_give_the_same_tokens_and_eos(tmp_path, tokenizer):
    text = parquet(
        tmp_path / "text.parquet",
        [{"prompt": "3+4=", "response": "7"}, {"prompt": "5+8=", "response": "13"}],
    )
    chat = parquet(
        tmp_path / "chat.parquet",
        [
            {"prompt": [{"role": "user", "content": "3+4="}], "response": "7"},
            {"prompt": [{"role": "user", "content": "5+8="}], "response": "13"},
        ],
    )
    examples = read_examples(text, tokenizer, SFTDataConfig())
    eos = tokenizer.eos_token_id
    assert examples == [
        Example(tokenizer.encode("3+4="), [*tokenizer.encode("7"), eos], [1, 1]),
        Example(tokenizer.encode("5+8="), [*tokenizer.encode("13"), eos], [1, 1, 1]),
    ]
    assert read_examples([chat, text], tokenizer, SFTDataConfig()) == examples * 2


def test_long_example_is_an_error_or_truncated(tmp_path, tokenizer):
    file = parquet(
        tmp_path / "long.parquet",
        [{"prompt": "1+1=", "response": "2"}, {"prompt": "12+34=", "response": "46"}],
    )
    with pytest.raises(
        DataError,
        match=r"long.parquet row 1: the example has 9 tokens, more than data.max_length=8.*=right",
    ):
        read_examples(file, tokenizer, SFTDataConfig(max_length=8))
    truncated = read_examples(file, tokenizer, SFTDataConfig(max_length=8, truncation="right"))
    assert truncated[1] == Example(tokenizer.encode("12+34="), tokenizer.encode("46"), [1, 1])
    assert truncated[0].response[-1] == tokenizer.eos_token_id
    with pytest.raises(
        DataError, match=r"row 1: the prompt has 6 tokens; with data.max_length=6 no token is left"
    ):
        read_examples(file, tokenizer, SFTDataConfig(max_length=6, truncation="right"))


def test_entries_of_mappings_and_the_first_rows(tmp_path, tokenizer):
    rows = [{"extra": {"all": {"q": "3+4="}, "a": str(answer)}} for answer in range(3)]
    first, second = (parquet(tmp_path / f"{name}.parquet", rows) for name in "ab")
    data = SFTDataConfig(
        prompt_key="extra",
        prompt_dict_keys=["all", "q"],
        response_key="extra",
        response_dict_keys=["a"],
    )
    examples = read_examples([first, second], tokenizer, data, max_rows=4)
    answers = [tokenizer.decode(example.response[:-1]) for example in examples]
    assert answers == ["0", "1", "2", "0"]
    assert {tuple(example.prompt) for example in examples} == {tuple(tokenizer.encode("3+4="))}
    data.prompt_dict_keys = ["all", "question"]
    with pytest.raises(DataError, match="a.parquet row 0: column 'extra' has no entry 'question'"):
        read_examples(first, tokenizer, data)
    data.prompt_dict_keys = ["a", "q"]
    with pytest.raises(DataError, match="'extra' has no entry 'q': not a mapping"):
        read_examples(first, tokenizer, data)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "1+1="}], r"no column 'response'. Its columns: prompt. Set data.prompt_key"),
        (
            [{"prompt": "1+1=", "response": None}],
            r"bad.parquet row 0: column 'response' is 'None', expected text",
        ),
        (
            [{"prompt": 3, "response": "4"}],
            r"row 0: column 'prompt' is '3', expected text or a list of messages",
        ),
        ([{"prompt": "", "response": "4"}], r"row 0: the prompt has no tokens"),
    ],
)
def test_invalid_row_is_named(tmp_path, tokenizer, rows, message):
    with pytest.raises(DataError, match=message):
        read_examples(parquet(tmp_path / "bad.parquet", rows), tokenizer, SFTDataConfig())


def test_invalid_file_is_named(tmp_path, tokenizer):
    (tmp_path / "text.parquet").write_text("not parquet")
    (tmp_path / "folder.parquet").mkdir()
    pq.write_table(
        pa.table({"prompt": pa.array([], pa.string()), "response": pa.array([], pa.string())}),
        tmp_path / "empty.parquet",
    )
    for name, message in [
        ("gone", "does not exist"),
        ("folder", "is a folder"),
        ("text", "cannot be read as parquet"),
        ("empty", "has no rows"),
    ]:
        with pytest.raises(DataError, match=f"{name}.parquet {message}"):
            read_examples(str(tmp_path / f"{name}.parquet"), tokenizer, SFTDataConfig())
    with pytest.raises(DataError, match="data.train_files is empty"):
        read_examples([], tokenizer, SFTDataConfig())


CHATS = [
    [("user", "1+1="), ("assistant", "2"), ("user", "+1="), ("assistant", "3"), ("user", "ok")],
    [("system", "Add."), ("user", "2+2="), ("assistant", "4")],
]
CHATS = [[{"role": role, "content": text} for role, text in chat] for chat in CHATS]


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "json", "csv"])
def test_conversations_of_every_kind_of_file(tmp_path, tokenizer, kind):
    """Nulls that parquet adds, and JSON text, do not change an example. The tail is left out."""
    rows = [{"messages": chat, "note": "x"} for chat in CHATS]
    rows[0]["messages"] = [*CHATS[0][:-1], {**CHATS[0][-1], "name": "someone"}]
    path = tmp_path / f"chats.{kind}"
    if kind == "parquet":
        parquet(path, rows)
    elif kind == "csv":
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["messages"])
            writer.writerows([[json.dumps(row["messages"])] for row in rows])
    else:
        lines = map(json.dumps, rows)
        path.write_text("\n".join(lines) if kind == "jsonl" else f"[{','.join(lines)}]")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{% if m.name is defined %}"
        "({{ m.name }}){% endif %};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
    )
    found = read_examples(str(path), tokenizer, SFTDataConfig())
    decoded = [(tokenizer.decode(e.prompt), tokenizer.decode(e.response)) for e in found]
    assert decoded == [("u:1+1=;a:", "2;u:+1=;a:3;"), ("s:Add.;u:2+2=;a:", "4;")]
    assert [e.mask for e in found] == [[1, 1] + [0] * 8 + [1, 1], [1, 1]]


def test_tools_of_a_row(tmp_path, tokenizer):
    tokenizer.chat_template = (
        "{% for tool in tools or [] %}<{{ tool.name }}>{% endfor %}"
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    chat = CHATS[1]
    for value in ([{"name": "add"}, {"name": "sub"}], '[{"name": "add"}, {"name": "sub"}]'):
        file = parquet(tmp_path / "tools.parquet", [{"chat": chat, "tools": value}])
        (example,) = read_examples(file, tokenizer, SFTDataConfig(messages_key="chat"))
        assert tokenizer.decode(example.prompt) == "<add><sub>Add.2+2="
    file = parquet(tmp_path / "tools.parquet", [{"chat": chat, "tools": "add"}])
    with pytest.raises(DataError, match="row 0: column 'tools' is 'add', expected a list"):
        read_examples(file, tokenizer, SFTDataConfig(messages_key="chat"))


TOOL_TEMPLATE = (
    "{% for tool in tools or [] %}<{{ tool.name }}>{% endfor %}{% for m in messages %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}({{ c.name }}){% endfor %}{% endfor %}"
)


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_tools_and_calls_of_a_prompt(tmp_path, tokenizer, kind):
    """A row for each turn of an agent: what a conversation would show, its prompt shows."""
    tokenizer.chat_template = TOOL_TEMPLATE
    turns = [
        {"role": "user", "content": "1+1="},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]},
        {"role": "tool", "content": "2"},
    ]
    row = {"prompt": turns, "response": "2", "tools": [{"name": "add"}, {"name": "sub"}]}
    path = tmp_path / f"turns.{kind}"
    if kind == "parquet":
        parquet(path, [row])
    else:
        path.write_text(json.dumps(row))
    (example,) = read_examples(str(path), tokenizer, SFTDataConfig())
    assert tokenizer.decode(example.prompt) == "<add><sub>1+1=(add)2"
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="row 0: the row has column 'tools', which only a"):
        read_examples(str(path), tokenizer, SFTDataConfig())
    with pytest.raises(DataError, match="row 0: the row has tool_calls, which only"):
        read_examples(str(path), tokenizer, SFTDataConfig(tools_key="none"))


def test_calls_in_rows_of_text_are_as_they_were_written(tmp_path, tokenizer):
    """A table would make them alike: {"n":1.0} and {"n":1.5,"s":2.0} in the first two rows."""
    tokenizer.chat_template = "{% for m in messages %}{{ m.content or '' }}" + (
        "{% for c in m.tool_calls or [] %}{{ c.arguments | tojson }}{% endfor %}{% endfor %}"
    )
    calls = [{"n": 1}, {"s": 2, "n": 1.5}, {"n": "1"}, '{"n": 1}', {"s": None}]
    rows = [
        {
            "messages": [
                {"role": "user", "content": "1="},
                {"role": "assistant", "tool_calls": [{"arguments": arguments}]},
            ]
        }
        for arguments in calls
    ]
    (tmp_path / "calls.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = read_examples(str(tmp_path / "calls.jsonl"), tokenizer, SFTDataConfig())
    written = [tokenizer.decode(example.response) for example in found]
    plain = [tokenizer.decode(tokenizer.encode(json.dumps(arguments))) for arguments in calls]
    assert written == plain


def test_truncated_conversation(tmp_path, tokenizer):
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    file = parquet(tmp_path / "chat.parquet", [{"messages": CHATS[0][:4]}])
    data = SFTDataConfig(max_length=7, truncation="right")
    (example,) = read_examples(file, tokenizer, data)
    assert tokenizer.decode(example.response) == "2+1" and example.mask == [1, 0, 0]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("hello", "row 0: column 'messages' is 'hello', expected a list of messages"),
        ([], "expected a list of messages"),
        ([{"content": "hi"}], "expected a list of messages"),
        (CHATS[0][:1], "row 0: no message has the role assistant"),
    ],
)
def test_invalid_conversation_is_named(tmp_path, tokenizer, value, message):
    file = parquet(tmp_path / "bad.parquet", [{"messages": value}])
    with pytest.raises(DataError, match=message):
        read_examples(file, tokenizer, SFTDataConfig())


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no user') }}", "TemplateError: no user"),
        ("{{ messages[0].content + 1 }}", "TypeError: "),
        ("{{ 1 / 0 }}", "ZeroDivisionError: "),
        ("{% for m in messages %}{{ m.name.x }}{% endfor %}", "UndefinedError: "),
        ("{% for m in %}", "TemplateSyntaxError: "),
    ],
)
@pytest.mark.parametrize("row", [{"prompt": "1", "response": "2"}, {"messages": CHATS[1]}])
def test_a_template_that_fails_is_an_error_of_the_row(tmp_path, tokenizer, row, template, message):
    tokenizer.chat_template = template
    file = parquet(tmp_path / "rows.parquet", [row])
    with pytest.raises(DataError) as caught:
        read_examples(file, tokenizer, SFTDataConfig())
    expected = f"{file} row 0: the chat template does not accept the messages: {message}"
    assert str(caught.value).startswith(expected)


def test_a_tokenizer_without_an_end(tmp_path, tokenizer):
    tokenizer.eos_token = None
    file = parquet(tmp_path / "rows.parquet", [{"prompt": "1", "response": "2"}])
    with pytest.raises(DataError, match="row 0: the tokenizer has no end-of-sequence token.*Set "):
        read_examples(file, tokenizer, SFTDataConfig())


@pytest.mark.parametrize(
    ("text", "is_chat"),
    [
        (json.dumps(CHATS[0]), True),
        ("[1, 2]", False),
        ("[a", False),
        ('[{"a": 1}]', False),
        ('[{"role": "dev"}]', False),
    ],
)
def test_messages_as_json_text(text, is_chat):
    assert chat_or_text(text) == (CHATS[0] if is_chat else text)


def test_examples_that_do_not_teach_the_end(tokenizer):
    """Those that data.truncation cut do not count."""
    eos = tokenizer.eos_token_id
    examples = [
        Example([5], response, [1] * len(response)) for response in ([6, eos], [6], [6] * 4)
    ]
    assert endless_examples(examples, tokenizer, max_length=5) == 1
