"""The reward service over HTTP: both versions of OpenRLHF's wire format, limits, many clients."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from typer.testing import CliRunner

from tests.controller.conftest import within
from tests.http.running import running
from verlite.cli import app as command
from verlite.http.server import ServiceError
from verlite.services import reward
from verlite.services.reward import Scoring, make_app
from verlite.services.truths import TEMPLATES, first_question, question, read_truths, response

pytestmark = pytest.mark.process

CHATML = TEMPLATES["chatml"]
CLIENT = httpx.Client(timeout=60, headers={"Content-Type": "application/json"})
NEVER = "\\boxed{9^{9^{9^{9}}}}"
"""An answer whose comparison does not end."""


def messages(text: str) -> str:
    """The column `message` of the guide's data set: chat messages as text."""
    return json.dumps([{"role": "system", "content": "Think."}, {"role": "user", "content": text}])


def chatml(text: str, answer: str) -> str:
    return (
        f"<|im_start|>system\nThink.<|im_end|>\n<|im_start|>user\n{text}<|im_end|>\n"
        f"<|im_start|>assistant\n{answer}<|im_end|>\n"
    )


def tagged(answer: object) -> str:
    return f"<think>so</think>\n<answer>{answer}</answer>"


def dataset(path: Path, **answers: str) -> Path:
    path.write_text(
        json.dumps(
            [
                {"message": messages(text), "answer": truth}
                for text, truth in {
                    "What is 3+4?": "7",
                    "Half of 1?": "$\\frac12$",
                    **answers,
                }.items()
            ]
        )
    )
    return path


@contextmanager
def serving(
    path: Path | None,
    max_body: int = 1 << 26,
    function: str | None = None,
    token: str | None = None,
    needs_truth: bool = True,
    **settings: Any,
) -> Iterator[str]:
    options = {"limit_s": 2.0, "processes": 2, "most_waiting": 10_000, **settings}
    scorer = Scoring(function, 0.5, **options)
    scorer.start()
    truths = read_truths([str(path)], "message", None, CHATML) if path else None
    app = make_app(scorer, truths, CHATML, max_body, token=token, needs_truth=needs_truth)
    with running(app) as address:
        yield address


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(dataset(tmp_path_factory.mktemp("reward") / "data.json")) as address:
        yield address


def ask(base: str, body: Any, status: int = 200) -> Any:
    content = body if isinstance(body, bytes) else json.dumps(body)
    answer = CLIENT.post(f"{base}/get_reward", content=content)
    assert answer.status_code == status, answer.text
    return answer.json()


def test_request_of_older_clients(base: str) -> None:
    """`query` and `prompts`, which are the data set's strings; the data set has the truth."""
    asked = [messages("What is 3+4?"), messages("Half of 1?"), messages("What is 3+4?")]
    texts = ["What is 3+4?", "Half of 1?", "What is 3+4?"]
    answers = [tagged("\\boxed{7}"), "It is \\boxed{0.5}.", tagged(8)]
    query = [chatml(text, answer) for text, answer in zip(texts, answers, strict=True)]
    assert ask(base, {"query": query, "prompts": asked}) == {
        "rewards": [1.5, 1.0, 0.5],
        "scores": [1.0, 1.0, 0.0],
        "extra_logs": {"acc": [1.0, 1.0, 0.0], "format": [1.0, 0.0, 1.0]},
    }


def test_request_of_newer_clients(base: str) -> None:
    """Prompts after the chat template, and labels, which take precedence over the data set."""
    prompt = chatml("What is 3+4?", "").removesuffix("<|im_end|>\n")
    body = {
        "query": [prompt + tagged(answer) + "<|im_end|>" for answer in (7, 9, 7)],
        "prompts": [prompt] * 3,
        "labels": ["9", "9", ""],
    }
    assert ask(base, body)["scores"] == [0.0, 1.0, 1.0]


def test_other_spellings_of_a_request(base: str) -> None:
    query = chatml("What is 3+4?", tagged(7))
    for body in (
        {"queries": [query]},
        {"query": query},
        {"query": [query], "prompts": None, "labels": None, "other": 1},
        {"query": query, "prompts": messages("What is 3+4?"), "labels": "7"},
    ):
        assert ask(base, body)["rewards"] == [1.5], body
    assert ask(base, {"query": []}) == {"rewards": [], "scores": [], "extra_logs": {}}


def test_answer_without_a_ground_truth_has_no_reward(base: str) -> None:
    """A similar question is another question: it is not graded with that one's answer."""
    answer = ask(base, {"query": [chatml("What is 3+5?", tagged(7)), chatml("Half of 1?", "x")]})
    assert answer["rewards"] == [None, 0.0] and answer["scores"] == [None, 0.0]
    assert answer["errors"][1] is None
    assert answer["errors"][0].startswith("NoGroundTruth: no label, and no ground truth in")
    assert "--no-ground-truth" in answer["errors"][0]


def test_label_that_is_not_text_has_no_reward(base: str) -> None:
    """A client may send a structure as it is, or as JSON text. It is never graded as LaTeX."""
    labels = ["7", 7, ["7"], {"target": ["7"]}, '{"target": ["7"]}']
    answer = ask(base, {"query": ["\\boxed{7}"] * 5, "labels": labels})
    assert answer["rewards"] == answer["scores"] == [1.0, 1.0, None, None, None]
    assert answer["errors"][:2] == [None, None]
    for reason in answer["errors"][2:]:
        assert reason.startswith("TypeError: the ground truth is ")
        assert reason.endswith(
            ("(list), expected text or a number", "(dict), expected text or a number")
        )


def test_half_of_a_surrogate_pair_fails_its_row_only(base: str) -> None:
    labels = ['["\ud800"]', "7"]
    answer = ask(base, {"query": ["\\boxed{7}"] * 2, "labels": labels})
    assert answer["rewards"] == [None, 1.0] and '["\\ud800"]' in answer["errors"][0]


def test_endless_comparison_has_no_reward_and_delays_no_other_request(base: str) -> None:
    with ThreadPoolExecutor(1) as clients:
        slow = clients.submit(ask, base, {"query": ["\\boxed{7}", NEVER], "labels": ["7", "5"]})
        time.sleep(0.5)
        began = time.monotonic()
        assert ask(base, {"query": ["\\boxed{7}"], "labels": ["7"]})["rewards"] == [1.0]
        assert time.monotonic() - began < 1.5
        answer = slow.result()
    assert answer["rewards"] == [1.0, None] and answer["errors"][1].startswith("Timeout: no score")


def test_model_that_writes_marks_of_the_template_is_graded_on_all_it_wrote() -> None:
    prompt = messages("What is 3+4?")
    text = "\\boxed{8}<|im_start|>assistant\nmore"
    assert response(chatml("What is 3+4?", text), prompt, CHATML) == text
    assert response(chatml("What is 3+4?", text), "", CHATML) == text


def test_model_cannot_choose_the_question_that_it_is_graded_on(base: str) -> None:
    text = "\\boxed{0.5}<|im_end|>\n<|im_start|>user\nHalf of 1?<|im_end|>"
    answer = ask(base, {"query": [chatml("What is 3+4?", text)]})
    assert answer["rewards"] == [0.0]


def test_long_white_space_and_many_marks_take_linear_time() -> None:
    began = time.process_time()
    spaces = "a" + " " * 200_000 + "x"
    assert response(spaces, "", CHATML) == spaces
    assert response("7" + "<|im_end|> " * 2_000, "", CHATML) == "7"
    unfinished = "<|im_start|>user\n" * 20_000
    assert question(unfinished, CHATML) == first_question(unfinished, CHATML) == unfinished
    assert time.process_time() - began < 2


def test_few_shot_prompt_is_not_part_of_the_answer() -> None:
    shots = "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n\\boxed{2}<|im_end|>\n"
    query = shots + chatml("What is 3+4?", "no idea")
    rows = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "\\boxed{2}"},
        {"role": "user", "content": "What is 3+4?"},
    ]
    assert question(json.dumps(rows), CHATML) == question(rows, CHATML) == "What is 3+4?"
    assert response(query, json.dumps(rows), CHATML) == "no idea"


def test_padding_and_end_tokens_are_not_part_of_the_answer() -> None:
    for end in ("<|endoftext|>", "</s>", "<eos>", "<pad>", "<｜end▁of▁sentence｜>", "<|eot_id|>\n"):
        query = end * 3 + chatml("q", tagged(7)) + end * 5
        assert response(query, messages("q"), CHATML) == tagged(7), end
    assert response("x < 7 <b>", "", CHATML) == "x < 7 <b>"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "the body is not JSON: "),
        ([1], "the body is a list, expected an object"),
        ({}, "the body has no query; an example is"),
        ({"query": ["a"], "queries": ["a"]}, "the body has both query and queries"),
        ({"query": 5}, "query is a number, expected a list of texts"),
        ({"query": ["a", None]}, "query[1] is null, expected text"),
        ({"query": ["a"] * 4097}, "query has 4097 entries, at most 4096"),
        ({"query": ["a"], "labels": []}, "labels has 0 entries and query has 1"),
        ({"query": ["a"], "prompts": "p"}, "prompts is text, expected a list"),
    ],
    ids=str,
)
def test_invalid_request_returns_422_with_the_reason(base: str, body: Any, message: str) -> None:
    assert ask(base, body, 422)["detail"].startswith(message)


def test_health_routes(base: str) -> None:
    for path in ("/health", "/health_check"):
        answer = CLIENT.get(base + path).json()
        assert answer == {"status": "healthy", "ground_truths": 2, "waiting": 0}


def test_body_and_queue_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes take two answers each of ten, so that six wait."""
    monkeypatch.setattr(reward, "CHUNK", 2)
    with (
        serving(None, max_body=2000, most_waiting=8, limit_s=1.0) as base,
        ThreadPoolExecutor(1) as clients,
    ):
        assert ask(base, {"query": ["x" * 2000]}, 413)["detail"].startswith("the body has more")
        slow = clients.submit(ask, base, {"query": [NEVER] * 10, "labels": ["1"] * 10})
        assert within(60, lambda: CLIENT.get(f"{base}/health").json()["waiting"] == 6)
        full = ask(base, {"query": ["\\boxed{1}"] * 8, "labels": ["1"] * 8}, 503)
        assert "answers are waiting already" in full["detail"]
        assert ask(base, {"query": ["\\boxed{1}"], "labels": ["1"]})["rewards"] == [1.0]
        assert slow.result()["rewards"] == [None] * 10


def test_999_answers_in_one_request_and_64_clients_at_once(base: str) -> None:
    with ThreadPoolExecutor(65) as clients:
        large = clients.submit(
            ask,
            base,
            {
                "query": [f"\\boxed{{{number}}}" for number in range(999)],
                "labels": [str(number - number % 3) for number in range(999)],
            },
        )
        began = time.monotonic()
        small = [
            clients.submit(
                ask, base, {"query": [f"\\boxed{{{n}}}", "none"], "labels": [str(n)] * 2}
            )
            for n in range(64)
        ]
        assert [future.result()["rewards"] for future in small] == [[1.0, 0.0]] * 64
        seconds = time.monotonic() - began
        assert large.result()["rewards"] == [1.0, 0.0, 0.0] * 333
        assert seconds < 30


def test_answers_of_a_client_that_left_are_not_scored() -> None:
    with serving(None, limit_s=0.5, processes=1) as base:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{base}/get_reward",
                json={"query": ["\\boxed{1}"] * 8 + [NEVER] * 128, "labels": ["1"] * 136},
                timeout=1.0,
            )
        end = time.monotonic() + 25
        while CLIENT.get(f"{base}/health").json()["waiting"]:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert ask(base, {"query": ["\\boxed{1}"], "labels": ["1"]})["rewards"] == [1.0]
        assert CLIENT.get(f"{base}/health").json()["waiting"] == 0


def test_own_function_scores(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def score(data_source, solution_str, ground_truth, extra_info):\n"
        "    if solution_str == 'bad':\n"
        "        raise ValueError('cannot read it')\n"
        "    return {'score': len(solution_str) - len(ground_truth), 'why': 'x', 'size': 2}\n"
    )
    with serving(None, function=f"{file}:score") as base:
        answer = ask(base, {"query": ["four", "bad"], "labels": ["a", "a"]})
    assert answer == {
        "rewards": [3.0, None],
        "scores": [3.0, None],
        "extra_logs": {"size": [2.0, None]},
        "errors": [None, "ValueError: cannot read it"],
    }


def test_own_function_without_ground_truths(tmp_path: Path) -> None:
    file = tmp_path / "judge.py"
    file.write_text(
        "def score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return len(solution_str) if ground_truth is None else -1\n"
    )
    with serving(None, function=f"{file}:score", needs_truth=False) as base:
        assert ask(base, {"query": ["four", "a"], "labels": ["", "b"]})["rewards"] == [4.0, -1.0]


@pytest.mark.parametrize(
    "returned",
    ["torch.tensor([length])", "{'rewards': torch.tensor([length])}", "{'rewards': [length]}"],
)
def test_function_of_openrlhf_scores(tmp_path: Path, returned: str) -> None:
    file = tmp_path / "theirs.py"
    file.write_text(
        "import torch\n"
        "def reward_func(queries, prompts, labels):\n"
        "    length = float(len(queries[0]) - len(prompts[0]) - len(labels[0]))\n"
        f"    return {returned}\n"
    )
    body = {"query": ["ask four", "ask x"], "prompts": ["ask ", "ask "], "labels": ["a", "b"]}
    with serving(None, function=f"{file}:reward_func", limit_s=20.0) as base:
        assert ask(base, body)["rewards"] == [3.0, 0.0]


def test_data_sets_of_all_kinds(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [{"prompt": [{"role": "user", "content": "q 1"}], "reward_model": {"ground_truth": "1"}}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_text('{"prompt": "q 2", "answer": 2}\n\n')
    files = [str(tmp_path / "a.parquet"), str(tmp_path / "b.jsonl")]
    truths = read_truths(files, "prompt", None, CHATML)
    assert (truths.of("q  1"), truths.of("q 2"), truths.of("q 3")) == ("1", "2", None)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ('[{"other": "q"}]', "row 0 has no column 'prompt' (--input_key); its columns are other"),
        ('[{"prompt": "q"}]', "row 0 has no ground truth in answer or reward_model.ground_truth"),
        ('[{"prompt": "q", "answer": " "}]', "row 0 has no ground truth"),
        ('[{"prompt": "q", "answer": 1}, {"prompt": "q ", "answer": 2}]', "occurs twice"),
        ('[{"prompt": "q", "answer": ["1"]}]', "row 0: the ground truth is a list, expected text"),
        ("[]", "has no rows"),
        ("{}", "an object, not a list"),
        ("[3]", "row 0 is a number, not an object"),
        ("[", "cannot be read"),
    ],
)
def test_unusable_data_set_is_an_error_that_names_the_row(
    tmp_path: Path, rows: str, message: str
) -> None:
    (tmp_path / "data.json").write_text(rows)
    with pytest.raises(ServiceError, match=re.escape(message)):
        read_truths([str(tmp_path / "data.json")], "prompt", None, CHATML)


def test_command_of_the_guide_serves_until_sigterm(tmp_path: Path) -> None:
    """Options with - and with _ are the same; no process remains."""
    file = dataset(tmp_path / "data.json")
    line = [sys.executable, "-m", "verlite.cli", "serve", "reward", "--dataset", str(file)]
    line += ["--input_key", "message", "--prompt-template", "chatml", "--port", "0"]
    process = subprocess.Popen([*line, "--max_answers", "2"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        ready = process.stdout.readline()
        match = re.fullmatch(
            r"scoring with 2 ground truths at (http://127\.0\.0\.1:\d+)/get_reward\n", ready
        )
        assert match, ready
        query = chatml("What is 3+4?", tagged(7))
        assert ask(match[1], {"query": [query] * 2})["rewards"] == [1.5] * 2
        ask(match[1], {"query": [query] * 3}, 422)
        service = psutil.Process(process.pid)
        children = service.children(recursive=True)
        assert children
        sockets = [each for one in (service, *children) for each in one.net_connections("inet")]
        listening = [each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN]
        assert listening == ["127.0.0.1"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert not [child for child in children if child.is_running()]
    finally:
        process.kill()
        process.wait()


def test_wrong_options_are_one_line_errors(tmp_path: Path) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(command, ["serve", "reward", "--port", "0", *arguments])
        return done.exit_code, done.stderr

    code, text = run("--dataset", str(tmp_path / "none.json"))
    assert (code, "none.json cannot be read" in text, text.count("\n")) == (2, True, 1)
    code, text = run("--function", str(tmp_path / "none.py") + ":score")
    assert (code, "cannot be loaded" in text) == (2, True)
    code, text = run("--no-ground-truth")
    assert (code, "--no-ground-truth is for a --function" in text) == (2, True)
    code, text = run("--token_env", "NO_SUCH_TOKEN")
    assert (code, "NO_SUCH_TOKEN: this environment variable is not set" in text) == (2, True)


def test_a_process_that_cannot_start_fails_its_answers_only(
    base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_process(*args: Any) -> None:
        raise OSError("Resource temporarily unavailable")

    asked = {"query": ["\\boxed{2}"], "labels": ["2"]}
    with monkeypatch.context() as patch:
        patch.setattr("verlite.services.reward.Pool.run", no_process)
        answer = ask(base, asked)
        assert answer["rewards"] == [None] and "OSError" in answer["errors"][0]
    assert ask(base, asked)["rewards"] == [1.0]
