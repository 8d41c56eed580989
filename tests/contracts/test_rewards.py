"""The contract test for reward functions finds each problem, and none in a good function."""

import re

import pytest
from typer.testing import CliRunner

from verlite.cli import app
from verlite.contracts.rewards import check_reward

pytestmark = pytest.mark.process

HEAD = (
    "def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):\n    "
)
GOOD = HEAD + "return {'score': float(ground_truth in solution_str), 'acc': 1.0}"

WRONG = [
    (
        HEAD + "return float(solution_str.split('####')[1] == ground_truth)",
        "on the ground truth, .* response: IndexError: list index",
    ),
    (HEAD + "return None", "on all answers: BadReturn: returned None"),
    (
        HEAD + "return solution_str == '' and float('nan')",
        "on an empty response: BadReturn: returned nan",
    ),
    (
        "import random\n" + HEAD + "return (ground_truth in solution_str) + random.random() / 2",
        "on .*the result changes when scored again",
    ),
    (
        HEAD + "return float(extra_info['index'] == 0 and ground_truth in solution_str)",
        "on all answers: without extra_info KeyError",
    ),
    (
        HEAD
        + "return {'score': ground_truth in solution_str, **({'a': 1} if solution_str else {})}",
        "different parts for different answers",
    ),
    (HEAD + "return 1.0", "scores no higher than a wrong answer"),
    ("def compute_score(text, truth):\n    return 1.0", "cannot be called with data_source"),
    (
        "def score(data_source, solution_str, ground_truth, extra_info):\n    return 1.0",
        "has no function 'compute_score'",
    ),
    ("import nothing_of_that_name", "cannot be loaded: ModuleNotFoundError"),
]


def reward(folder, source) -> str:
    file = folder / "reward.py"
    file.write_text(source)
    return str(file)


@pytest.mark.parametrize(("source", "message"), WRONG, ids=[message for _, message in WRONG])
def test_each_problem_is_reported_once(tmp_path, source, message):
    (problem,) = check_reward(reward(tmp_path, source))
    assert re.search(message, problem), problem


def test_good_functions_have_no_problems(tmp_path, monkeypatch):
    assert check_reward(reward(tmp_path, GOOD), {"weight": 2}) == []
    assert check_reward("verlite.rewards.exact:compute_score") == []
    for name in ("no_colon", "nothing.here:f"):
        with pytest.raises(ValueError, match="write FILE.py|module nothing.here was not found"):
            check_reward(name)


def test_a_row_of_the_data_is_tried(tmp_path):
    """extra_info, data source and ground truth are those of the file's first row."""
    function = reward(
        tmp_path, HEAD + "return float(extra_info['one'] in solution_str and data_source == 'sums')"
    )
    (tmp_path / "rows.csv").write_text("question,answer,one\n40+1=,41,41\n")
    data = ["data", str(tmp_path / "rows.csv"), "--prompt", "question", "--answer", "answer"]
    rows = str(tmp_path / "rows.jsonl")
    made = str(tmp_path / "rows.parquet")
    assert CliRunner().invoke(app, [*data, "--source", "sums", "-o", made]).exit_code == 0
    found = CliRunner().invoke(app, ["contract", "reward", function])
    assert "on all answers: KeyError: 'one'" in found.output and found.exit_code == 1
    found = CliRunner().invoke(app, ["contract", "reward", function, "--data", made])
    assert "keeps the contract" in found.output, found.output
    found = CliRunner().invoke(app, ["contract", "reward", function, "--data", rows])
    assert rows in found.output and found.exit_code == 2


def test_contract_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_functions.py").write_text(
        "def flat(inputs):\n    a = inputs.extra['k'] * inputs.mask.float()\n    return a, a\n"
        "def loss(inputs):\n"
        "    return inputs.total(inputs.advantages * inputs.log_ratio.exp()), {}\n"
    )

    def run(*arguments):
        result = CliRunner().invoke(app, ["contract", *arguments])
        return result.exit_code, result.output

    assert run("reward", reward(tmp_path, GOOD)) == (
        0,
        f"{tmp_path}/reward.py keeps the contract of a reward function.\n",
    )
    code, text = run("loss", "own_functions:loss")
    assert code == 1 and "a positive advantage lowers the log-prob: the sign is wrong" in text
    assert run("estimator", "own_functions:flat", "--kwargs", '{"k": 2}') == (
        0,
        "own_functions:flat keeps the contract of an advantage estimator.\n",
    )
    code, text = run("estimator", "own_functions:flat", "--kwargs", "{k: 2}")
    assert code == 2 and "--kwargs {k: 2}: expected a JSON object" in text
    assert run("estimator", "own_functions:flat")[0] == 1  # KeyError: 'k'
    assert run("estimator", "own_functions:other")[0] == 2 and run("loss", "gspo")[0] == 0
