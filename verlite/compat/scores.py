"""verl.utils.reward_score: verl's functions, computed by verlite's own scorers.

docs/migration/verl.md lists where the scores differ. Those of mathematical answers are in
`math_scores`. A function that several of verl's modules have begins with the name of its module,
such as `gsm8k_compute_score`.
"""

from decimal import Decimal, InvalidOperation
from typing import Any, NoReturn

from verlite.compat import attributes
from verlite.rewards.gsm8k import extract_answer
from verlite.rewards.qa import gold_answers, last_answer, matches, normalize
from verlite.spec.catalog import source_name

_MODULES = {
    "gsm8k": "openai/gsm8k",
    "math_reward": "lighteval/MATH DigitalLearningGmbH/MATH-lighteval HuggingFaceH4/MATH-500",
    "math_dapo": "math_dapo math math_dapo_reasoning aime*",
    "prime_math": "numina_*",
    "prime_code": "codecontests apps codeforces taco",
    "geo3k": "hiyouga/geometry3k",
    "search_r1_like_qa_em": "searchR1_*",
}
SOURCES = {source: module for module, sources in _MODULES.items() for source in sources.split()}
"""Data source -> module of verl. A name that ends in * matches every source that begins with it."""


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,
    sandbox_fusion_url: str | None = None,
    concurrent_semaphore: Any = None,
    memory_limit_mb: int | None = None,
    **kwargs: Any,
) -> Any:
    """Return the score of a response by its data source: a number, or a dict with "score".

    Raises:
        NotImplementedError: the data source has no scorer, or its scorer runs generated code.
    """
    name = source_name(SOURCES, data_source)
    if name is None:
        raise NotImplementedError(
            f"no scorer belongs to data_source={data_source!r}; known: {', '.join(SOURCES)}"
        )
    scorer = attributes(f"verl.utils.reward_score.{SOURCES[name]}")
    result = scorer.compute_score(solution_str, ground_truth)
    if isinstance(result, dict):
        return result
    return float(result[0] if isinstance(result, tuple) else result)


_default_compute_score = default_compute_score


def get_default_compute_score(reward_name: str | None = None) -> Any:
    """Return `default_compute_score`, which is the same for every reward manager."""
    return default_compute_score


def gsm8k_extract_solution(solution_str: str, method: str = "strict") -> str | None:
    """Return the number after the last "####" (strict) or the last number (flexible), or None.

    It has no thousands separators and does not end in a period.
    """
    return extract_answer(solution_str, method)


def gsm8k_compute_score(
    solution_str: str,
    ground_truth: str,
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """Return `score` if the answer is right, `format_score` if it is wrong, 0 if there is none."""
    answer = extract_answer(solution_str, method)
    if answer is None:
        return 0.0
    return score if _same_number(answer, str(ground_truth)) else format_score


def _same_number(answer: str, truth: str) -> bool:
    try:
        return Decimal(answer) == Decimal(truth.replace(",", ""))
    except InvalidOperation:  # such as 1.2.3, or a ground truth that is not a number
        return answer == truth


MANY_TAGS = 10
normalize_answer = normalize
search_r1_like_qa_em_extract_solution = last_answer


def em_check(prediction: str, golden_answers: Any) -> int:
    """Return 1 if the normalized text equals an accepted answer, else 0."""
    return int(matches(prediction, gold_answers(golden_answers)))


def subem_check(prediction: str, golden_answers: Any) -> int:
    """Return 1 if the normalized text contains an accepted answer, else 0."""
    return int(matches(prediction, gold_answers(golden_answers), "sub_em"))


def search_r1_like_qa_em_compute_score(
    solution_str: str,
    ground_truth: Any,
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """Return `score` for a right answer, `format_score` for a wrong one, 0 without one.

    A right answer in a response with more than 10 opening or closing tags gets a quarter.
    """
    answer = last_answer(solution_str)
    if answer is None:
        return 0.0
    if not em_check(answer, ground_truth):
        return format_score
    tags = max(solution_str.count("<answer>"), solution_str.count("</answer>"))
    return score / 4 if tags > MANY_TAGS else score


def compute_score_subem(
    solution_str: str,
    ground_truth: Any,
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """Return `score` if the answer contains an accepted one, else `format_score`; 0 without one."""
    answer = last_answer(solution_str)
    if answer is None:
        return 0.0
    return score if subem_check(answer, ground_truth) else format_score


def code_compute_score(*args: Any, **kwargs: Any) -> NoReturn:
    """Raise NotImplementedError."""
    raise NotImplementedError(
        "verlite's compatibility package for verl does not run generated programs. Run them in a "
        "sandbox from your own reward function: custom_reward_function.path"
    )


run_test = code_compute_score
check_correctness = code_compute_score
