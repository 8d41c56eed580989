"""Parquet files of prompts: rows, filtering, truncation, and errors of invalid files."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.models import tiny_tokenizer
from verlite.data.dataset import (
    DataError,
    Lengths,
    PromptDataset,
    RowFiles,
    overlap_note,
    refuse_foreign_tokens,
    share,
)
from verlite.data.prompts import build_prompt
from verlite.spec.roles import DataSpec


def row(text: Any = "2+2?", index: int = 0, **others: Any) -> dict[str, Any]:
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": text}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"split": "train", "index": index},
        **others,
    }


def write(path: Path, *rows: dict[str, Any]) -> str:
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return str(path)


def load(files: Any, split: str = "train", **config: Any) -> PromptDataset:
    return PromptDataset(files, tiny_tokenizer(), DataSpec(**config), split)


def test_rows_are_read_as_written(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", *[row("x" * n, n) for n in range(1, 6)])
    data = load(path)
    assert len(data) == 5 and data.data_sources() == ["openai/gsm8k"]
    third = data.row(2)
    assert third.messages == [{"role": "user", "content": "xxx"}]
    assert third.prompt_ids == build_prompt(tiny_tokenizer(), third.messages)
    assert (third.index, third.data_source, third.ground_truth, third.ability) == (
        2,
        "openai/gsm8k",
        "4",
        "math",
    )
    assert third.extra_info == {"split": "train", "index": 3}
    assert data.where(2) == f"{path} row 2"
    assert str(data.report) == (
        f"train: 5 prompts from {path}; prompt tokens 1 to 5 (median 3, p90 5), limit 512"
    )


def test_files_with_different_columns_are_read_together(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "who?"}]
    question = {
        "data_source": "nq",
        "prompt": chat,
        "reward_model": {"ground_truth": {"target": ["a", "b"]}},
        "id": 7,
    }
    data = load([write(tmp_path / "a.parquet", row()), write(tmp_path / "b.parquet", question)])
    assert data.row(1).ground_truth == {"target": ["a", "b"]}
    assert (data.row(1).ability, data.row(1).extra_info) == (None, {})
    assert data.where(1).endswith("b.parquet row 0") and data.data_sources() == [
        "nq",
        "openai/gsm8k",
    ]


def test_file_without_parquet_suffix_is_read(tmp_path: Path) -> None:
    assert len(load(write(tmp_path / "part-00000", row()))) == 1


def test_other_column_names(tmp_path: Path) -> None:
    mine = {
        "chat": [{"role": "user", "content": "hi"}],
        "kind": "mine",
        "reward_model": {"ground_truth": None},
    }
    only = load(write(tmp_path / "a.parquet", mine), prompt_key="chat", reward_fn_key="kind").row(0)
    assert (only.messages[0]["content"], only.data_source, only.ground_truth) == (
        "hi",
        "mine",
        None,
    )


def test_messages_have_only_their_own_fields(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "a", "name": "Ann"}, {"role": "assistant", "content": "b"}]
    assert load(write(tmp_path / "a.parquet", row(prompt=chat))).row(0).messages == chat


def test_overlong_prompts_are_dropped_and_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", *[row("x" * n, n) for n in (3, 9, 4, 8, 5)])
    data = load(path, max_prompt_length=5, filter_overlong_prompts=True)
    assert [data.row(i).extra_info["index"] for i in range(len(data))] == [3, 4, 5]
    assert [len(data.row(i).prompt_ids) for i in range(len(data))] == [3, 4, 5]
    assert data.where(1).endswith("row 2")
    report = data.report
    assert (report.rows, report.kept, report.dropped, report.truncated) == (5, 3, 2, 0)
    assert str(report).endswith(
        "2 (40%) dropped for their length; prompt tokens 3 to 9 (median 5, p90 9), limit 5"
    )


@pytest.mark.parametrize(
    ("truncation", "text"), [("left", "cdefg"), ("right", "abcde"), ("middle", "abefg")]
)
def test_overlong_prompts_are_truncated_and_counted(
    tmp_path: Path, truncation: str, text: str
) -> None:
    data = load(
        write(tmp_path / "a.parquet", row("abcdefg"), row("abc")),
        max_prompt_length=5,
        truncation=truncation,
    )
    assert tiny_tokenizer().decode(data.row(0).prompt_ids) == text
    assert (data.report.truncated, data.report.kept) == (1, 2)


def test_max_samples(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", *[row("x", n) for n in range(100)])

    def chosen(split: str = "train", **config: Any) -> list[int]:
        data = load(path, split, **config)
        return [data.row(i).extra_info["index"] for i in range(len(data))]

    random = chosen(train_max_samples=10, seed=1)
    assert len(set(random)) == 10 and random == sorted(random) != list(range(10))
    assert random == chosen(train_max_samples=10, seed=1) != chosen(train_max_samples=10, seed=2)
    assert chosen(train_max_samples=10, shuffle=False) == list(range(10))
    assert chosen("val", val_max_samples=10, train_max_samples=5) == list(range(10))
    assert len(chosen(train_max_samples=1000)) == 100
    second = load([path, path], split="val", val_max_samples=10).report
    assert f"10 of 200 rows chosen by data.val_max_samples, none of {path};" in str(second)
    assert "10 of 100 rows chosen by data.train_max_samples;" in str(
        load(path, train_max_samples=10).report
    )


def test_lengths_are_sorted_values_of_the_data() -> None:
    # 20 values: the 10th in order is the median, and 18 of them are at most the 18th.
    assert Lengths.of(list(range(20, 0, -1))) == Lengths(1, 10, 18, 20)
    assert Lengths.of([7]) == Lengths(7, 7, 7, 7)
    assert (share(1, 3), share(3, 2000), share(5, 5)) == ("33%", "0.1%", "100%")


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_first_rows_of_each_file(tmp_path: Path, suffix: str) -> None:
    paths = []
    for name, count in (("a", 9), ("b", 2)):
        path = tmp_path / f"{name}.{suffix}"
        rows = [row(name * (n + 1), n) for n in range(count)]
        if suffix == "parquet":
            pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
        else:
            path.write_text("".join(json.dumps(one) + "\n" for one in rows))
        paths.append(str(path))
    files = RowFiles(paths, DataSpec(), "train", first=3)
    assert files.in_files == 11
    data = PromptDataset(files, tiny_tokenizer(), DataSpec(), "train")
    texts = [data.row(i).messages[0]["content"] for i in range(len(data))]
    assert texts == ["a", "aa", "aaa", "b", "bb"]
    assert "; tried on the first 5 of 11 rows; prompt tokens 1 to 3" in str(data.report)


def test_tokens_that_the_model_does_not_have(tmp_path: Path) -> None:
    data = load(write(tmp_path / "a.parquet", row("aa"), row("b"), row("zc")))
    last = tiny_tokenizer().encode("z")[0]
    refuse_foreign_tokens(data, last + 1)
    with pytest.raises(
        DataError, match=rf"row 2: the prompt has token id {last}, .* {last} tokens"
    ):
        refuse_foreign_tokens(data, last)


def test_overlap_of_training_and_validation_is_reported(tmp_path: Path) -> None:
    train = load(write(tmp_path / "a.parquet", row("a"), row("b"), row("c")))
    validation = load(write(tmp_path / "b.parquet", row("x"), row("b"), row("c")), "val")
    note = overlap_note(train, validation)
    assert (
        note is not None
        and note.startswith("2 of 3 validation prompts are also training prompts")
        and "b.parquet row 1" in note
    )
    assert overlap_note(train, load(write(tmp_path / "c.parquet", row("d")), "val")) is None


WRONG_ROWS = {
    "text for messages": (
        [row(prompt="2+2?")],
        "row 0: column 'prompt' is '2+2?', expected a list of messages {role, content}",
    ),
    "no messages": (
        [row(), row(prompt=[])],
        "row 1: column 'prompt' is [], expected a list of messages {role, content}",
    ),
    "null content": (
        [row(), row(None)],
        "row 1: column 'prompt' has the message {'role': 'user', 'content': None}, expected role "
        "and content, both text",
    ),
    "null source": (
        [row(), row(data_source=None)],
        "row 1: column 'data_source' is None, expected the name of the data source",
    ),
    "no ground truth": (
        [row(reward_model={"style": "rule"})],
        "row 0: column 'reward_model' is {'style': 'rule'}, expected {style, ground_truth}",
    ),
    "empty prompt": ([row(), row("")], "row 1: the prompt has no tokens"),
}


@pytest.mark.parametrize("case", WRONG_ROWS)
def test_error_names_the_invalid_row(tmp_path: Path, case: str) -> None:
    rows, message = WRONG_ROWS[case]
    path = write(tmp_path / "a.parquet", *rows)
    with pytest.raises(DataError) as caught:
        load(path)
    assert str(caught.value) == f"{path} {message}" + (
        ", as data_preprocess/ writes it" if "column" in message else ""
    )


def test_error_names_the_invalid_file(tmp_path: Path) -> None:
    def message(files: Any, **config: Any) -> str:
        with pytest.raises(DataError) as caught:
            load(files, **config)
        return str(caught.value)

    good = write(tmp_path / "good.parquet", row("abcdefgh"), row("abc"))
    missing = str(tmp_path / "missing.parquet")
    assert message([good, missing]).startswith(
        f"{missing} does not exist: make it with data_preprocess/"
    )
    (tmp_path / "a.jsonl").write_text('{"a": 1}')
    assert "a.jsonl has no column" in message(str(tmp_path / "a.jsonl"))
    assert "is not a file" in message(str(tmp_path))
    (tmp_path / "broken.parquet").write_bytes(Path(good).read_bytes()[:-20])
    assert "broken.parquet cannot be read as parquet" in message(str(tmp_path / "broken.parquet"))
    pq.write_table(pa.Table.from_pylist([row()]).slice(0, 0), tmp_path / "empty.parquet")
    pq.write_table(pa.Table.from_pylist([]), tmp_path / "nothing.parquet")
    for name in ("empty", "nothing"):
        assert (
            message(str(tmp_path / f"{name}.parquet")) == f"{tmp_path / name}.parquet has no rows"
        )
    bare = write(
        tmp_path / "bare.parquet", {"prompt": [{"role": "user", "content": "a"}], "answer": "b"}
    )
    assert (
        message(bare)
        == f"{bare} has no column 'data_source', 'reward_model'; its columns are prompt, answer"
    )
    assert message([]) == "data.train_files is empty: name at least one file"
    assert (
        message(good, train_max_samples=0)
        == "data.train_max_samples=0 leaves no prompt; -1 takes all"
    )
    assert message(good, max_prompt_length=2, filter_overlong_prompts=True) == (
        "data.train_files: all 2 prompts have more than data.max_prompt_length=2 tokens, the "
        "shortest 3, so "
        "data.filter_overlong_prompts leaves none. Raise data.max_prompt_length"
    )
    too_long = message(good, max_prompt_length=5)
    assert too_long.startswith(
        f"{good} row 0: the prompt has 8 tokens, 5 are allowed by data.max_prompt_length; 1 of 2 "
        f"prompts"
    )
    assert (
        "data.filter_overlong_prompts=True" in too_long
        and "data.truncation=left, right or middle" in too_long
    )


def test_damaged_parquet_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    """One byte is another one. Some damage, such as to an unused statistic, changes nothing."""
    path = tmp_path / "damaged.parquet"
    sound = Path(write(path, *[row(f"{n}+{n}=?", n) for n in range(8)])).read_bytes()
    refusals = set()
    for position in range(0, len(sound), 3):
        path.write_bytes(sound[:position] + bytes([sound[position] ^ 0x80]) + sound[position + 1 :])
        try:
            RowFiles(str(path), DataSpec(), "train")
        except DataError as error:
            refusals.add(str(error))
    assert len(refusals) > 20 and any("UTF8" in text for text in refusals)
    assert all("damaged.parquet" in text and "\n" not in text for text in refusals)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('touch MARK') }}",
        "{% include 'MARK' %}",
        "{{ messages.append(1) }}",
        "{% for i in range(1000000000) %}x{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{",
    ],
)
def test_a_hostile_template_is_an_error_that_names_the_row(tmp_path: Path, template: str) -> None:
    tokenizer = tiny_tokenizer()
    mark = tmp_path / "mark"
    tokenizer.chat_template = template.replace("MARK", str(mark))
    path = write(tmp_path / "a.parquet", row())
    with pytest.raises(DataError, match="a.parquet row 0: the chat template failed: "):
        PromptDataset(path, tokenizer, DataSpec(), "train")
    assert not mark.exists()


def test_template_error_names_the_row(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{{ raise_exception('no system role') if messages[0].role == 'system' }}{{ "
        "messages[0].content }}"
    )
    path = write(tmp_path / "a.parquet", row(), row(prompt=[{"role": "system", "content": "a"}]))
    with pytest.raises(
        DataError, match="a.parquet row 1: the chat template failed: TemplateError: no system role"
    ):
        PromptDataset(path, tokenizer, DataSpec(), "train")


def test_the_teachers_prompts_are_of_the_same_rows(tmp_path: Path) -> None:
    rows = [row("x" * n, hint=row(f"{'y' * (8 - n)}")["prompt"]) for n in range(1, 8)]
    path = write(tmp_path / "a.parquet", *rows)
    config: dict[str, Any] = {"teacher_prompt_key": "hint", "max_prompt_length": 5}
    data = load(path, filter_overlong_prompts=True, **config)
    found = [data.row(i) for i in range(len(data))]
    pairs = [(len(one.prompt_ids), len(one.teacher_prompt_ids or ())) for one in found]
    assert pairs == [(3, 5), (4, 4), (5, 3)]  # a row is dropped if either prompt is too long
    assert (data.report.kept, data.report.dropped) == (3, 4)
    cut = load(path, truncation="left", **config)
    assert [len(cut.row(i).teacher_prompt_ids or ()) for i in range(7)] == [5, 5, 5, 4, 3, 2, 1]
    with pytest.raises(DataError, match=r"row 0: the prompt has 7 tokens, 5 are allowed"):
        load(path, **config)
    assert (
        load(path, "val", max_prompt_length=7, teacher_prompt_key="no").row(0).teacher_prompt_ids
        is None
    )  # validation has no teacher
    with pytest.raises(DataError, match="column 'ability' is 'math', expected a list of messages"):
        load(path, max_prompt_length=9, teacher_prompt_key="ability")
