"""`verlite data`: from a table of one's own to a file that training reads."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from tests.models import tiny_tokenizer
from verlite.cli import app
from verlite.data.dataset import PromptDataset
from verlite.spec.roles import DataSpec

CSV = 'question,solution,level\n"1+1, or?",2,easy\n2+2?, 4 ,easy\n"3+3?",6,hard\n1+1?,2,hard\n'


def run(tmp_path: Path, *arguments: str, content: str = CSV, name: str = "sums.csv"):
    (tmp_path / name).write_text(content)
    output = tmp_path / "out.parquet"
    command = ["data", str(tmp_path / name), "-o", str(output), *arguments]
    return CliRunner().invoke(app, command), output


NAMES = ("--prompt", "question", "--answer", "solution")


def test_a_csv_file_becomes_a_data_set(tmp_path):
    result, output = run(tmp_path, *NAMES, "--system", "Be brief.", "--template", "Q: {} A:")
    assert result.exit_code == 0, result.output
    rows = pq.read_table(output).to_pylist()
    assert rows[0] == {
        "data_source": "sums",
        "prompt": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Q: 1+1, or? A:"},
        ],
        "ability": "",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"split": "train", "index": 0, "level": "easy"},
    }
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["2", "4", "6", "2"]
    data = PromptDataset(str(output), tiny_tokenizer(), DataSpec(), "train")
    assert len(data) == 4 and data.row(1).extra_info["level"] == "easy"
    assert "out.parquet: 4 rows" in result.output
    assert "answers: 3 different, the most common '2' in 2 rows" in result.output
    assert "No built-in reward function is for data source 'sums'" in result.output


def test_the_same_rows_train_from_jsonl_without_a_conversion(tmp_path):
    _, output = run(tmp_path, *NAMES)
    lines = [json.dumps(row) for row in pq.read_table(output).to_pylist()]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    (tmp_path / "rows.json").write_text(f"[{','.join(lines)}]")
    tokenizer = tiny_tokenizer()
    first, *others = [
        PromptDataset(str(tmp_path / name), tokenizer, DataSpec(), "train")
        for name in ("out.parquet", "rows.jsonl", "rows.json")
    ]
    for other in others:
        assert [other.row(i) for i in range(4)] == [first.row(i) for i in range(4)]


def test_rows_are_held_out_and_equal_prompts_stay_together(tmp_path):
    content = "question,solution\n" + "".join(f"{n // 2}+1?,{n // 2 + 1}\n" for n in range(40))
    result, output = run(tmp_path, *NAMES, "--hold-out", "7", content=content)
    assert result.exit_code == 0, result.output
    train = pq.read_table(output).to_pylist()
    test = pq.read_table(tmp_path / "out_test.parquet").to_pylist()
    assert len(train) == 32 and len(test) == 8
    assert not {str(row["prompt"]) for row in train} & {str(row["prompt"]) for row in test}
    assert {row["extra_info"]["split"] for row in test} == {"test"}
    assert "repeated prompts: 20" in result.output
    assert f"data.val_files={tmp_path / 'out_test.parquet'}" in result.output


def test_chat_messages_and_numbers(tmp_path):
    rows = [
        {"question": [{"role": "user", "content": "hi"}], "solution": 5, "more": {"a": 1}},
        {"question": "plain", "solution": 2.5, "more": None},
    ]
    result, output = run(tmp_path, *NAMES, content=json.dumps(rows), name="chat.json")
    assert result.exit_code == 0, result.output
    read = pq.read_table(output).to_pylist()
    assert read[0]["prompt"] == [{"role": "user", "content": "hi"}]
    assert [row["reward_model"]["ground_truth"] for row in read] == ["5", "2.5"]


@pytest.mark.parametrize(
    ("arguments", "content", "message"),
    [
        (("--prompt", "text", "--answer", "solution"), CSV, "the example has no 'text'; it has qu"),
        (NAMES, CSV + "5+5?,,easy\n", "sums.csv row 4: 'solution' is empty"),
        (NAMES, CSV + ",5,easy\n", "sums.csv row 4: the prompt is empty"),
        (NAMES, CSV + "5+5?,10\n", "line 6 has 2 fields, the header 3"),
        (NAMES, "question,solution\n", "no examples"),
        ((*NAMES, "--template", "Q:"), CSV, "must contain {}"),
        ((*NAMES, "--hold-out", "9"), CSV, "--hold-out=9 leaves none of the 4 rows"),
        ((*NAMES, "-o", "sums.csv"), CSV, "must end with .parquet"),
    ],
)
def test_wrong_input_is_named_and_nothing_is_written(tmp_path, arguments, content, message):
    result, output = run(tmp_path, *arguments, content=content)
    assert result.exit_code == 2 and message in result.output, result.output
    assert not output.exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", 'question,solution\n"1+1,2\n', "cannot be read as csv: line 2"),
        ("a.csv", "question;solution\n1+1;2\n", "must be separated with commas"),
        ("a.tsv", "question\tsolution\n1+1\t2\n", "has the suffix '.tsv'"),
        ("a.xlsx", "PK", "save a spreadsheet as CSV UTF-8"),
        (
            "a.jsonl",
            "[" * 100_000,
            "cannot be read as jsonl: line 1: the JSON is nested too deeply",
        ),
        ("a.json", "[" * 100_000, "nested too deeply"),
        ("a.jsonl", '{"question": "1", "solution": NaN}', "'solution' is nan"),
        ("a.jsonl", '{"question": "\\ud800", "solution": 1}', "out.parquet cannot be written"),
        (
            "a.jsonl",
            '{"question": "1", "solution": 1, "x": 1}\n{"question": "1", "solution": 1, "x": "a"}',
            "must all be text or all numbers",
        ),
        ("a.jsonl", f'{{"question": "1", "solution": 1, "x": {10**30}}}', "at most 64 bits"),
    ],
)
def test_files_that_cannot_be_read_end_in_one_line(tmp_path, name, content, message):
    result, output = run(tmp_path, *NAMES, content=content, name=name)
    assert result.exit_code == 2 and message in result.output, result.output
    assert not output.exists()


def test_what_spreadsheets_and_pandas_write(tmp_path):
    """A byte-order mark, spaces in the header, a long field, and integers that became floats."""
    long = "x" * 200_000
    result, output = run(tmp_path, *NAMES, content=f'\ufeffquestion, solution\r\n"{long}",2\r\n')
    assert result.exit_code == 0, result.output
    assert pq.read_table(output).to_pylist()[0]["prompt"][0]["content"] == long
    content = '\ufeff{"question": "[1, 2]", "solution": 5.0}\n'
    result, output = run(tmp_path, *NAMES, "--force", content=content, name="a.jsonl")
    assert result.exit_code == 0, result.output
    (row,) = pq.read_table(output).to_pylist()
    assert row["prompt"][0]["content"] == "[1, 2]"
    assert row["reward_model"]["ground_truth"] == "5"


def test_a_prompt_that_ends_with_an_answer_is_refused(tmp_path):
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    rows = [{"question": chat, "solution": "x"}]
    result, _ = run(tmp_path, *NAMES, content=json.dumps(rows), name="chat.json")
    assert "chat.json row 0: 'question' ends with a message of the assistant" in result.output


def test_the_source_file_is_not_overwritten(tmp_path):
    _, output = run(tmp_path, *NAMES)
    again = ["data", str(output), "--prompt", "prompt", "--answer", "ability", "-o", str(output)]
    result = CliRunner().invoke(app, again)
    assert result.exit_code == 2 and "is one of the files that are read" in result.output


def test_an_existing_file_is_replaced_only_with_force(tmp_path):
    _, output = run(tmp_path, *NAMES)
    before = output.read_bytes()
    result, _ = run(tmp_path, *NAMES, "--system", "Think.")
    assert result.exit_code == 2 and f"{output} exists" in result.output
    assert output.read_bytes() == before
    result, _ = run(tmp_path, *NAMES, "--system", "Think.", "--force")
    assert result.exit_code == 0 and output.read_bytes() != before
