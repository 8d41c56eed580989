"""Accuracy plus format: which text is the answer, and which responses have the format."""

import pytest

from verlite.rewards.tagged_math import compute_score, final_answer, is_formatted, plain_truth


@pytest.mark.parametrize(
    ("response", "formatted"),
    [
        ("<think>a</think><answer>b</answer>", True),
        (" <think>a\n</think>\n\n<answer>b</answer>\n", True),
        ("<think></think><answer></answer>", True),
        ("<think>a</think>so<answer>b</answer>", False),
        ("Well: <think>a</think><answer>b</answer>", False),
        ("<think>a</think><answer>b</answer> That is it.", False),
        ("<think>a</think><answer>b</answer><answer>c</answer>", False),
        ("<think>a<think>b</think></think><answer>c</answer>", False),
        ("<think>a<answer>b</answer></think><answer>", False),
        ("<answer>b</answer><think>a</think>", False),
        ("<think>a</think>", False),
        ("", False),
    ],
)
def test_format(response, formatted):
    assert is_formatted(response) == formatted


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"<think>\boxed{1}</think><answer>\boxed{2} or \boxed{3}</answer>", "3"),
        (r"<think>\boxed{1}</think><answer>$x=2$</answer>", "x=2"),
        (r"<think>\boxed{1}</think><answer> 5 </answer>", "5"),
        (r"<think>\boxed{1}</think><answer></answer>", None),
        (r"<answer>1</answer> no: <answer>2</answer>", "2"),
        (r"<think>\boxed{1}</think> \boxed{4}", "4"),
        (r"<answer>\boxed{6}", "6"),
        ("42", None),
        ("", None),
    ],
)
def test_final_answer(response, answer):
    assert final_answer(response) == answer


@pytest.mark.parametrize(
    ("text", "truth"),
    [
        ("7", "7"),
        (" $7$ ", "7"),
        (r"$$\frac12$$", r"\frac12"),
        (r"\(7\)", "7"),
        (r"So it is \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        ("40 + 2 = 42\n#### 42", "42"),
        ("$1$ and $2$", "$1$ and $2$"),
        (7, "7"),
        (-0.5, "-0.5"),
        ("[1, 2]", "[1, 2]"),
        ("[[1, 0], [0, 1]]", "[[1, 0], [0, 1]]"),
        ('["a', '["a'),
    ],
)
def test_ground_truth(text, truth):
    assert plain_truth(text) == truth


@pytest.mark.parametrize(
    "truth", [["7"], {"target": ["7"]}, True, None, float("nan"), '["7"]', '{"target": ["7"]}']
)
def test_ground_truth_that_is_not_text_is_an_error(truth):
    with pytest.raises(TypeError, match="expected text or a number"):
        compute_score("", r"\boxed{7}", truth)


@pytest.mark.parametrize(
    ("response", "truth", "scores"),
    [
        (r"<think>a</think><answer>\boxed{0.5}</answer>", r"$\frac{1}{2}$", (1.5, 1.0, 1.0)),
        (r"<think>a</think><answer>3</answer>", 7, (0.5, 0.0, 1.0)),
        (r"\boxed{7}", 7.0, (1.0, 1.0, 0.0)),
        ("7", "7", (0.0, 0.0, 0.0)),
        (r"\boxed{}", "", (0.0, 0.0, 0.0)),
        (r"\boxed{what?}", "not { mathematics", (0.0, 0.0, 0.0)),
    ],
)
def test_score_is_accuracy_plus_half_the_format(response, truth, scores):
    found = compute_score("", response, truth)
    assert (found["score"], found["acc"], found["format"]) == scores


def test_weight_of_the_format():
    text = "<think>a</think><answer>7</answer>"
    assert compute_score("", text, "7", format_weight=0.0)["score"] == 1.0
    assert compute_score("", text, "7", format_weight=0.25)["score"] == 1.25
