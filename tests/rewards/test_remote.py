"""The reward client against real servers: both wire formats, faults, outages; the real service."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.envs.retriever import free_port
from tests.services.test_reward import serving
from verlite.http.client import TokenError
from verlite.rewards.process import FunctionError
from verlite.rewards.remote import UNAVAILABLE, request_of, results_of
from verlite.rewards.result import BadReturn, RewardItem, RewardResult, result_of
from verlite.rewards.scorer import Scorer
from verlite.spec.roles import RewardServiceSpec, ScorerSpec

pytestmark = pytest.mark.process

Behavior = Callable[[dict[str, Any]], tuple[int, Any]]


def usual(body: dict[str, Any]) -> tuple[int, Any]:
    """Score the last character of each query as a digit."""
    return 200, {"rewards": [float(query[-1]) for query in body["query"]]}


class Service:
    """A reward server on loopback. `answer(body)` returns status and bytes or a JSON value."""

    def __init__(self, port: int = 0) -> None:
        self.answer: Behavior = usual
        self.health = 200
        self.delay = 0.0
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                service.requests.append(body)
                service.headers.append(dict(self.headers))
                time.sleep(service.delay)
                self.reply(*service.answer(body))

            def do_GET(self) -> None:
                self.reply(service.health if self.path == "/health" else 404, b"no JSON")

            def reply(self, status: int, answer: Any) -> None:
                content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                try:
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(content)))
                    self.end_headers()
                    self.wfile.write(content)
                except OSError:
                    pass  # the client has gone

            def log_message(self, *arguments: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 256

        self._server = Server(("127.0.0.1", port), Handler)
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self.port}/get_reward"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}
        )

    def __enter__(self) -> "Service":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def sizes(self) -> list[int]:
        return [len(body["query"]) for body in self.requests]


@pytest.fixture
def service() -> Iterator[Service]:
    with Service() as running:
        yield running


@contextmanager
def scorer_of(*urls: str, reward_timeout_s: float = 20.0, **settings: Any) -> Iterator[Scorer]:
    limits = {"timeout_s": 1.0, "deadline_s": 5.0, "batch_window_ms": 20.0, **settings}
    remote = RewardServiceSpec(url=list(urls), **limits)
    scorer = Scorer(ScorerSpec(remote=remote, timeout_s=reward_timeout_s))
    try:
        yield scorer
    finally:
        scorer.close()


def items(*digits: int) -> list[RewardItem]:
    return [RewardItem("any", f"is {digit}", "7", {}, "Q?", f"Q? is {digit}") for digit in digits]


def scores(results: list[RewardResult]) -> list[float | None]:
    return [result.score for result in results]


# The wire format


def test_request_has_the_fields_of_openrlhf() -> None:
    item = RewardItem("s", "r", {"target": ["é"]}, {}, "<|p|>", "<|p|>r<|e|>")
    none = RewardItem("s", "r", None, {}, "p")
    assert request_of([item, none]) == {
        "query": ["<|p|>r<|e|>", "pr"],
        "prompts": ["<|p|>", "p"],
        "labels": ['{"target": ["é"]}', ""],
    }


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        ({"rewards": [0.5, -1]}, [(0.5, {}), (-1.0, {})]),
        ({"rewards": [[0.5], [1]]}, [(0.5, {}), (1.0, {})]),
        (
            {"rewards": [1, 2], "scores": [0, 1], "extra_logs": {"format": [1, 0], "n": [3]}},
            [(1.0, {"acc": 0.0, "format": 1.0}), (2.0, {"acc": 1.0, "format": 0.0})],
        ),
        (
            {"rewards": [1, 2], "scores": [0, 0], "extra_logs": {"acc": [1, 0]}},
            [(1.0, {"acc": 1.0}), (2.0, {"acc": 0.0})],
        ),
        (
            {"rewards": [1, 2], "format_rewards": [0.5, 1], "time": 3, "name": "x"},
            [(1.0, {"format_rewards": 0.5}), (2.0, {"format_rewards": 1.0})],
        ),
    ],
)
def test_both_versions_of_the_answer(answer: Any, wanted: Any) -> None:
    assert [(result.score, result.parts) for result in results_of(answer, 2)] == wanted


def test_single_number_is_the_reward_of_a_single_sample() -> None:
    assert results_of({"rewards": 0.25}, 1) == [RewardResult(0.25)]


@pytest.mark.parametrize(
    "answer", [None, [1.0], {}, {"rewards": 1.0}, {"rewards": [1]}, {"rewards": [1, 2, 3]}]
)
def test_answer_without_one_reward_per_sample_is_refused(answer: Any) -> None:
    with pytest.raises(ValueError, match="rewards"):
        results_of(answer, 2)


@pytest.mark.parametrize(
    "names", [[str(number) for number in range(201)], ["x" * 60_000, "y" * 60_000]]
)
def test_answer_with_too_many_parts_is_refused(names: list[str]) -> None:
    with pytest.raises(ValueError, match="expected at most 200, whose names have at most 100,000"):
        results_of({"rewards": [1.0], "extra_logs": {name: [1.0] for name in names}}, 1)
    with pytest.raises(BadReturn, match="expected at most"):
        result_of({"score": 1.0} | dict.fromkeys(names, 1.0))


@pytest.mark.parametrize("bad", ["NaN", "Infinity", "null", '"1"', "{}", "[1, 2]", "1e400"])
def test_reward_that_is_not_a_number_fails_alone(service: Service, bad: str) -> None:
    service.answer = lambda body: (200, f'{{"rewards": [1, {bad}]}}'.encode())
    with scorer_of(service.url) as scorer:
        good, failed = scorer.score(items(1, 2))
    assert good.score == 1.0 and failed.score is None and failed.error == "BadReturn"
    assert service.sizes() == [2], "it is not asked again: the service has answered"


def test_reason_of_the_service_is_shown() -> None:
    answer = {"rewards": [None, 1], "errors": ["Timeout: no score within 10 s", None]}
    failed, good = results_of(answer, 2)
    assert (failed.error, good.score) == ("Timeout", 1.0)
    assert failed.traceback == "the reward service: Timeout: no score within 10 s"


# Requests


def test_each_sample_gets_its_own_reward_in_shared_requests(service: Service) -> None:
    digits = [number * 7 % 10 for number in range(150)]
    with scorer_of(service.url, batch_size=64) as scorer:
        assert scores(scorer.score(items(*digits))) == [float(digit) for digit in digits]
    assert sorted(service.sizes()) == [22, 64, 64]


def test_equal_samples_each_get_a_reward(service: Service) -> None:
    """A server may score equal samples differently, so each is sent."""
    numbers = iter(range(100))
    service.answer = lambda body: (200, {"rewards": [next(numbers) for _ in body["query"]]})
    with scorer_of(service.url) as scorer:
        assert scores(scorer.score(items(5, 5, 5, 5))) == [0.0, 1.0, 2.0, 3.0]


def test_samples_are_sent_while_others_are_generated(service: Service) -> None:
    with scorer_of(service.url) as scorer, scorer.stream() as stream:
        stream.add("a", items(3)[0])
        end = time.monotonic() + 5
        while not service.requests:
            assert time.monotonic() < end
            time.sleep(0.005)
        stream.add("b", items(4)[0])
        assert scores(list(stream.results().values())) == [3.0, 4.0]
    assert service.sizes() == [1, 1]


def test_token_is_sent(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_TOKEN", "s3cret")
    with scorer_of(service.url, token_env="REWARD_TOKEN") as scorer:
        scorer.score(items(1))
    assert service.headers[0]["Authorization"] == "Bearer s3cret"
    monkeypatch.delenv("REWARD_TOKEN")
    with (
        pytest.raises(TokenError, match=r"reward\.remote\.token_env=REWARD_TOKEN"),
        scorer_of(service.url, token_env="REWARD_TOKEN"),
    ):
        pass


def test_address_without_a_path_is_that_of_get_reward(service: Service) -> None:
    with scorer_of(f"http://127.0.0.1:{service.port}") as scorer:
        assert scores(scorer.score(items(1))) == [1.0]


# Faults


@pytest.mark.parametrize(
    "fault",
    [
        (500, b"boom"),
        (503, b""),
        (429, b"slow down"),
        (200, b"<html>"),
        (200, b""),
        (200, {"rewards": [1.0]}),
        (200, {"rewards": [1.0] * 9}),
        (200, {"scores": [1.0, 1.0]}),
    ],
    ids=str,
)
def test_transient_fault_costs_a_repetition(service: Service, fault: tuple[int, Any]) -> None:
    left = [1]

    def behave(body: dict[str, Any]) -> tuple[int, Any]:
        left[0] -= 1
        return fault if left[0] >= 0 else usual(body)

    service.answer = behave
    with scorer_of(service.url) as scorer:
        assert scores(scorer.score(items(1, 2))) == [1.0, 2.0]
    assert service.sizes() == [2, 1, 1]


@pytest.mark.parametrize("fault", ["500", "slow", "422", "wrong length"])
def test_sample_that_breaks_the_service_fails_alone(service: Service, fault: str) -> None:
    def picky(body: dict[str, Any]) -> tuple[int, Any]:
        if not any(query.endswith("9") for query in body["query"]):
            return usual(body)
        if fault == "slow":
            time.sleep(2.0)
        return {
            "500": (500, b""),
            "422": (422, b"odd"),
            "slow": (200, {}),
            "wrong length": (200, {"rewards": []}),
        }[fault]

    service.answer = picky
    with scorer_of(service.url, timeout_s=0.3, deadline_s=2.0) as scorer:
        results = scorer.score(items(1, 2, 3, 9, 4, 5))
    assert scores(results) == [1.0, 2.0, 3.0, None, 4.0, 5.0]
    assert results[3].error == ("Refused" if fault == "422" else UNAVAILABLE)


def test_service_that_restarts_loses_no_reward() -> None:
    port = free_port()
    with scorer_of(f"http://127.0.0.1:{port}/get_reward", deadline_s=20.0) as scorer:
        with scorer.stream() as stream:
            for number, item in enumerate(items(*range(10))):
                stream.add(number, item)
            time.sleep(1.0)
            with Service(port):
                assert scores(list(stream.results().values())) == [float(n) for n in range(10)]


def test_dead_service_is_a_failure_and_never_a_score() -> None:
    url = f"http://127.0.0.1:{free_port()}/get_reward"
    with scorer_of(url, deadline_s=0.5) as scorer:
        began = time.monotonic()
        results = scorer.score(items(1, 2))
        assert time.monotonic() - began < 15
    assert scores(results) == [None, None] and results[0].error == UNAVAILABLE
    assert "no answer within reward.remote.deadline_s=0.5" in (results[0].traceback or "")


def test_step_waits_no_longer_than_reward_timeout_s(service: Service) -> None:
    service.delay = 30.0
    with scorer_of(service.url, timeout_s=60, deadline_s=60, reward_timeout_s=0.5) as scorer:
        with scorer.stream() as stream:
            stream.add(0, items(1)[0])
            began = time.monotonic()
            result = stream.results()[0]
            assert time.monotonic() - began < 15
    assert result.error == UNAVAILABLE and "within 0.5 s" in (result.traceback or "")


def test_another_server_takes_over(service: Service) -> None:
    with Service() as other:
        service.answer = lambda body: (500, b"")
        with scorer_of(service.url, other.url) as scorer:
            assert scores(scorer.score(items(1, 2, 3, 4))) == [1.0, 2.0, 3.0, 4.0]


# Health


@pytest.mark.parametrize("status", [200, 404, 405])
def test_running_server_passes_the_check(service: Service, status: int) -> None:
    service.health = status
    with scorer_of(service.url) as scorer:
        assert scorer.check_service() is None
    assert service.requests == []


@pytest.mark.parametrize("status", [401, 500])
def test_unhealthy_server_does_not_pass_the_check(service: Service, status: int) -> None:
    service.health = status
    with scorer_of(service.url) as scorer, pytest.raises(FunctionError, match=f"HTTP {status}"):
        scorer.check_service()


def test_check_names_the_server_and_the_remedy(service: Service) -> None:
    gone = f"http://me:secret@127.0.0.1:{free_port()}/get_reward"
    with scorer_of(gone) as scorer, pytest.raises(FunctionError) as caught:
        scorer.check_service()
    text = str(caught.value)
    assert "the reward service at http://me:***@127.0.0.1" in text and "secret" not in text
    assert "verlite serve reward" in text and "reward.remote.url" in text
    with scorer_of(gone, service.url) as scorer:
        warning = scorer.check_service()
        assert warning and "does not answer" in warning


def test_training_client_and_service_with_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_TOKEN", "s3cret")
    prompt = "<|im_start|>user\n3+4?<|im_end|>\n<|im_start|>assistant\n"
    texts = ["<think>so</think><answer>7</answer>", "\\boxed{7}", "\\boxed{8}", "7"]
    asked = [
        RewardItem("any", text, truth, {}, prompt, f"{prompt}{text}<|im_end|>")
        for text, truth in zip(texts, (7, "7", "7", None), strict=True)
    ]
    with serving(None, token="s3cret") as address:
        with scorer_of(address, token_env="REWARD_TOKEN") as scorer:
            assert scorer.check_service() is None
            results = scorer.score(asked)
        monkeypatch.setenv("REWARD_TOKEN", "wrong")
        with scorer_of(address, token_env="REWARD_TOKEN") as scorer:
            with pytest.raises(FunctionError, match="HTTP 401") as caught:
                scorer.check_service()
            assert "wrong" not in str(caught.value)
            assert scores(scorer.score(asked[:1])) == [None]
    assert scores(results) == [1.5, 1.0, 0.0, None]
    assert results[0].parts == {"acc": 1.0, "format": 1.0}
    assert results[3].error == "NoGroundTruth"


def test_without_a_service_nothing_is_checked() -> None:
    scorer = Scorer(ScorerSpec())
    assert scorer.check_service() is None
    scorer.close()


# OpenRLHF's functions, which a service calls


@pytest.mark.parametrize(
    ("returned", "wanted"),
    [
        ({"rewards": [0.5]}, (0.5, {})),
        (
            {"rewards": [1], "scores": [0], "extra_logs": {"format": [0.5]}},
            (1.0, {"format": 0.5, "acc": 0.0}),
        ),
        ({"rewards": 2.0, "scores": 1.0, "extra_logs": None}, (2.0, {"acc": 1.0})),
    ],
)
def test_dict_of_openrlhfs_functions(returned: Any, wanted: Any) -> None:
    result = result_of(returned)
    assert (result.score, result.parts) == wanted


@pytest.mark.parametrize("rewards", [[], [1.0, 2.0], [None], ["1"], [float("nan")]])
def test_dict_of_openrlhfs_functions_without_one_number_is_refused(rewards: Any) -> None:
    with pytest.raises(BadReturn):
        result_of({"rewards": rewards})
