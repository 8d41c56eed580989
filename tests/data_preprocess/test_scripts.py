"""The preprocessing scripts: rows in verl's format, one line per invalid input, atomic writes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data_preprocess.conftest import ROOT, Run
from tests.models import tiny_tokenizer
from verlite.data.dataset import PromptDataset
from verlite.data.preprocess import write_parquet
from verlite.rewards.scorer import Scorer
from verlite.spec.roles import DataSpec, ScorerSpec

pytestmark = pytest.mark.process

SAMPLES = ROOT / "tests/samples"


def test_gsm8k_rows_equal_verls(run: Run, tmp_path: Path) -> None:
    done = run(
        "gsm8k.py", "--local_dir", tmp_path / "out", "--local_dataset_path", SAMPLES / "gsm8k"
    )
    assert done.returncode == 0, done.stderr
    train, test = (pq.read_table(tmp_path / f"out/{split}.parquet") for split in ("train", "test"))
    assert train.column_names == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    assert (train.num_rows, test.num_rows) == (20, 10)
    original = json.loads((SAMPLES / "gsm8k/test.jsonl").read_text().splitlines()[0])
    assert test.to_pylist()[0] == {
        "data_source": "openai/gsm8k",
        "prompt": [
            {
                "role": "user",
                "content": "Janet’s ducks lay 16 eggs per day. She eats three for breakfast every "
                "morning and bakes muffins for her friends every day with four. She sells the "
                "remainder at the farmers' market daily for $2 per fresh duck egg. How much in "
                "dollars does she make every day at the farmers' market? Let's think step by "
                'step and output the final answer after "####".',
            }
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "18"},
        "extra_info": {
            "split": "test",
            "index": 0,
            "answer": original["answer"],
            "question": original["question"],
        },
    }
    assert [row["extra_info"]["index"] for row in train.to_pylist()] == list(range(20))
    size = (tmp_path / "out/train.parquet").stat().st_size
    longest = max(len(row["prompt"][0]["content"]) for row in train.to_pylist())
    assert (
        f"train.parquet: 20 rows, longest prompt {longest} characters, {size} bytes" in done.stdout
    )
    assert done.stdout.count('"data_source": "openai/gsm8k"') == 3  # examples


def test_ground_truth_has_no_commas(run: Run, tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(
            '{"question": "How much?", "answer": "It is\\n#### -1,234,567"}'
        )
    assert (
        run("gsm8k.py", "--local_dir", tmp_path, "--local_dataset_path", tmp_path).returncode == 0
    )
    assert (
        pq.read_table(tmp_path / "train.parquet").to_pylist()[0]["reward_model"]["ground_truth"]
        == "-1234567"
    )


def test_math_rows_equal_verls(run: Run, tmp_path: Path) -> None:
    done = run(
        "math_dataset.py", "--local_save_dir", tmp_path, "--local_dataset_path", SAMPLES / "math"
    )
    assert done.returncode == 0, done.stderr
    rows = pq.read_table(tmp_path / "test.parquet").to_pylist()
    assert (
        rows[0]
        == json.loads((tmp_path / "test_example.json").read_text())
        == {
            "level": "Level 1",
            "type": "Algebra",
            "data_source": "DigitalLearningGmbH/MATH-lighteval",
            "prompt": [
                {
                    "role": "user",
                    "content": "Expand $(x+1)^2$. Let's think step by step and output the final "
                    "answer within \\boxed{}.",
                }
            ],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "x^2+2x+1"},
            "extra_info": {"split": "test", "index": 0},
        }
    )
    truths = [row["reward_model"]["ground_truth"] for row in rows]
    assert truths == [
        "x^2+2x+1",
        "\\text{composite}",
        "6",
        "\\begin{pmatrix} 2 \\\\ -1 \\end{pmatrix}",
    ]


@pytest.mark.parametrize("script", ["gsm8k.py", "math_dataset.py"])
def test_every_ground_truth_scores_and_every_prompt_is_used(
    run: Run, tmp_path: Path, script: str
) -> None:
    folder = SAMPLES / ("gsm8k" if script == "gsm8k.py" else "math")
    assert run(script, "--local_dir", tmp_path, "--local_dataset_path", folder).returncode == 0
    scorer = Scorer(ScorerSpec())
    try:
        for split in ("train", "test"):
            data = PromptDataset(
                str(tmp_path / f"{split}.parquet"),
                tiny_tokenizer(),
                DataSpec(max_prompt_length=1024),
                "val",
            )
            check = scorer.self_check([data.row(i) for i in range(len(data))])
            assert check.checked == data.report.rows and check.warning() is None
    finally:
        scorer.close()


def test_hub_parquet_and_single_json_files_are_read(run: Run, tmp_path: Path) -> None:
    hub = tmp_path / "hub"
    for split in ("train", "test"):
        examples = [
            json.loads(line) for line in (SAMPLES / f"gsm8k/{split}.jsonl").read_text().splitlines()
        ]
        for part in range(2):
            write_parquet(examples[part::2], hub / f"main/{split}-0000{part}-of-00002.parquet")
            for number, example in enumerate(examples[:3]):
                file = tmp_path / f"single/{split}/subject/{number}.json"
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(json.dumps(example, indent=2))
    for folder, rows in ((hub, 20), (tmp_path / "single", 3)):
        assert (
            run(
                "gsm8k.py", "--local_dir", tmp_path / "out", "--local_dataset_path", folder
            ).returncode
            == 0
        )
        assert pq.read_table(tmp_path / "out/train.parquet").num_rows == rows


GOOD = '{"question": "q", "answer": "a #### 1"}\n'


@pytest.mark.parametrize(
    ("test_file", "message"),
    [
        (
            GOOD + '{"question": "q", "answer"\n',
            "test.jsonl cannot be read as jsonl: line 2: Expecting ':' delimiter",
        ),
        (
            GOOD + "\n" + "[1]\n",
            "test.jsonl cannot be read as jsonl: line 3 is a list, not an object",
        ),
        (
            GOOD + '{"question": "q"}',
            "test.jsonl line 2: the example has no 'answer'; it has question",
        ),
        (
            GOOD + '{"question": "q", "answer": "five"}',
            'test.jsonl line 2: the answer has no "#### number"',
        ),
        (GOOD + '{"question": "q", "answer": 5}', "test.jsonl line 2: "),
        ("\n", "the test split has no examples"),
        (None, "has none of test.jsonl, test.parquet"),
    ],
)
def test_invalid_input_is_named_and_nothing_is_written(
    run: Run, tmp_path: Path, test_file: str | None, message: str
) -> None:
    (tmp_path / "train.jsonl").write_text(GOOD)
    if test_file is not None:
        (tmp_path / "test.jsonl").write_text(test_file)
    done = run("gsm8k.py", "--local_dir", tmp_path / "out", "--local_dataset_path", tmp_path)
    assert done.returncode == 1 and message in done.stderr and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_invalid_options_are_named(run: Run, tmp_path: Path) -> None:
    refused = run("gsm8k.py", "--hdfs_dir", "hdfs://x")
    assert (
        refused.returncode == 2
        and "--hdfs_dir is not supported; copy the files with: hdfs dfs -put" in refused.stderr
    )
    missing = run("gsm8k.py", "--local_dataset_path", tmp_path / "none", "--local_dir", tmp_path)
    assert missing.returncode == 1 and "none does not exist" in missing.stderr
    (tmp_path / "file").touch()
    file = run("gsm8k.py", "--local_dataset_path", tmp_path / "file", "--local_dir", tmp_path)
    assert file.returncode == 1 and "file is a file; give its folder" in file.stderr
    unwritable = run(
        "gsm8k.py", "--local_dir", tmp_path / "file", "--local_dataset_path", SAMPLES / "gsm8k"
    )
    assert unwritable.returncode == 1 and "File exists" in unwritable.stderr


def test_script_runs_alone_and_explains_a_missing_hub(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "data_preprocess/gsm8k.py", "--local_dir", tmp_path]
    offline = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        cwd=tmp_path,
    )
    assert (
        offline.returncode == 1
        and "openai/gsm8k cannot be downloaded" in offline.stderr
        and "--local_dataset_path" in offline.stderr
    )


def test_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(table: pa.Table, file: BinaryIO) -> None:
        file.write(b"PAR1")
        raise OSError("no space left")

    path = tmp_path / "a.parquet"
    write_parquet([{"a": 1}], path)
    with pytest.raises(Exception, match="(?i)convert|expected"):
        write_parquet([{"a": 1}, {"a": "text"}], path)
    monkeypatch.setattr("verlite.data.preprocess.pq.write_table", half)
    with pytest.raises(OSError, match="no space left"):
        write_parquet([{"a": 2}], path)
    assert pq.read_table(path).to_pylist() == [{"a": 1}]
    assert os.listdir(tmp_path) == ["a.parquet"]


def test_hotpotqa_articles_become_a_corpus(run: Run, tmp_path: Path) -> None:
    """All three file formats are read; duplicates are written once; ids count from 0."""
    one, two = ["One", ["It is first.", " It has\ntwo lines."]], ["Two", ["Second."]]
    files = {
        "titles": dict([one, two]),
        "rows": [{"title": "Two", "text": "Another."}],
        "questions": [{"question": "?", "context": [one, two]}],
    }
    paths = [tmp_path / f"{name}.json" for name in files]
    for path, value in zip(paths, files.values(), strict=True):
        path.write_text(json.dumps(value))
    done = run("hotpotqa_corpus.py", "--articles", *paths, "--local_save_dir", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert [
        json.loads(line) for line in (tmp_path / "out/corpus.jsonl").read_text().splitlines()
    ] == [
        {"id": "0", "contents": '"One"\nIt is first. It has two lines.'},
        {"id": "1", "contents": '"Two"\nSecond.'},
        {"id": "2", "contents": '"Two"\nAnother.'},
    ]
    assert "corpus.jsonl: 3 passages, " in done.stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "a.json: not JSON"),
        ("[]", "a.json: no article has a text"),
        ("5", "a.json: a int, expected"),
        ('[["One"]]', "a.json entry 0: expected a title"),
        ("[7]", "a.json entry 0: expected a title"),
        ('[["One", [3]]]', "a.json entry 0: expected a title"),
    ],
)
def test_invalid_hotpotqa_file_is_one_line(
    run: Run, tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "a.json").write_text(text)
    done = run(
        "hotpotqa_corpus.py",
        "--articles",
        tmp_path / "a.json",
        "--local_save_dir",
        tmp_path / "out",
    )
    assert (done.returncode, message in done.stderr, done.stderr.count("\n")) == (1, True, 1), (
        done.stderr
    )
    assert not (tmp_path / "out").exists()
