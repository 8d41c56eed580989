"""verl.utils.reward_score: verl's functions, computed by verlite's own scorers.

docs/migration/verl.md lists where the scores differ. Comparisons of mathematical answers may never
end, so these functions are for processes that can be killed, such as those of reward functions.
"""

import importlib
from typing import Any

SOURCES = {
    "openai/gsm8k": "gsm8k",
    "lighteval/MATH": "math_reward",
    "DigitalLearningGmbH/MATH-lighteval": "math_reward",
    "HuggingFaceH4/MATH-500": "math_reward",
    "math_dapo": "math_dapo",
    "math": "math_dapo",
    "math_dapo_reasoning": "math_dapo",
    "aime*": "math_dapo",
    "numina_*": "prime_math",
    "codecontests": "code",
    "apps": "code",
    "codeforces": "code",
    "taco": "code",
    "hiyouga/geometry3k": "geo3k",
    "searchR1_*": "search_r1_like_qa_em",
}
"""Data source -> module. A name that ends in * matches every source that begins with it."""


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
    names = [
        name
        for name in SOURCES
        if data_source == name or (name.endswith("*") and data_source.startswith(name[:-1]))
    ]
    if not names:
        raise NotImplementedError(
            f"no scorer belongs to data_source={data_source!r}; known: {', '.join(SOURCES)}"
        )
    scorer = importlib.import_module(f"{__name__}.{SOURCES[names[0]]}")
    result = scorer.compute_score(solution_str, ground_truth)
    if isinstance(result, dict):
        return result
    return float(result[0] if isinstance(result, tuple) else result)


_default_compute_score = default_compute_score


def get_default_compute_score(reward_name: str | None = None) -> Any:
    """Return `default_compute_score`, which is the same for every reward manager."""
    return default_compute_score
