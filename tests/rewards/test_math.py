"""The mathematics scorer: which text is the answer, and what is equivalent."""

import time

import pytest

from verlite.rewards.math import compute_score, equivalent, last_answer_line, last_boxed


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{5}.", "5"),
        (r"\boxed{\frac{1}{2}} is it", r"\frac{1}{2}"),
        (r"\boxed{1} or \boxed{2}", "2"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\fbox{6}", "6"),
        (r"\boxed {7}", "7"),
        (r"$\boxed 8$ units", "8"),
        (r"$\boxed \frac{1}{2}$.", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{4} and \boxed{5", "4"),  # cut off in the middle of the last one
        (r"\boxed{}", ""),
        (r"\boxed{", None),
        ("5", None),
        ("", None),
    ],
)
def test_the_last_box(text: str, answer: str | None) -> None:
    assert last_boxed(text) == answer


def test_a_hostile_text_takes_no_time() -> None:
    start = time.monotonic()
    for text in (r"\boxed{" * 20_000, "{" * 100_000, r"\boxed " * 20_000, "answer:" * 20_000):
        last_boxed(text), last_answer_line(text)
    assert time.monotonic() - start < 10.0


@pytest.mark.parametrize(
    ("truth", "answer"),
    [
        (r"\frac{1}{2}", "0.5"),
        (r"\frac{1}{2}", r"\dfrac12"),
        ("x^2+2x+1", "(x+1)^2"),
        (r"\sqrt{2}", "2^{1/2}"),
        ("1,000", "1000"),
        (r"10\%", "10"),
        (r"10\%", "10%"),
        (r"\$32{,}348", "32348"),
        (r"90^\circ", "90"),
        (r"\text{odd}", r"\text{ odd}"),
        (r"\text{Evelyn}", "Evelyn"),
        ("(1,2)", "(1, 2)"),
        (r"[2,\infty)", r"[2, \infty)"),
        ("-3,3", "3, -3"),
        ("5", r"5\text{ cm}"),
        ("7", "x = 7"),
        (r"\begin{pmatrix} 2 \\ -1 \end{pmatrix}", r"\begin{pmatrix}2\\-1\end{pmatrix}"),
        ("C", r"\text{(C)}"),
        (r"9\pi", r"\pi \cdot 9"),
    ],
)
def test_equivalent(truth: str, answer: str) -> None:
    assert equivalent(answer, truth)


@pytest.mark.parametrize(
    ("truth", "answer"),
    [
        ("3", "4"),
        ("11", "1"),
        (r"\frac{1}{2}", "2"),
        ("(1,2)", "(2,1)"),
        ("x^2+1", "x^2"),
        (r"\text{odd}", r"\text{even}"),
        ("5", ""),
        ("5", "?"),
        ("", ""),
        (r"[2,\infty)", r"(2,\infty)"),
        (r"9\pi", "28.27"),
    ],
)
def test_not_equivalent(truth: str, answer: str) -> None:
    assert not equivalent(answer, truth)


def test_only_a_box_counts_where_the_prompt_asks_for_one() -> None:
    assert compute_score("lighteval/MATH", r"Thus \boxed{0.5}.", r"\frac12") == 1
    assert compute_score("lighteval/MATH", "Answer: 0.5", r"\frac12") == 0
    assert compute_score("aime2024", "Answer: 204", "204") == 1
    assert compute_score("math_dapo", "Answer: 3\nWait.\n**Answer:** $34$.", "34") == 1
    assert compute_score("math_dapo", r"Answer: 3, no: \boxed{34}", "34") == 1
    assert compute_score("math_dapo", "34", "34") == 0


def test_model_text_is_not_evaluated_as_python(tmp_path) -> None:
    mark = tmp_path / "mark"
    code = f"__import__('pathlib').Path('{mark}').touch()"
    for text in (code, f"({code})", rf"\text{{{code}}}", f"1+{code}"):
        assert compute_score("lighteval/MATH", rf"\boxed{{{text}}}", "5") == 0
    assert not mark.exists()
