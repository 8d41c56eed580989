"""The math scorer: which text is the final answer, and which answers are equivalent."""

import time

import pytest

from verlite.rewards.math import compute_score, equivalent, last_answer_line, last_boxed, normalize


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
        (r"\boxed{4} and \boxed{5", "4"),  # the last box is truncated
        (r"\boxed{}", ""),
        (r"\boxed{", None),
        ("5", None),
        ("", None),
    ],
)
def test_last_box(text: str, answer: str | None) -> None:
    assert last_boxed(text) == answer


def test_hostile_text_is_parsed_in_linear_time() -> None:
    start = time.monotonic()
    for text in (
        r"\boxed{" * 20_000,
        "{" * 100_000,
        r"\boxed " * 20_000,
        "answer:" * 20_000,
        "answer" + " " * 100_000,
        "answer:" + "\n" * 100_000,
        "Answer: " + r"\text{" * 20_000,
    ):
        last_boxed(text)
        line = last_answer_line(text)
        normalize(line or text)
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
        ("025", "25"),
        ("25", "025"),
        ("025", r"\text{025}"),
        ("25", r"\text{025}"),
        ("073", r"\mathbf{073}"),
        ("73", r"\boldsymbol{073}"),
        ("7", r"x = \mathrm{7}"),
        ("1024", r"2^\text{10}"),
        ("7.5", "007.50"),
        ("0.5", "000.5"),
        ("0", "000"),
        ("-7", "-007"),
        (r"\$32{,}048", "32048"),
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
        ("25", "2500"),
        ("25", r"\text{250}"),
        ("0.25", "025"),
    ],
)
def test_not_equivalent(truth: str, answer: str) -> None:
    assert not equivalent(answer, truth)


@pytest.mark.parametrize(
    ("source", "response", "truth", "score"),
    [
        ("lighteval/MATH", r"Thus \boxed{0.5}.", r"\frac12", 1),
        ("lighteval/MATH", "Answer: 0.5", r"\frac12", 0),
        ("lighteval/MATH", r"so \boxed{5}? Answer: 6", "5", 1),
        ("HuggingFaceH4/MATH-500", "Answer: 6", "6", 0),
    ],
)
def test_only_a_box_counts_if_the_prompt_asks_for_one(
    source: str, response: str, truth: str, score: int
) -> None:
    assert compute_score(source, response, truth) == score


@pytest.mark.parametrize("source", ["math_dapo", "math_dapo_reasoning", "math", "aime2024"])
@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        ("Answer: 204", "204", 1),
        (r"so \boxed{5}? Answer: 6", "6", 1),
        (r"so \boxed{5}? Answer: 6", "5", 0),
        (r"Answer: 3, no: \boxed{34}", "34", 1),  # a box on the answer line is the answer
        ("Answer: 3\nWait, \\boxed{34}", "34", 0),
        ("Answer: 3\nWait.\n**Answer:** $34$.", "34", 1),
        ("Answer: 3\nWait.\n**Answer:** $34$.", "3", 0),
        ("Answer: $\\boxed{034}$", "34", 1),
        ("Answer: \\(34\\)", "34", 1),
        ("Answer:\n34", "34", 1),
        ("Answer: **\n$$\\boxed{34}$$", "34", 1),
        ("Answer: \\boxed{\\begin{pmatrix}1\\\\\n2\\end{pmatrix}}", r"\binom{1}{2}", 0),
        (
            "Answer: \\boxed{\\begin{pmatrix}1\\\\\n2\\end{pmatrix}}",
            r"\begin{pmatrix}1\\2\end{pmatrix}",
            1,
        ),
        (r"thus \boxed{34}", "34", 1),
        ("34", "34", 0),
        ("Answer:", "34", 0),
    ],
)
def test_the_answer_line_decides_if_the_prompt_asks_for_one(
    source: str, response: str, truth: str, score: int
) -> None:
    assert compute_score(source, response, truth) == score


def test_model_text_is_not_evaluated_as_python(tmp_path) -> None:
    mark = tmp_path / "mark"
    code = f"__import__('pathlib').Path('{mark}').touch()"
    for text in (code, f"({code})", rf"\text{{{code}}}", f"1+{code}"):
        assert compute_score("lighteval/MATH", rf"\boxed{{{text}}}", "5") == 0
    assert not mark.exists()
