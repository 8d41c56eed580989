"""data_preprocess/chat_json.py: prompts and ground truths of chat data sets, and wrong rows."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data_preprocess.conftest import ROOT, Run
from tests.models import tiny_tokenizer
from verlite.convert.formulas import VERBATIM
from verlite.data.dataset import PromptDataset
from verlite.rewards.result import RewardItem
from verlite.rewards.scorer import Scorer
from verlite.spec.roles import DataSpec, ScorerSpec

SAMPLE = ROOT / "tests/samples/chat/chatml.json"


@pytest.fixture
def convert(run: Run, tmp_path: Path):
    def converted(rows: object, *options: str, name: str = "in.json"):
        file = tmp_path / name
        file.write_text(rows if isinstance(rows, str) else json.dumps(rows))
        output = tmp_path / "out.parquet"
        done = run("chat_json.py", "--dataset", file, "--output", output, *options)
        return done, pq.read_table(output).to_pylist() if done.returncode == 0 else []

    return converted


def test_the_sample(convert):
    done, rows = convert(SAMPLE.read_text(), "--data_source", "math")
    assert done.returncode == 0, done.stderr
    assert "out.parquet: 5 rows, longest prompt" in done.stdout
    prompts = [[(m["role"], m["content"]) for m in row["prompt"]] for row in rows]
    assert prompts == [
        [("system", "Think, then answer."), ("user", "What is 2 + 3?")],
        [("user", "What is 7 - 3?")],
        [("system", "Think."), ("user", "What is 6 x 7?")],
        [("user", "What is [1, 2] joined?")],
        [("user", "[1] What is 9 / 3?")],
    ]
    truths = [row["reward_model"]["ground_truth"] for row in rows]
    assert truths == ["$5$", "4", "42", "12", "3"]
    assert rows[1]["extra_info"]["raw_prompt"] == json.loads(SAMPLE.read_text())[1]["message"]
    assert [row["extra_info"]["index"] for row in rows] == [0, 1, 2, 3, 4]
    assert rows[0]["data_source"] == "math"


@pytest.mark.process
def test_ground_truths_score_and_a_verbatim_template_adds_nothing(convert, tmp_path):
    convert(SAMPLE.read_text(), "--data_source", "math")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = VERBATIM
    config = DataSpec(max_prompt_length=1024)
    data = PromptDataset(str(tmp_path / "out.parquet"), tokenizer, config, "val")
    assert tokenizer.decode(data.prompt_ids(3)) == "What is [1, 2] joined?"
    scorer = Scorer(ScorerSpec())
    try:
        answers = ["5", "4", "42", "12", "3"]
        truths = [data.row(i).ground_truth for i in range(len(data))]
        for answer, expected in ((answers, 1.0), (["77"] * 5, -1.0)):
            items = [
                RewardItem("math", f"\\boxed{{{text}}}", truth)
                for text, truth in zip(answer, truths, strict=True)
            ]
            assert [result.score for result in scorer.score(items)] == [expected] * 5
    finally:
        scorer.close()


def test_answers_in_the_messages_and_other_columns(convert):
    chat = [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}]
    done, rows = convert([{"message": chat}])
    assert rows[0]["reward_model"]["ground_truth"] == "4", done.stderr
    done, rows = convert([{"q": "2+2", "gold": 4}], "--input_key", "q", "--label_key", "gold")
    assert (rows[0]["prompt"][0]["content"], rows[0]["reward_model"]["ground_truth"]) == (
        "2+2",
        "4",
    )
    options = ("--input_key", "q", "--input_template", "Q: {} \\boxed{}?")
    _, rows = convert([{"q": "{x}", "answer": "1"}], *options)
    assert rows[0]["prompt"][0]["content"] == "Q: {x} \\boxed{x}?"


def test_jsonl_folders_and_parquet(run: Run, tmp_path: Path):
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"message": "a", "answer": "1"}\n')
    (folder / "b.jsonl").write_text('{"message": "b", "answer": "2"}\n')
    pq.write_table(pa.table({"message": ["c"], "answer": ["3"]}), tmp_path / "c.parquet")
    output = tmp_path / "out.parquet"
    names = f"{folder},{tmp_path / 'c.parquet'}"
    done = run("chat_json.py", "--dataset", names, "--output", output)
    assert done.returncode == 0, done.stderr
    rows = pq.read_table(output).to_pylist()
    assert [row["prompt"][0]["content"] for row in rows] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"answer": "1"}, "the example has no 'message'; it has answer"),
        ({"message": "x"}, "the example has no 'answer'"),
        ({"message": "x", "answer": None}, "answer must be text or a number, not NoneType"),
        ({"message": "x", "answer": ["1", "2"]}, "not list"),
        ({"message": " ", "answer": "1"}, "the prompt is empty"),
        ({"message": 3, "answer": "1"}, "must be messages or text, not int"),
        ({"message": [], "answer": "1"}, "must be messages or text"),
        ({"message": [{"role": "user"}], "answer": "1"}, "message 0 is not {role, content}"),
        ({"message": [{"role": "bot", "content": "x"}], "answer": "1"}, "has role 'bot'"),
        (
            {"message": [{"role": "system", "content": "x"}], "answer": "1"},
            "no message has the role user",
        ),
    ],
)
def test_a_wrong_row_is_named_by_its_line(convert, tmp_path, row, words):
    good = json.dumps({"message": "x", "answer": "1"})
    done, _ = convert(f"{good}\n{json.dumps(row)}\n", name="in.jsonl")
    assert done.returncode == 1
    assert f"in.jsonl line 2: {words}" in done.stderr or words in done.stderr
    assert "in.jsonl line 2: " in done.stderr
    assert not (tmp_path / "out.parquet").exists()


@pytest.mark.parametrize(
    ("dataset", "words"),
    [("gone.json", "does not exist"), (",", "names no file"), ("empty", "has no .jsonl")],
)
def test_wrong_files(run: Run, tmp_path, monkeypatch, dataset, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    done = run("chat_json.py", "--dataset", dataset, "--output", "out.parquet")
    assert (done.returncode, words in done.stderr) == (1, True), done.stderr


def test_the_input_is_not_overwritten(run: Run, tmp_path):
    pq.write_table(pa.table({"message": ["c"], "answer": ["3"]}), tmp_path / "c.parquet")
    file = tmp_path / "c.parquet"
    done = run("chat_json.py", "--dataset", file, "--output", file)
    assert "is one of the files that are read" in done.stderr
