"""Data of the search agent: rows equal Search-R1's; invalid files and examples are located."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.data_preprocess.conftest import ROOT, Run
from tests.models import tiny_tokenizer
from verlite.data import qa
from verlite.data.dataset import DataError, PromptDataset
from verlite.rewards.scorer import Scorer
from verlite.spec.roles import DataSpec, ScorerSpec

pytestmark = pytest.mark.process

DATA = ROOT.parent / "shared/data"

NQ_OPEN = {
    "question": "when did humans first land on the moon ",
    "answer": ["July 20, 1969", "1969"],
}
HOTPOT = {
    "_id": "5a7a06935542990198eaf050",
    "question": "Which came first, the lamp or the lantern?",
    "answer": "the lantern",
    "type": "comparison",
    "level": "easy",
    "supporting_facts": [["Lantern", 0], ["Lamp", 2], ["Lantern", 1]],
    "context": [
        ["Lantern", ["A lantern is old.", " It shines."]],
        ["Lamp", ["A lamp.", " It shines.", " It is newer."]],
    ],
}
FLASHRAG = {"id": "test_0", "question": "who sings {this} song?", "golden_answers": ["Nobody"]}
FLASHRAG_HOTPOT = {
    **{"id": "dev_0", "question": "What is it?", "golden_answers": ["a spirit"]},
    "metadata": {
        "type": "bridge",
        "supporting_facts": {"title": ["Alû", "Lilu"], "sent_id": [3, 0]},
        "context": {"title": ["Alû"]},
    },
}


def lay(folder: Path, files: dict[str, Any]) -> Path:
    """Write files by name: a list as JSON lines (.jsonl) or as one list (.json), text unchanged."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if not isinstance(content, str):
            content = (
                json.dumps(content, indent=1)
                if name.endswith(".json")
                else "\n".join(map(json.dumps, content)) + "\n"
            )
        (folder / name).write_text(content)
    return folder


def rows(folder: Path, split: str) -> list[dict[str, Any]]:
    return pq.read_table(folder / f"{split}.parquet").to_pylist()


def test_nq_rows_equal_search_r1s(run: Run, tmp_path: Path) -> None:
    lay(tmp_path, {"nq/train.jsonl": [NQ_OPEN, FLASHRAG], "nq/test.jsonl": [FLASHRAG]})
    done = run(
        "nq_search.py",
        "--local_dir",
        tmp_path / "out",
        "--local_dataset_path",
        tmp_path,
        "--template_type",
        "base",
    )
    assert done.returncode == 0, done.stderr
    assert pq.read_table(tmp_path / "out/train.parquet").column_names == [
        "data_source",
        "prompt",
        "ability",
        "reward_model",
        "extra_info",
    ]
    first, second = rows(tmp_path / "out", "train")
    assert first == {
        "data_source": "nq",
        "prompt": [
            {
                "role": "user",
                "content": "Answer the given question. You must conduct reasoning inside <think> "
                "and </think> first every time you get new information. After reasoning, if you "
                "find you lack some knowledge, you can call a search engine by <search> "
                "query </search> and it will return the top searched results between "
                "<information> and </information>. You can search as many times as your "
                "want. If you find no further external knowledge needed, you can directly "
                "provide the answer inside <answer> and </answer>, without detailed "
                "illustrations. For example, <answer> Beijing </answer>. Question: when did "
                "humans first land on the moon?\n",
            }
        ],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": ["July 20, 1969", "1969"]}},
        "extra_info": {
            "split": "train",
            "index": 0,
            "question": NQ_OPEN["question"],
            "golden_answers": ["July 20, 1969", "1969"],
        },
    }
    assert (
        second["prompt"][0]["content"].endswith("Question: who sings {this} song?\n")
        and second["extra_info"]["index"] == 1
    )
    (test,) = rows(tmp_path / "out", "test")
    assert (test["extra_info"]["split"], test["reward_model"]["ground_truth"]) == (
        "test",
        {"target": ["Nobody"]},
    )
    assert (
        "train.parquet: 2 rows, longest prompt" in done.stdout
        and done.stdout.count('"data_source": "nq"') == 2
    )


def test_sources_are_merged_with_one_index(run: Run, tmp_path: Path) -> None:
    lay(
        tmp_path,
        {
            "nq/train.jsonl": [NQ_OPEN] * 3,
            "nq/dev.jsonl": [NQ_OPEN] * 7,
            "nq/test.jsonl": [FLASHRAG] * 2,
            "hotpotqa/train.json": [HOTPOT] * 2,
            "hotpotqa/dev.jsonl": [FLASHRAG_HOTPOT],
            "strategyqa/train.jsonl": [
                {"question": "Is it", "golden_answers": [True]},
                {"question": "Is it", "answer": False},
            ],
        },
    )
    given = ["--local_dataset_path", tmp_path, "--test_sources", "strategyqa, nq,hotpotqa"]
    done = run("qa_search_merge.py", "--local_save_dir", tmp_path / "out", *given)
    assert done.returncode == 0, done.stderr
    train, test = rows(tmp_path / "out", "train"), rows(tmp_path / "out", "test")
    assert [row["data_source"] for row in train] == ["nq"] * 3 + ["hotpotqa"] * 2
    assert [row["extra_info"]["index"] for row in train] == [0, 1, 2, 3, 4]
    assert [row["extra_info"]["index"] for row in test] == [0, 1, 2, 3, 4]
    assert [row["data_source"] for row in test] == [
        "strategyqa",
        "strategyqa",
        "nq",
        "nq",
        "hotpotqa",
    ]
    assert train[3]["reward_model"]["ground_truth"] == {"target": ["the lantern"]}
    assert [row["reward_model"]["ground_truth"]["target"] for row in test[:2]] == [["yes"], ["no"]]
    assert train[0]["extra_info"]["supporting_titles"] is None  # unknown
    assert train[3]["extra_info"]["supporting_titles"] == ["Lantern", "Lamp"]
    assert test[4]["extra_info"]["supporting_titles"] == ["Alû", "Lilu"]
    assert "train.parquet: 5 rows (nq 3, hotpotqa 2), longest" in done.stdout
    assert "test.parquet: 5 rows (strategyqa 2, nq 2, hotpotqa 1), longest" in done.stdout
    assert "strategyqa has no test split: its train split is used" in done.stdout
    assert (
        "hotpotqa has no test split: its dev split is used" in done.stdout
        and "nq has no" not in done.stdout
    )
    assert {row["extra_info"]["split"] for row in test} == {
        "test"
    }  # the split of the output file, as in Search-R1


def test_one_file_or_the_same_sources_for_both(run: Run, tmp_path: Path) -> None:
    lay(tmp_path, {"train.jsonl": [NQ_OPEN], "dev.jsonl": [NQ_OPEN] * 2})
    given = ["--local_dataset_path", tmp_path, "--data_sources", "nq"]
    assert run("qa_search_merge.py", "--local_dir", tmp_path / "both", *given).returncode == 0
    assert (len(rows(tmp_path / "both", "train")), len(rows(tmp_path / "both", "test"))) == (1, 2)
    only_test = run(
        "qa_search_merge.py", "--local_dir", tmp_path / "one", *given, "--train_sources", ""
    )
    assert only_test.returncode == 0 and os.listdir(tmp_path / "one") == ["test.parquet"]
    assert only_test.stdout.count('"data_source": "nq"') == 2


GOOD = json.dumps(NQ_OPEN) + "\n"
REFUSED: list[tuple[str, Any, str]] = [
    (
        "nq/train.jsonl",
        GOOD + '{"question": "who", "answer": []}\n',
        "nq/train.jsonl line 2: answer=[] has no answer",
    ),
    (
        "nq/train.jsonl",
        GOOD + '\n{"question": "who", "golden_answers": ["", " "]}',
        "jsonl line 3: golden_answers=['', ' '] has no answer",
    ),
    (
        "nq/train.jsonl",
        [{"question": "who", "answer": [1]}],
        "jsonl line 1: answer=[1] has no answer: expected text or a list of texts",
    ),
    (
        "nq/train.jsonl",
        [{"question": "who", "answer": None}],
        "train.jsonl line 1: answer=None has no answer",
    ),
    (
        "nq/train.jsonl",
        [{"question": "who"}],
        "train.jsonl line 1: the example has no 'golden_answers or answer'; it has question",
    ),
    (
        "nq/train.jsonl",
        [{"answer": ["x"]}],
        "train.jsonl line 1: the example has no 'question'; it has answer",
    ),
    (
        "nq/train.jsonl",
        [{"question": " ", "answer": ["x"]}],
        "train.jsonl line 1: the question is empty",
    ),
    ("nq/train.jsonl", [{"question": None, "answer": ["x"]}], "train.jsonl line 1: "),
    ("nq/train.jsonl", "\n", "nq: the train split has no examples"),
    (
        "hotpotqa/train.json",
        [HOTPOT, {**HOTPOT, "answer": ""}],
        "train.json row 1: answer='' has no answer",
    ),
    (
        "hotpotqa/train.json",
        "[\n{},\n3]",
        "train.json row 0: the example has no 'question'; it has nothing",
    ),
    (
        "hotpotqa/train.json",
        '[{"question": "who", "answer": "I"},\n3]',
        "train.json cannot be read as json: row 1 is a number, not an object",
    ),
    (
        "hotpotqa/train.json",
        '[{"question": "who", "answer": "I"}\n {"question"',
        "train.json cannot be read as json (JSONDecodeError: Expecting ',' delimiter: line 2",
    ),
    (
        "hotpotqa/train.json",
        '[{"question": "who", "answer": "I"},\n\n]',
        "train.json cannot be read as json (JSONDecodeError: Expecting value: line 3",
    ),
    (
        "hotpotqa/train.json",
        '[{"question": "who", "answer": "I"}] 1',
        "train.json cannot be read as json (JSONDecodeError: Extra data: line 1",
    ),
    ("hotpotqa/train.json", "[]", "hotpotqa: the train split has no examples"),
    ("hotpotqa/other.json", "[]", "hotpotqa has none of train.jsonl, train.parquet, train.json"),
]


@pytest.mark.parametrize(("file", "content", "message"), REFUSED, ids=range(len(REFUSED)))
def test_invalid_input_is_named_and_nothing_is_written(
    run: Run, tmp_path: Path, file: str, content: Any, message: str
) -> None:
    good = {"nq/train.jsonl": GOOD, "nq/test.jsonl": GOOD} | (
        {"hotpotqa/train.json": [HOTPOT]} if file.startswith("nq") else {}
    )
    lay(tmp_path, {**good, file: content})
    done = run(
        "qa_search_merge.py",
        "--local_dir",
        tmp_path / "out",
        "--local_dataset_path",
        tmp_path,
        "--test_sources",
        "nq",
    )
    assert done.returncode == 1 and message in done.stderr and len(done.stderr.splitlines()) == 1, (
        done.stderr
    )
    assert not (tmp_path / "out").exists()


def test_invalid_sources_are_named(run: Run, tmp_path: Path) -> None:
    lay(tmp_path, {"nq/train.jsonl": [NQ_OPEN], "hotpotqa/train.json": [HOTPOT]})

    def error(*arguments: str) -> str:
        done = run(
            "qa_search_merge.py",
            "--local_dir",
            tmp_path / "out",
            "--local_dataset_path",
            tmp_path,
            *arguments,
        )
        assert done.returncode != 0 and not (tmp_path / "out").exists()
        return done.stderr

    assert (
        "nq has neither a test nor a dev split, and its train split is in train.parquet already"
        in error("--data_sources", "nq")
    )
    assert "train sources 'nq,nq': a data set is listed twice" in error("--train_sources", "nq,nq")
    assert "no train and no test sources: there is nothing to write" in error("--data_sources", "")
    assert "triviaqa does not exist" in error("--test_sources", "triviaqa,nq")
    assert "invalid choice: 'chat'" in error("--template_type", "chat")
    assert "--hdfs_dir is not supported" in error("--hdfs_dir", "hdfs://x")


def test_only_needed_splits_are_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub, asked = (
        lay(
            tmp_path,
            {
                "nq/train.jsonl": [FLASHRAG],
                "popqa/test.jsonl": [FLASHRAG],
                "musique/dev.jsonl": [FLASHRAG],
            },
        ),
        [],
    )

    def download(source: Any, patterns: list[str]) -> Path:
        asked.extend(patterns)
        return hub

    monkeypatch.setattr(qa.preprocess, "download", download)
    assert len(qa.merge({"train": ["nq"], "test": ["popqa", "musique"]}, None)["test"]) == 2
    assert asked == [
        "nq/train.jsonl",
        "popqa/test.jsonl",
        "musique/test.jsonl",
        "musique/dev.jsonl",
    ]
    with pytest.raises(
        DataError, match="FlashRAG_datasets at ........ has no trivia with train.jsonl"
    ):
        qa.merge({"train": ["trivia"]}, None)


def test_missing_hub_is_explained(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "data_preprocess/nq_search.py", "--local_dir", tmp_path]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    offline = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert offline.returncode == 1
    assert (
        "FlashRAG_datasets cannot be downloaded" in offline.stderr
        and "--local_dataset_path" in offline.stderr
    )


def check_scores(file: Path, count: int) -> None:
    """Check that every prompt is used, and that the scorer of its source accepts its answer."""
    data = PromptDataset(str(file), tiny_tokenizer(), DataSpec(max_prompt_length=4096), "val")
    check = Scorer(ScorerSpec()).self_check([data.row(i) for i in range(len(data))])
    assert check.checked == data.report.kept == count and check.warning() is None


def test_every_ground_truth_scores_and_every_prompt_is_used(run: Run, tmp_path: Path) -> None:
    lay(
        tmp_path,
        {
            "nq/train.jsonl": [NQ_OPEN, FLASHRAG],
            "hotpotqa/train.json": [HOTPOT],
            "nq/test.jsonl": [FLASHRAG],
        },
    )
    assert (
        run(
            "qa_search_merge.py",
            "--local_dir",
            tmp_path,
            "--local_dataset_path",
            tmp_path,
            "--test_sources",
            "nq",
        ).returncode
        == 0
    )
    check_scores(tmp_path / "train.parquet", 3)


@pytest.mark.skipif(
    not (DATA / "nq_open").is_dir() or not (DATA / "hotpotqa").is_dir(), reason="no ../shared/data"
)
def test_original_data_sets(run: Run, tmp_path: Path) -> None:
    (tmp_path / "nq").mkdir()
    (tmp_path / "hotpotqa").mkdir()
    shutil.copy(DATA / "nq_open/dev.jsonl", tmp_path / "nq/dev.jsonl")
    shutil.copy(DATA / "hotpotqa/questions.json", tmp_path / "hotpotqa/train.json")
    given = [
        "--local_dataset_path",
        tmp_path,
        "--train_sources",
        "hotpotqa",
        "--test_sources",
        "nq",
    ]
    assert run("qa_search_merge.py", "--local_dir", tmp_path, *given).returncode == 0
    hotpot, nq = rows(tmp_path, "train"), rows(tmp_path, "test")
    assert (len(hotpot), len(nq)) == (100, 3610)
    assert nq[0]["reward_model"]["ground_truth"]["target"] == [
        "14 December 1972 UTC",
        "December 1972",
    ]
    assert all(row["prompt"][0]["content"].endswith("?\n") for row in hotpot + nq)
    assert all(len(row["extra_info"]["supporting_titles"]) >= 2 for row in hotpot)
    check_scores(tmp_path / "train.parquet", 100)
    check_scores(tmp_path / "test.parquet", 3610)
