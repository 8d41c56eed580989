"""`verlite show`: a step's samples as a person reads them, with and without colours."""

import io
import json
import re

import pytest
from rich.console import Console
from typer.testing import CliRunner

from verlite.cli import app
from verlite.report.samples import STYLES, picture, read_samples, worst

SEARCHED = {
    "uid": "3-0",
    "index": 7,
    "data_source": "nq",
    "prompt": "Question: who?\n",
    "ground_truth": {"target": ["Ann", "Anne"]},
    "response": "<search>who</search><answer>Bob</answer>",
    "score": 0.2,
    "reward_parts": {"acc": 0.0, "pred": "Bob"},
    "status": "done",
    "error": None,
    "response_tokens": 31,
    "trained_tokens": 20,
    "weight_version": 3,
    "transcript": [
        ["model", "<search>who</search>"],
        ["tool", "\n\n<information>Doc 1</information>\n\n"],
        ["model", "<answer>Bob</answer>"],
    ],
    "turn_infos": [
        {
            "action": "search",
            "query": "who",
            "called": True,
            "seconds": 0.256,
            "retries": 2,
            "cached": True,
        },
        {"action": "answer"},
    ],
}
FAILED = SEARCHED | {
    "index": 8,
    "score": None,
    "status": "error",
    "error": "ToolError: down",
    "trained_tokens": 0,
    "turn_infos": [],
    "reward_parts": {},
    "transcript": [["model", "<search>lost</search>"]],
    "response": "",
}
SINGLE = {
    key: value
    for key, value in SEARCHED.items()
    if key not in ("transcript", "turn_infos", "trained_tokens")
} | {
    "index": 9,
    "score": 1.0,
    "response": "It is [b]Ann[/b] 東",
    "ground_truth": "Ann",
    "prompt": "x" * 700,
}


@pytest.fixture
def run_dir(tmp_path):
    folder = tmp_path / "rollouts"
    folder.mkdir()
    for name, samples in {
        "step_2": [SINGLE],
        "step_10": [SEARCHED, FAILED, SINGLE],
        "val_step_4": [FAILED],
    }.items():
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps(sample) + "\n" for sample in samples), encoding="utf-8"
        )
    return tmp_path


def show(*arguments):
    result = CliRunner().invoke(app, ["show", *map(str, arguments)])
    return result.exit_code, result.output


def test_the_newest_step_is_shown(run_dir):
    code, text = show(run_dir)
    assert code == 0 and "step_10.jsonl: 3 of 3 samples" in text.replace("\n", "")
    for said in (
        "score 0.2",
        "acc 0",
        "pred 'Bob'",
        "status done",
        "nq",
        "prompt 7",
        "1 tool call ",
        "31 tokens, 20 trained",
        "turn 1",
        "turn 2",
        "<search>who</search>",
        "<information>Doc 1</information>",
        "0.26 s",
        "cached",
        "2 retries",
        "Ann | Anne",
        "no score",
        "status error",
        "ToolError: down",
        "31 tokens, 0 trained",
        "0 tool calls",
        "It is [b]Ann[/b] 東",
        "score 1",
    ):
        assert said in text, said
    order = [
        text.index(said)
        for said in (
            "Question: who?",
            "<search>who",
            "Doc 1",
            "<answer>Bob",
            "Ann | Anne",
            "no score",
        )
    ]
    assert order == sorted(order)


def test_a_step_validation_and_a_number_of_samples(run_dir):
    assert "step_2.jsonl: 1 of 1" in show(run_dir, "--step", 2)[1].replace("\n", "")
    code, text = show(run_dir, "--val")
    assert code == 0 and "val_step_4.jsonl" in text.replace("\n", "") and "no score" in text
    code, text = show(run_dir, "--count", 1)
    assert "1 of 3" in text.replace("\n", "") and "score 0.2" in text and "no score" not in text


def test_the_worst_come_first_and_failures_before_all(run_dir):
    assert [sample["index"] for sample in worst([SINGLE, SEARCHED, FAILED], 3)] == [8, 7, 9]
    assert [
        sample["score"] for sample in worst([{"score": s} for s in (0.0, -1.0, None, 2.0)], 3)
    ] == [None, -1.0, 0.0]
    code, text = show(run_dir, "--worst", 2)
    assert code == 0 and text.index("no score") < text.index("score 0.2") and "score 1 " not in text


def test_long_prompts_are_cut_at_their_beginning_unless_asked_for(run_dir):
    text = show(run_dir, "--step", 2)[1]
    assert text.count("x") < 700 and "…" in text
    whole = show(run_dir, "--step", 2, "--whole")[1]
    assert whole.count("x") >= 700 and "…" not in whole


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--step", 3], "no samples of step 3; there are steps 2, 10"),
        (["--val", "--step", 2], "no samples of step 2; there are steps 4"),
    ],
)
def test_a_step_that_is_not_there(run_dir, arguments, said):
    code, text = show(run_dir, *arguments)
    assert code == 2 and said in text and "Traceback" not in text


def test_a_folder_without_samples_and_files_that_are_not_whole(run_dir, tmp_path):
    code, text = show(tmp_path / "nothing")
    assert code == 2 and "has no step_N.jsonl" in text and "trainer.rollouts_per_step" in text
    path = run_dir / "rollouts" / "step_11.jsonl"
    for damaged in (json.dumps(SINGLE)[:-20].encode(), b"\xff\xfe{}\n"):
        path.write_bytes(damaged)
        code, text = show(run_dir)
        assert (
            code == 2
            and "step_11.jsonl is not whole" in text.replace("\n", "")
            and "Traceback" not in text
        )
    path.write_text("")
    assert show(run_dir)[0] == 0
    with pytest.raises(ValueError, match="is not whole"):
        path.write_text("{")
        read_samples(run_dir, None)


@pytest.mark.parametrize("sample", [SEARCHED, FAILED, SINGLE], ids=["searched", "failed", "single"])
def test_colours_add_nothing_to_the_words(sample):
    texts = []
    for colours in (True, False):
        out = io.StringIO()
        system = "truecolor" if colours else None
        Console(
            file=out, force_terminal=colours, no_color=not colours, width=160, color_system=system
        ).print(picture(sample))
        texts.append(out.getvalue())
    colour = re.compile(r"\x1b\[[0-9;]*m")
    assert colour.search(texts[0]) and not colour.search(texts[1])
    assert colour.sub("", texts[0]) == texts[1]


def test_colours_tell_what_was_trained():
    def styled(sample):
        out = io.StringIO()
        Console(file=out, force_terminal=True, width=160, color_system="standard").print(
            picture(sample)
        )
        return out.getvalue()

    codes = {"green": "\x1b[32m", "yellow": "\x1b[33m", "cyan": "\x1b[36m"}
    assert f"{codes[STYLES['trained']]}<search>who</search>" in styled(SEARCHED)
    assert f"{codes[STYLES['tool']]}<information>" in styled(SEARCHED)
    assert f"{codes[STYLES['not trained']]}<search>lost</search>" in styled(FAILED)
