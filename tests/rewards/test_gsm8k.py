"""GSM8K's scorer against hand-written cases and the data set's own answers."""

import json
from pathlib import Path

import pytest

from verlite.rewards.gsm8k import compute_score, extract_answer

SAMPLES = Path(__file__).parents[1] / "samples/gsm8k"


@pytest.mark.parametrize(
    ("solution", "strict", "flexible"),
    [
        ("So 40+32.\n#### 72", 1, 1),
        ("#### 72.", 1, 1),  # a full stop
        ("#### 72.00", 1, 1),
        ("#### 72 clips", 1, 1),
        ("#### 71\nno:\n#### 72", 1, 1),  # the last one counts
        ("#### 72\nno:\n#### 71", 0, 0),
        ("#### -72", 0, 0),
        ("#### 7,2", 1, 1),  # commas are dropped wherever they stand, as in verl
        ("The answer is 72.", 0, 1),
        ("The answer is 72, not 71", 0, 0),
        ("The answer is $72,", 0, 1),
        ("####72", 0, 1),
        ("#### 1.2.3", 0, 0),
        ("#### ...", 0, 0),
        ("", 0, 0),
        ("#### 72" + " " * 293, 1, 1),  # 300 characters in all
        ("#### 72" + " " * 294, 0, 1),  # "####" has left the searched tail
        ("72 " + " " * 300, 0, 0),
    ],
)
def test_extracted_answers(solution: str, strict: int, flexible: int) -> None:
    assert compute_score("openai/gsm8k", solution, "72") == strict
    assert compute_score("openai/gsm8k", solution, "72", method="flexible") == flexible


def test_large_and_fractional_truths() -> None:
    assert compute_score("openai/gsm8k", "#### 1,234,567", "1234567") == 1
    assert compute_score("openai/gsm8k", "#### 1234567", "1,234,567") == 1
    assert compute_score("openai/gsm8k", "#### 0.5", "0.50") == 1
    # Some files have numbers as ground truth.
    assert compute_score("openai/gsm8k", "#### 72", 72) == 1  # type: ignore[arg-type]


def test_gsm8k_reference_answers_score_one() -> None:
    lines = [
        line
        for name in ("train", "test")
        for line in (SAMPLES / f"{name}.jsonl").read_text().splitlines()
    ]
    assert len(lines) == 30
    for line in lines:
        answer = json.loads(line)["answer"]
        truth = answer.split("#### ")[1].replace(",", "")
        assert compute_score("openai/gsm8k", answer, truth) == 1
        assert compute_score("openai/gsm8k", answer, truth + "1") == 0


def test_unknown_method_is_an_error() -> None:
    with pytest.raises(ValueError, match="method='loose' is not one of strict, flexible"):
        extract_answer("72", "loose")
