"""`verlite show`: samples of a step in the terminal, with and without colors."""

import io
import json
import re

import pytest
from rich.console import Console
from typer.testing import CliRunner

from verlite.cli import app
from verlite.control.flow import Flow
from verlite.report.samples import STYLES, drawn_prompts, lowest_scores, read_samples, render

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

REQUESTS = [
    {
        "request": n,
        "parent": parent,
        "root": root,
        "branch": branch,
        "context": context,
        "given": given,
        "sampled": 2,
        "credit": credit,
    }
    for n, parent, root, branch, context, given, credit in [
        (0, None, "first", 0, 3, 3, 1.0),
        (1, 0, None, 0, 6, 1, 1.0),
        (3, 0, None, 1, 7, 2, 0.5),
        (2, None, "new", 2, 1, 1, 2.0),
    ]
]
"""A turn, its continuation, another continuation, and a sub-agent that began before that."""
PROGRAM = SEARCHED | {
    "turn_infos": [{}] * 4,
    "requests": REQUESTS,
    "agent_log": "asked [b]twice[/b]\n0.5\n",
    "transcript": [
        *(["model", "one"], ["tool", "sure?"], ["model", "two"], ["tool", "Q one why?"]),
        *(["model", "three"], ["tool", "sub"], ["model", "four"]),
    ],
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


def test_show_prints_newest_step(run_dir):
    code, text = show(run_dir)
    assert code == 0 and "step_10.jsonl: 3 of 3 samples" in text.replace("\n", "")
    for expected in (
        "score 0.2",
        "acc 0",
        "pred 'Bob'",
        "status done",
        "nq",
        "prompt #7",
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
        assert expected in text, expected
    order = [
        text.index(part)
        for part in (
            "Question: who?",
            "<search>who",
            "Doc 1",
            "<answer>Bob",
            "Ann | Anne",
            "no score",
        )
    ]
    assert order == sorted(order)


def test_show_options_step_val_and_count(run_dir):
    assert "step_2.jsonl: 1 of 1" in show(run_dir, "--step", 2)[1].replace("\n", "")
    code, text = show(run_dir, "--val")
    assert code == 0 and "val_step_4.jsonl" in text.replace("\n", "") and "no score" in text
    code, text = show(run_dir, "--count", 1)
    assert "1 of 3" in text.replace("\n", "") and "score 0.2" in text and "no score" not in text


def test_worst_sorts_failures_first(run_dir):
    assert [sample["index"] for sample in lowest_scores([SINGLE, SEARCHED, FAILED], 3)] == [8, 7, 9]
    scored = [{"score": score} for score in (0.0, -1.0, None, 2.0)]
    assert [sample["score"] for sample in lowest_scores(scored, 3)] == [None, -1.0, 0.0]
    code, text = show(run_dir, "--worst", 2)
    assert code == 0 and text.index("no score") < text.index("score 0.2") and "score 1 " not in text


def test_long_prompts_lose_their_start_without_whole(run_dir):
    text = show(run_dir, "--step", 2)[1]
    assert text.count("x") < 700 and "…" in text
    whole = show(run_dir, "--step", 2, "--whole")[1]
    assert whole.count("x") >= 700 and "…" not in whole


def save_groups(run_dir, content: str, step: int = 4) -> None:
    """Write a checkpoint's state, and the manifest that makes it one."""
    folder = run_dir / f"global_step_{step}"
    folder.mkdir(exist_ok=True)
    (folder / "manifest.json").write_text("{}")
    (folder / "state.json").write_text(content)


def a_flow() -> Flow:
    """Return a flow with 13 prompts: 4 trained, 2 filtered, 3 ready, 1 running, 3 queued."""
    flow = Flow(groups_per_step=4, bound=2, depth=1, engines=2, swaps=True)
    flow.published()
    flow.draw(8)
    flow.assign()
    for number in range(8):
        flow.finished(number)
    flow.trained([0, 1, 2, 3])
    flow.filtered(7, "alike")
    flow.filtered(6, "alike")
    flow.published()
    flow.draw(2)
    flow.assign()
    flow.finished(8)
    flow.draw(3)
    return flow


def test_prompts_of_the_newest_checkpoint_of_an_asynchronous_run(run_dir):
    flow = a_flow()
    assert sum(flow.counts().values()) == 13
    state = {"step": 1, "groups": {"flow": flow.state_dict()}}
    save_groups(run_dir, json.dumps(state))
    save_groups(run_dir, "{}", step=3)
    (run_dir / "global_step_5").mkdir()  # not complete
    line = "global_step_4: 13 prompts drawn: 4 trained, 3 finished and waiting, 1 running, 3 queued"
    assert drawn_prompts(run_dir) == f"{line}, 2 filtered"
    code, text = show(run_dir)
    assert code == 0 and f"{line}, 2 filtered" in " ".join(text.split())
    save_groups(run_dir, "{}", step=6)  # one of trainer.mode=sync
    assert drawn_prompts(run_dir) == "" and " drawn" not in show(run_dir)[1]


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "5",
        "[" * 100_000,
        '{"groups": null}',
        '{"groups": {"flow": {"next": 1, "gone": {"trained": 2}, "groups": []}}}',
        '{"groups": {"flow": {"next": 2, "gone": {"trained": 2}, "groups": [[1]]}}}',
        '{"groups": {"flow": {"next": 3, "gone": {"trained": 2}, "groups": [[1, "[red]"]]}}}',
        '{"groups": {"flow": {"next": 2.0, "gone": {"trained": 2}, "groups": []}}}',
        '{"groups": {"flow": {"next": 0, "gone": {"trained": 2, "filtered": -2}, "groups": []}}}',
        '{"groups": {"flow": {"next": 2, "gone": [], "groups": []}}}',
    ],
)
def test_a_damaged_checkpoint_does_not_hide_samples(run_dir, damage):
    save_groups(run_dir, damage)
    code, text = show(run_dir)
    text = " ".join(text.split())
    assert code == 0 and "score 0.2" in text and "prompts drawn" not in text
    assert "state.json of the newest checkpoint cannot be read: " in text
    assert ("[red]" in text) == ("[red]" in damage)  # text of a file is no markup


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", 3], "no samples of step 3. Available steps: 2, 10"),
        (["--val", "--step", 2], "no samples of step 2. Available steps: 4"),
    ],
)
def test_unknown_step_lists_available_steps(run_dir, arguments, message):
    code, text = show(run_dir, *arguments)
    assert code == 2 and message in text and "Traceback" not in text


def test_missing_samples_and_damaged_files(run_dir, tmp_path):
    code, text = show(tmp_path / "nothing")
    assert code == 2 and "has no step_N.jsonl" in text and "trainer.rollouts_per_step" in text
    code, text = show(run_dir / "rollouts" / "step_2.jsonl")
    assert code == 2 and "is a file. Give a run directory" in text.replace("\n", "")
    path = run_dir / "rollouts" / "step_11.jsonl"
    for damaged in (json.dumps(SINGLE)[:-20].encode(), b"\xff\xfe{}\n"):
        path.write_bytes(damaged)
        code, text = show(run_dir)
        assert (
            code == 2
            and "step_11.jsonl is damaged" in text.replace("\n", "")
            and "Traceback" not in text
        )
    path.write_text("")
    assert show(run_dir)[0] == 0
    malformed = [json.dumps(SINGLE | change) for change in ({"status": 1, "reward_parts": 2}, {})]
    path.write_text("\n".join([*malformed, "[]", '{"score": "x"}']))
    code, text = show(run_dir, "--worst", "4")
    assert code == 0 and "2 of 2 samples" in text
    assert "lines that cannot be read: 2" in text and "sample 1 is malformed" in text
    with pytest.raises(ValueError, match="is damaged"):
        path.write_text("{")
        read_samples(run_dir, None)


@pytest.mark.parametrize("sample", [SEARCHED, FAILED, SINGLE], ids=["searched", "failed", "single"])
def test_colors_do_not_change_the_text(sample):
    texts = []
    for colors in (True, False):
        out = io.StringIO()
        system = "truecolor" if colors else None
        Console(
            file=out, force_terminal=colors, no_color=not colors, width=160, color_system=system
        ).print(render(sample))
        texts.append(out.getvalue())
    color = re.compile(r"\x1b\[[0-9;]*m")
    assert color.search(texts[0]) and not color.search(texts[1])
    assert color.sub("", texts[0]) == texts[1]


def test_colors_mark_trained_text():
    def styled(sample):
        out = io.StringIO()
        Console(file=out, force_terminal=True, width=160, color_system="standard").print(
            render(sample)
        )
        return out.getvalue()

    codes = {"green": "\x1b[32m", "yellow": "\x1b[33m", "cyan": "\x1b[36m"}
    assert f"{codes[STYLES['trained']]}<search>who</search>" in styled(SEARCHED)
    assert f"{codes[STYLES['tool']]}<information>" in styled(SEARCHED)
    assert f"{codes[STYLES['not trained']]}<search>lost</search>" in styled(FAILED)


def test_the_requests_of_an_agent_program_are_a_tree():
    console = Console(file=io.StringIO(), width=100)
    console.print(render(PROGRAM))
    lines = [" ".join(line.split()) for line in console.file.getvalue().splitlines()]
    begin = lines.index("requests turn 1: 3 given, 2 sampled")
    assert lines[begin + 1 : begin + 4] == [
        "├── turn 2: 1 given, 2 sampled",
        "└── turn 3: 2 given, 2 sampled x 0.5",
        "turn 4: new conversation, 1 given, 2 sampled x 2",
    ]
    begin = lines.index("turn 1 one")
    assert lines[begin + 1 : begin + 7] == [
        *("tool sure?", "turn 2 two", "branch 2 Q one why?"),
        *("turn 3 three", "branch 3 sub", "turn 4 four"),
    ]
    assert "log asked [b]twice[/b]" in lines and "0.5" in lines
    assert " 4 requests " in lines[0] and "tool call" not in lines[0]
