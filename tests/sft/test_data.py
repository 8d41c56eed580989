"""SFT examples: tokens of prompts and responses, and invalid files."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from verlite.config.sft import SFTDataConfig
from verlite.data.dataset import DataError
from verlite.sft.data import read_examples


@pytest.fixture(scope="module")
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
    assert examples == [
        (tokenizer.encode("3+4="), [*tokenizer.encode("7"), tokenizer.eos_token_id]),
        (tokenizer.encode("5+8="), [*tokenizer.encode("13"), tokenizer.eos_token_id]),
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
    assert truncated[1] == (tokenizer.encode("12+34="), tokenizer.encode("46"))
    assert truncated[0][1][-1] == tokenizer.eos_token_id
    with pytest.raises(
        DataError,
        match=r"row 1: the prompt has 6 tokens; with data.max_length=6 no token is left",
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
    answers = [tokenizer.decode(response[:-1]) for _, response in examples]
    assert answers == ["0", "1", "2", "0"]
    assert {tuple(prompt) for prompt, _ in examples} == {tuple(tokenizer.encode("3+4="))}
    data.prompt_dict_keys = ["all", "question"]
    with pytest.raises(DataError, match="a.parquet row 0: column 'extra' has no entry 'question'"):
        read_examples(first, tokenizer, data)
    data.prompt_dict_keys = ["a", "q"]
    with pytest.raises(DataError, match="'extra' has no entry 'q': not a mapping"):
        read_examples(first, tokenizer, data)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [{"prompt": "1+1="}],
            r"no column 'response'. Its columns: prompt. Set data.prompt_key and data.response_key",
        ),
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
