"""Write GSM8K (Cobbe et al., 2021) as train.parquet and test.parquet in verl's format.

python data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k [--local_dataset_path FOLDER]

FOLDER contains train.jsonl and test.jsonl.
"""

import re
from typing import Any

from verlite.data.preprocess import Source, main

SOURCE = Source("openai/gsm8k", revision="740312add88f781978c0658806c59bc2815b9866", folder="main")
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'


def make_row(example: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    """Return the row of one example {question, answer}.

    The ground truth is the number after "####", without commas.
    """
    question = example["question"]
    answer = example["answer"]
    number = re.search(r"#### (-?[0-9.,]+)", answer)
    if not number:
        raise ValueError('the answer has no "#### number"')
    return {
        "data_source": SOURCE.repo,
        "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": number[1].replace(",", "")},
        "extra_info": {"split": split, "index": index, "answer": answer, "question": question},
    }


if __name__ == "__main__":
    main(__doc__, SOURCE, "~/data/gsm8k", make_row)
