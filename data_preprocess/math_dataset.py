"""Write MATH (Hendrycks et al., 2021) as train.parquet and test.parquet in verl's format.

python data_preprocess/math_dataset.py --local_save_dir ~/data/math [--local_dataset_path FOLDER]

FOLDER contains train.jsonl and test.jsonl.
"""

from typing import Any

from verlite.data.preprocess import Source, main
from verlite.rewards.math import last_boxed

SOURCE = Source(
    "DigitalLearningGmbH/MATH-lighteval",
    revision="0530c78699ea5e8eb5530600900e1f328b48acad",
    folder="data",
)
INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."


def make_row(example: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    r"""Return the row of one example {problem, solution, ...}.

    The ground truth is the content of the solution's last \boxed{}. Other columns (level, type) are
    kept, as in verl.
    """
    problem = example["problem"]
    truth = last_boxed(example["solution"])
    if truth is None:
        raise ValueError(r"the solution has no \boxed{answer}")
    return {
        **{key: value for key, value in example.items() if key not in ("problem", "solution")},
        "data_source": SOURCE.repo,
        "prompt": [{"role": "user", "content": f"{problem} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": split, "index": index},
    }


if __name__ == "__main__":
    main(__doc__, SOURCE, "~/data/math", make_row, example_files=True)
