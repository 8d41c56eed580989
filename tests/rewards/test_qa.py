"""Question answering: scores computed by hand, text that counts, and the structure against a
regex over a marked-up string.
"""

import random
import re
import time
from typing import Any

import numpy as np
import pytest

from verlite.contracts.rewards import check_reward
from verlite.rewards.qa import (
    compute_score,
    contain_gold,
    gold_answers,
    last_answer,
    matches,
    normalize,
    observations,
)
from verlite.rewards.result import RewardItem
from verlite.rewards.scorer import Scorer
from verlite.spec.roles import ScorerSpec

Segments = list[list[str]]

FOUND = '\n\n<information>Doc 1(Title: "China") Its capital is Beijing.</information>\n\n'
MISSED = '\n\n<information>Doc 1(Title: "Peru") Its capital is Lima.</information>\n\n'
INVALID_ACTION = (
    "\nThis was no action. To search, I should put the query between <search> and </search>. Let "
    "me try again.\n"
)
SEARCH = "<think>I look.</think>\n<search>capital</search>"
ANSWER = "<think>So.</think><answer> Beijing </answer>"
THOUGHT = "<think>So.</think>\n"
WRONG = "<answer>Lima</answer>"
FORMAT = {"structure_format_score": 0.2, "final_format_score": 0.1, "retrieval_score": 0.05}


def score(segments: Segments, golds: Any = "Beijing", **kwargs: Any) -> dict[str, Any]:
    text = "".join(part for who, part in segments if who == "model")
    return compute_score(
        "nq", text, {"target": golds}, {"trajectory": {"segments": segments}}, **kwargs
    )


TABLE = [
    ("valid, right, found", [["model", SEARCH], ["tool", FOUND], ["model", ANSWER]], 1, 1, 1, 1),
    ("valid, right, missed", [["model", SEARCH], ["tool", MISSED], ["model", ANSWER]], 1, 1, 1, 0),
    ("valid, right, no search", [["model", ANSWER]], 1, 1, 1, 0),
    (
        "not valid, right",
        [["model", SEARCH], ["tool", FOUND], ["model", "<answer>Beijing</answer>"]],
        0.8,
        1,
        0,
        0,
    ),
    (
        "valid, wrong, found",
        [["model", SEARCH], ["tool", FOUND], ["model", THOUGHT + WRONG]],
        0.25,
        0,
        1,
        1,
    ),
    (
        "valid, wrong, missed",
        [["model", SEARCH], ["tool", MISSED], ["model", THOUGHT + WRONG]],
        0.2,
        0,
        1,
        0,
    ),
    (
        "not valid, wrong, found",
        [["model", SEARCH], ["tool", FOUND], ["model", WRONG]],
        0.1,
        0,
        0,
        0,
    ),
    (
        "not valid, none",
        [["model", SEARCH], ["tool", FOUND], ["model", "It is Beijing."]],
        0,
        0,
        0,
        0,
    ),
]


@pytest.mark.parametrize(
    ("segments", "expected", "acc", "valid", "retrieved"),
    [row[1:] for row in TABLE],
    ids=[row[0] for row in TABLE],
)
def test_scores_by_structure_and_answer(
    segments: Segments, expected: float, acc: float, valid: float, retrieved: float
) -> None:
    got = score(segments, **FORMAT)
    assert got["score"] == pytest.approx(expected)
    assert (got["acc"], got["format_valid"], got["retrieved"]) == (acc, valid, retrieved)
    assert score(segments) == {**got, "score": acc}  # without the scores for form: the method alone


def test_only_text_of_the_model_contains_answers() -> None:
    """The prompt's example is <answer> Beijing </answer>; tool text and the invalid action's hint
    hold tags, too.
    """
    in_passage = "\n\n<information>One writes <answer>Beijing</answer> here.</information>\n\n"
    hint = (
        INVALID_ACTION
        + "If I want to give the final answer, I should put it between <answer> and </answer>."
    )
    for tool, text in ((in_passage, SEARCH), (hint, "I do not know.")):
        got = score(
            [["model", text], ["tool", tool], ["model", "I give up: and"]],
            ["Beijing", "and"],
            **FORMAT,
        )
        assert (got["score"], got["acc"], got["pred"]) == (0, 0, "")
    got = score([["model", SEARCH], ["tool", in_passage], ["model", THOUGHT + WRONG]], **FORMAT)
    assert (got["score"], got["pred"], got["format_valid"]) == (
        0.25,
        "Lima",
        1,
    )  # tags inside a passage are the passage's


def test_last_answer_counts() -> None:
    two = "<answer>Lima</answer> or <answer>\nBeijing\n</answer>"
    assert last_answer(two) == "Beijing"
    assert last_answer(two + "<answer>Ro") == "Beijing"  # cut off
    assert last_answer("<answer>a<answer>b</answer>") == "a<answer>b"
    assert last_answer("</answer>Beijing<answer>") is None
    assert last_answer("<answer></answer>") == ""
    assert compute_score("nq", two, {"target": ["Beijing"]}, None, **FORMAT)["score"] == 0.8
    assert (
        compute_score("nq", "<answer></answer>", {"target": ["Beijing"]}, None, **FORMAT)["score"]
        == 0.1
    )  # an empty answer is a wrong answer


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Beatles!", "beatles"),
        ("an apple a day", "apple day"),
        ("A.B.C.", "abc"),
        ("U.S.A.", "usa"),
        ("the U.S. \n dollar", "us dollar"),
        ("Theatre", "theatre"),  # an article only as a word
        ("a-team", "ateam"),  # punctuation goes first
        ("14 December 1972 UTC", "14 december 1972 utc"),
        ("$1,000.50", "100050"),
        ("Łódź, POLAND", "łódź poland"),
        ("“quoted”", "“quoted”"),  # ASCII punctuation only
        ("A+", ""),
        ("", ""),
    ],
)
def test_normalize(text: str, normal: str) -> None:
    assert normalize(text) == normal


def test_em_and_sub_em() -> None:
    golds = ["14 December 1972 UTC", "December 1972"]
    assert matches("the December, 1972", golds)
    assert not matches("in December 1972", golds)
    assert matches("in December 1972", golds, "sub_em")
    assert not matches(
        "1972", golds, "sub_em"
    )  # the gold answer in what is text, not the other way round
    text = "<think>x</think><answer>It was in December 1972.</answer>"
    exact, contained = (
        compute_score("nq", text, golds, method=method) for method in ("em", "sub_em")
    )
    assert (exact["score"], exact["acc"], contained["score"], contained["acc"]) == (0, 0, 1, 1)


@pytest.mark.parametrize("gold", ["A+", "the", "*", "---", "A", "  "])
def test_gold_answer_that_normalizes_to_nothing_is_compared_as_written(gold: str) -> None:
    """NQ-open has such answers: "A+", "*", "---" and ")"."""
    for method in ("em", "sub_em"):
        for text in ("", "an", "anything at all", "?"):
            assert not matches(text, [gold], method)
        assert matches(f" {gold.lower()} ", [gold], method) == bool(gold.strip())
        assert matches("Beijing", [gold, "Beijing"], method)
    assert not contain_gold(["a + the * --- text"], [gold]) and contain_gold(
        ["of Beijing"], [gold, "Beijing"]
    )


MODEL_TEXTS = {
    "text before": "Well, " + ANSWER,
    "text between": "<think>a</think> so <answer>Beijing</answer>",
    "text after": ANSWER + " done",
    "an answer after the end": ANSWER + "<answer>Beijing</answer>",
    "a thought after the end": ANSWER + "<think>x</think>",
    "no thought": "<answer>Beijing</answer>",
    "two thoughts": "<think>a</think><think>b</think><answer>Beijing</answer>",
    "a tag inside a thought": "<think>I could <search> it</think><answer>Beijing</answer>",
    "an open thought": "<think>a<answer>Beijing</answer>",
    "a search without results": SEARCH + ANSWER,
    "its own information": SEARCH + "<information>Beijing</information>" + ANSWER,
    "information inside a thought": (
        "<think><information>Beijing</information></think><answer>Beijing</answer>"
    ),
}


@pytest.mark.parametrize("text", MODEL_TEXTS.values(), ids=MODEL_TEXTS)
def test_invalid_structures(text: str) -> None:
    assert observations([["model", text]]) is None
    assert compute_score("nq", text, "Beijing", {}, **FORMAT)["format_valid"] == 0


def test_tool_text_must_be_information_after_a_search() -> None:
    good = [["model", SEARCH], ["tool", FOUND], ["model", ANSWER]]
    assert observations(good) == ['Doc 1(Title: "China") Its capital is Beijing.']
    assert (
        observations(
            [["model", SEARCH], ["tool", FOUND]] * 2 + [["model", ANSWER + "\n"], ["tool", " "]]
        )
        is not None
    )
    assert observations(
        [["model", SEARCH], ["tool", "<information></information>"], ["model", ANSWER]]
    ) == [""]
    for wrong in (
        [["model", "what?"], ["tool", INVALID_ACTION], *good],
        [["model", "<think>a</think>"], ["tool", INVALID_ACTION], *good],
        [["model", SEARCH], ["tool", INVALID_ACTION], ["model", ANSWER]],
        [["tool", FOUND], *good],
        [["model", SEARCH], ["tool", FOUND], ["tool", FOUND], ["model", ANSWER]],
        [*good, ["tool", FOUND]],
        [["model", SEARCH], ["tool", "<information>cut off"], ["model", ANSWER]],
        [["model", SEARCH], ["tool", FOUND], ["model", SEARCH]],  # out of turns
        [],
    ):
        assert observations(wrong) is None
    # Information written by the model was not retrieved, even if the structure is right.
    assert score([["model", SEARCH + FOUND + THOUGHT + WRONG]], **FORMAT)["score"] == 0.1


def naively(segments: Segments) -> bool:
    """Return whether a trajectory is valid, by one regular expression.

    Each block is replaced by a capital letter, so texts must not contain capital letters.
    """
    marked = "".join(
        text if who == "model" else f"\0{text.strip()}\0" if text.strip() else " "
        for who, text in segments
    )
    marked = re.sub("\0<information>[^\0]*</information>\0", "I", marked)
    for name, letter in (("think", "T"), ("search", "S"), ("answer", "A")):
        marked = re.sub(f"<{name}>[^\0<A-Z]*</{name}>", letter, marked)
    return re.fullmatch(r"\s*T\s*(S\s*I\s*T\s*)*A\s*", marked) is not None


def test_structure_agrees_with_a_regex_on_random_trajectories() -> None:
    """Valid trajectories, with up to two pieces removed, repeated, swapped or inserted."""
    chance = random.Random(0)
    pieces = [
        "<think>",
        "</think>",
        "<search>",
        "</search>",
        "<answer>",
        "</answer>",
        "<information>",
        "</information>",
        "x",
        " ",
        "\n",
    ]
    tools = [
        "\n\n<information>doc <think> </answer></information>\n\n",
        "\nthat was no action.\n",
        "<information>cut",
        " ",
    ]
    valid = 0
    for _ in range(5000):
        tokens: list[tuple[str, str]] = []
        for _ in range(chance.randrange(3)):
            tokens += [
                ("model", piece)
                for piece in ("<think>", "x", "</think>", "\n", "<search>", "x", "</search>")
            ]
            tokens += [("tool", tools[0])]
        tokens += [
            ("model", piece) for piece in ("<think>", "x", "</think>", "<answer>", "x", "</answer>")
        ]
        for _ in range(chance.randrange(3)):
            at = chance.randrange(len(tokens))
            other = chance.randrange(len(tokens))
            new = (
                ("tool", chance.choice(tools))
                if chance.random() < 0.3
                else ("model", chance.choice(pieces))
            )
            change = chance.randrange(4)
            if change == 0 and len(tokens) > 1:
                del tokens[at]
            elif change == 1:
                tokens.insert(at, tokens[other])
            elif change == 2:
                tokens[at], tokens[other] = tokens[other], tokens[at]
            else:
                tokens.insert(at, new)
        segments: Segments = []
        for who, text in tokens:
            if who == "model" and segments and segments[-1][0] == "model":
                segments[-1][1] += text
            else:
                segments.append([who, text])
        assert (observations(segments) is not None) == naively(segments), segments
        valid += naively(segments)
    assert 1000 < valid < 4000


@pytest.mark.parametrize(
    "truth",
    [
        {"target": ["Beijing", "Peking"]},
        {"target": "Beijing"},
        ["Beijing"],
        "Beijing",
        {"target": np.array(["x", "Beijing"], dtype=object)},
    ],
    ids=str,
)
def test_ground_truth_formats(truth: Any) -> None:
    assert compute_score("nq", ANSWER, truth)["score"] == 1
    assert compute_score("nq", THOUGHT + WRONG, truth)["score"] == 0


@pytest.mark.parametrize(
    "truth",
    [
        None,
        {},
        {"target": []},
        {"target": ""},
        [" "],
        {"target": [None]},
        {"answer": "x"},
        5,
        np.array([]),
    ],
    ids=str,
)
def test_row_without_an_answer_is_an_error(truth: Any) -> None:
    with pytest.raises(ValueError, match="ground_truth=.* has no answers"):
        gold_answers(truth)


def test_invalid_arguments_are_errors() -> None:
    with pytest.raises(ValueError, match="method='exact' is not one of em, sub_em"):
        compute_score("nq", ANSWER, "x", method="exact")
    with pytest.raises(ValueError, match=r"retrieval_score=1.5 is outside \[0, 1\]"):
        compute_score("nq", ANSWER, "x", retrieval_score=1.5)
    with pytest.raises(
        ValueError, match="a segment of the trajectory is by 'user', expected model or tool"
    ):
        observations([["user", ANSWER]])


@pytest.mark.parametrize(
    "part",
    ["<answer>", "<answer></answer>", "<think>", "<", "a ", "</answer>", "<search> <answer> "],
)
def test_scoring_time_is_linear(part: str) -> None:
    """A backtracking search for pairs takes minutes on such texts."""
    text = part * (300_000 // len(part))
    began = time.monotonic()
    score(
        [["model", text], ["tool", f"<information>{text}</information>"], ["model", text]],
        ["x" * 100],
        method="sub_em",
        **FORMAT,
    )
    assert time.monotonic() - began < 10


SOURCES = (
    "nq triviaqa popqa hotpotqa 2wikimultihopqa musique bamboogle web_questions strategyqa "
    "searchR1_nq searchR1_hotpotqa"
).split()


def test_search_r1_sources_use_this_scorer() -> None:
    scorer = Scorer(ScorerSpec(reward_kwargs=FORMAT))
    scorer.check_signature(SOURCES)
    items = [RewardItem(source, THOUGHT + WRONG, {"target": ["Beijing"]}) for source in SOURCES]
    results = scorer.score(items)
    assert [result.score for result in results] == [0.2] * len(SOURCES)
    assert results[0].parts == {"acc": 0.0, "format_valid": 1.0, "retrieved": 0.0, "pred": "Lima"}
    assert not scorer._pools  # in this process


def test_scorer_passes_the_contract() -> None:
    assert check_reward("verlite.rewards.qa:compute_score", dict(FORMAT)) == []


def test_answer_must_be_in_one_turn():
    """Like the environment, which reads turn by turn: a tag that is left open belongs to its turn
    alone.
    """
    turns = [
        ["model", "<answer> hmm <search>q</search>"],
        ["tool", "..."],
        ["model", "<answer>Rome</answer>"],
    ]
    text = "".join(part for who, part in turns if who == "model")
    assert compute_score("nq", text, "Rome", {"trajectory": {"segments": turns}})["pred"] == "Rome"
    split = [["model", "<ans"], ["tool", "..."], ["model", "wer>Rome</answer>"]]
    scored = compute_score(
        "nq", "<answer>Rome</answer>", "Rome", {"trajectory": {"segments": split}}
    )
    assert scored["pred"] == "" and scored["score"] == 0.0


def test_format_never_scores_above_a_right_answer():
    with pytest.raises(
        ValueError, match="structure_format_score . retrieval_score = 0.9 . 0.2 is above 1"
    ):
        compute_score("nq", "x", "Rome", structure_format_score=0.9, retrieval_score=0.2)
    assert (
        compute_score("nq", "x", "Rome", structure_format_score=0.8, retrieval_score=0.2)["score"]
        == 0.0
    )
