"""The reference service over HTTP with a stand-in for the model: format, limits, and its client."""

import base64
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest

from tests.http.running import running
from verlite.engine import reference_client, reference_wire
from verlite.engine.reference_client import ReferenceUnavailable, WrongReference
from verlite.engine.reference_wire import Job, ModelInfo
from verlite.http.server import HTTPServer, bind, url
from verlite.services.reference import make_app
from verlite.spec.roles import ReferenceServiceSpec

JSON = {"Content-Type": "application/json"}
pytestmark = pytest.mark.process

INFO = ModelInfo("float32 float32:01", "toy", 100, 50, "float32", {"float32": 1}, {}, 1)


class Toy:
    """A model whose log-prob of a token is -(its id + its position / 100) / temperature."""

    def __init__(self, change: Callable[[list[np.ndarray]], list[np.ndarray]] = lambda x: x):
        self.calls: list[tuple[int, float]] = []
        self.change = change

    def log_probs(self, sequences, scored, temperature):
        self.calls.append((len(sequences), temperature))
        rows = zip(sequences, scored, strict=True)
        return self.change([expected(row, last, temperature) for row, last in rows])


def expected(ids, last, temperature=1.0):
    places = np.arange(len(ids)) / 100
    return (-(ids + places) / temperature)[-last:].astype(np.float32)


@contextmanager
def serving(model: Any = None, port: int = 0, info: ModelInfo = INFO, **more: Any) -> Iterator[str]:
    with running(make_app(model or Toy(), info, 1000, **more), port) as address:
        yield address


def config(*urls: str, **more: Any) -> ReferenceServiceSpec:
    return ReferenceServiceSpec(url=list(urls), **({"timeout_s": 5, "deadline_s": 2} | more))


@pytest.fixture(scope="module")
def base() -> Iterator[str]:
    with serving() as address:
        yield address


def sample(count=20, seed=0):
    rng = np.random.default_rng(seed)
    sequences = [rng.integers(0, 100, rng.integers(2, 50)).astype(np.int32) for _ in range(count)]
    return sequences, [int(rng.integers(1, len(row))) for row in sequences]


def text(values, dtype="<i4"):
    return base64.b64encode(np.array(values, dtype).tobytes()).decode()


# The wire format.


def test_documented_request_by_hand(base):
    body = {"ids": text([5, 6, 7, 8, 9]), "lengths": [2, 3], "scored": [1, 2], "temperature": 2.0}
    answer = httpx.post(f"{base}/log_probs", json=body).json()
    assert answer["model"] == INFO.model
    values = np.frombuffer(base64.b64decode(answer["log_probs"]), "<f4")
    np.testing.assert_allclose(values, [-3.005, -4.005, -4.51])
    assert httpx.get(f"{base}/health").text == '{"status": "healthy"}'
    assert httpx.get(f"{base}/model").json()["vocab_size"] == 100


def test_request_and_answer_survive_their_encoding():
    sequences, scored = sample()
    job = reference_wire.read_request(
        reference_wire.request(Job(sequences, scored, 0.3)), 100, 50, 20
    )
    assert job.scored == scored and job.temperature == 0.3
    assert all((a == b).all() for a, b in zip(job.sequences, sequences, strict=True))
    rows = [expected(row, last) for row, last in zip(sequences, scored, strict=True)]
    found, model = reference_wire.read_answer(reference_wire.answer(rows, "m"), scored)
    assert model == "m" and all((a == b).all() for a, b in zip(found, rows, strict=True))


RIGHT = {"ids": text([1, 2, 3]), "lengths": [3], "scored": [2], "temperature": 1.0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": None}, "ids is not base64 text"),
        ({"ids": "!!"}, "ids is not base64 text"),
        ({"ids": base64.b64encode(b"abc").decode()}, "not a whole number of values of 4 bytes"),
        ({"ids": text([1, 2])}, "ids has 2 tokens, and lengths 3 in all"),
        ({"ids": text([1, 2, 100])}, "token ids from 1 to 100; the model has 100 tokens"),
        ({"ids": text([1, -1, 2])}, "token ids from -1 to 2"),
        ({"lengths": 3}, "lengths is not a list"),
        ({"lengths": []}, "lengths is not a list"),
        ({"lengths": [True]}, "lengths has an entry that is not a whole number above 0"),
        ({"lengths": [2**40]}, "lengths has an entry that is not a whole number"),
        ({"lengths": [51]}, r"lengths[0] is 51; the model's longest sequence is 50"),
        ({"lengths": [1] * 5, "scored": [1] * 5}, "at most 4 sequences per request"),
        ({"scored": [3]}, "scored[0] is 3, but the sequence has 3 tokens"),
        ({"scored": [0]}, "scored has an entry"),
        ({"scored": [1, 1]}, "lengths has 1 entries and scored 2"),
        ({"temperature": "hot"}, "temperature is not a number"),
        ({"temperature": 0}, "temperature is 0, expected a number from"),
        ({"temperature": True}, "temperature is not a number"),
        ({"temperature": 10**400}, "temperature is 10000000000000000000, expected a number from"),
    ],
)
def test_wrong_request_is_refused_with_the_field(change, message):
    with pytest.raises(ValueError) as raised:
        reference_wire.read_request(RIGHT | change, 100, 50, 4)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "expected an object"),
        ({"log_probs": text([-1.0], "<f4")}, "expected an object with log_probs and model"),
        ({"log_probs": text([-1.0], "<f4"), "model": "m"}, "1 values for 2 tokens"),
        ({"log_probs": text([-1.0] * 3, "<f4"), "model": "m"}, "3 values for 2 tokens"),
        ({"log_probs": text([-1.0, np.nan], "<f4"), "model": "m"}, "not finite or above 0"),
        ({"log_probs": text([-1.0, 0.5], "<f4"), "model": "m"}, "not finite or above 0"),
        ({"log_probs": "x", "model": "m"}, "not base64"),
    ],
)
def test_wrong_answer_is_not_used(value, message):
    with pytest.raises(ValueError, match=message):
        reference_wire.read_answer(value, [2])


def test_http_status_of_wrong_requests(base):
    post = httpx.Client(base_url=base).post
    assert post("/log_probs", json=RIGHT | {"scored": [3]}).status_code == 422
    assert post("/log_probs", content=b"{", headers=JSON).status_code == 422
    assert post("/log_probs", json=[1]).json()["detail"].startswith("the body is a list")
    with serving(max_body=100) as small:
        assert httpx.post(f"{small}/log_probs", content=b" " * 101, headers=JSON).status_code == 413


def test_token_is_needed_if_there_is_one(monkeypatch):
    sequences, scored = sample(3)
    with serving(token="secret") as address:
        assert httpx.get(f"{address}/health").status_code == 401
        with pytest.raises(ReferenceUnavailable, match="HTTP 401"):
            reference_client.check(config(address))
        monkeypatch.setenv("REF_TOKEN", "secret")
        given = config(address, token_env="REF_TOKEN")
        assert reference_client.check(given)[0] == INFO
        assert len(reference_client.log_probs(given, sequences, scored, 1.0, INFO.model)) == 3
        monkeypatch.delenv("REF_TOKEN")
        with pytest.raises(ReferenceUnavailable, match=r"ref.token_env=REF_TOKEN: this env"):
            reference_client.check(given)


# The client.


def test_client_returns_the_models_numbers_in_order(base, monkeypatch):
    monkeypatch.setattr(reference_client, "REQUEST_TOKENS", 100)
    monkeypatch.setattr(reference_client, "REQUEST_SEQUENCES", 3)
    sequences, scored = sample(50)
    found = reference_client.log_probs(config(base), sequences, scored, 0.5, INFO.model)
    for ids, last, values in zip(sequences, scored, found, strict=True):
        np.testing.assert_array_equal(values, expected(ids, last, 0.5))
    assert reference_client.log_probs(config(base), [], [], 1.0, INFO.model) == []


def test_requests_are_split_by_tokens_and_by_sequences(monkeypatch):
    monkeypatch.setattr(reference_client, "REQUEST_TOKENS", 10)
    monkeypatch.setattr(reference_client, "REQUEST_SEQUENCES", 3)
    sequences = [np.zeros(length, np.int32) for length in (4, 6, 1, 1, 1, 1, 12, 2)]
    jobs = list(reference_client._jobs(sequences, [1] * 8, 1.0))
    sizes = [[len(row) for row in job.sequences] for job in jobs]
    assert sizes == [[4, 6], [1, 1, 1], [1], [12], [2]]


def test_waiting_requests_of_one_temperature_are_computed_together():
    model = Toy()
    release = threading.Event()

    def wait_once(rows):
        if len(model.calls) == 1:
            release.wait(20)
        return rows

    model.change = wait_once
    with serving(model) as address, ThreadPoolExecutor(8) as pool:

        def ask(seed, temperature):
            sequences, scored = sample(2, seed)
            given = config(address, deadline_s=30, timeout_s=30)
            found = reference_client.log_probs(given, sequences, scored, temperature, INFO.model)
            for ids, last, values in zip(sequences, scored, found, strict=True):
                np.testing.assert_array_equal(values, expected(ids, last, temperature))

        first = pool.submit(ask, 0, 1.0)
        while not model.calls:
            time.sleep(0.01)
        others = [pool.submit(ask, seed, 1.0 if seed < 6 else 2.0) for seed in range(1, 8)]
        time.sleep(1)
        release.set()
        for one in [first, *others]:
            one.result(30)
    assert sum(count for count, _ in model.calls) == 16 and len(model.calls) < 8
    assert {temperature for _, temperature in model.calls} == {1.0, 2.0}


def test_other_weights_in_mid_run_end_it_at_once():
    sequences, scored = sample(3)
    with serving(info=replace(INFO, model="float32 float32:02")) as address:
        begin = time.monotonic()
        with pytest.raises(WrongReference, match="another model than at the start of the run"):
            reference_client.log_probs(config(address), sequences, scored, 1.0, INFO.model)
        assert time.monotonic() - begin < 1.5  # without the retries of a failure


def test_values_that_are_not_log_probs_are_never_used():
    sequences, scored = sample(3)
    with (
        serving(Toy(lambda rows: [row * np.nan for row in rows])) as address,
        pytest.raises(ReferenceUnavailable, match="a value that is not finite"),
    ):
        reference_client.log_probs(config(address), sequences, scored, 1.0, INFO.model)


def test_service_that_comes_back_within_the_deadline_is_waited_for():
    sequences, scored = sample(3)
    with serving() as address:
        port = int(address.rpartition(":")[2])
    with ThreadPoolExecutor(1) as pool:
        given = config(address, deadline_s=20)
        waiting = pool.submit(reference_client.log_probs, given, sequences, scored, 1.0, INFO.model)
        time.sleep(0.7)
        assert not waiting.done()
        with serving(port=port):
            assert len(waiting.result(20)) == 3


def test_service_that_stays_away_is_an_error_with_key_and_remedy():
    sequences, scored = sample(3)
    gone = config("http://127.0.0.1:1")
    with pytest.raises(ReferenceUnavailable, match=r"ref.deadline_s=2 after \d+ tries; the last"):
        reference_client.log_probs(gone, sequences, scored, 1.0, INFO.model)
    with pytest.raises(
        ReferenceUnavailable, match="Start it .verlite serve reference --model_path"
    ):
        reference_client.check(gone)


def test_silent_server_beside_another_is_a_warning(base):
    info, warning = reference_client.check(config(base, "http://127.0.0.1:1"))
    assert info == INFO and "127.0.0.1:1 does not answer" in warning
    sequences, scored = sample(9)
    given = config("http://127.0.0.1:1", base, deadline_s=20)
    assert len(reference_client.log_probs(given, sequences, scored, 1.0, INFO.model)) == 9


def test_servers_with_different_models_are_refused(base):
    with (
        serving(info=replace(INFO, model="float32 float32:02")) as other,
        pytest.raises(WrongReference, match="services with different models"),
    ):
        reference_client.check(config(base, other))


def test_address_of_another_service_is_named():
    from fastapi import FastAPI

    bound = bind("127.0.0.1", 0)
    app = FastAPI()
    app.get("/model")(lambda: {"model": 1})
    server = HTTPServer(app, "ready")
    thread = threading.Thread(target=server.run, args=[[bound]])
    thread.start()
    try:
        with pytest.raises(ReferenceUnavailable, match="not answered by a reference service"):
            reference_client.check(config(url(bound)))
    finally:
        server.should_exit = True
        thread.join(20)


def test_lost_model_is_unhealthy_and_gives_no_numbers():
    lost = []

    def fail(rows):
        raise RuntimeError("out of memory")

    with serving(Toy(fail), on_lost=lambda: lost.append(1)) as address:
        assert httpx.get(f"{address}/health").status_code == 200
        answer = httpx.post(f"{address}/log_probs", json=RIGHT)
        assert answer.status_code == 503 and "memory" not in answer.text
        assert httpx.get(f"{address}/health").status_code == 503
        assert httpx.post(f"{address}/log_probs", json=RIGHT).status_code == 503
    assert lost == [1]
