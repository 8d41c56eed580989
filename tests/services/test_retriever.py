"""The retriever over HTTP: wire format, limits, concurrent clients, and the serve command."""

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from tests.services.passages import ROWS, WORDS, naive_bm25, passages, write
from verlite.cli import app as command
from verlite.http.server import HTTPServer, ServiceError, bind, url
from verlite.services.index import BM25, Hit, Index, open_index
from verlite.services.retriever import make_app

pytestmark = pytest.mark.process


@contextmanager
def serving(
    path: Path, change: Callable[[BM25], Index] = lambda index: index, **settings: Any
) -> Iterator[str]:
    """Run the service in a thread and yield its address. `change` may wrap the index."""
    index = BM25()
    corpus = open_index(path, index, None, False, lambda items, **shown: items)
    bound = bind("127.0.0.1", 0)
    server = HTTPServer(make_app(corpus, change(index), **settings), "ready")
    thread = threading.Thread(target=server.run, args=[[bound]])
    address = url(bound)
    thread.start()
    try:
        wait_for(lambda: server.started)
        yield address
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", passages())


@pytest.fixture(scope="module")
def base(path: Path) -> Iterator[str]:
    with serving(path) as address:
        yield address


CLIENT = httpx.Client(
    timeout=30, headers={"Content-Type": "application/json"}
)  # shared, because building a client is slow


def ask(base: str, body: Any) -> Any:
    answer = CLIENT.post(f"{base}/retrieve", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def wanted(query: str, topk: int = 3) -> list[dict[str, Any]]:
    documents = passages()
    return [
        {"document": documents[row], "score": pytest.approx(score, rel=1e-5)}
        for row, score in naive_bm25(query)[:topk]
    ]


def test_search_r1_request(base: str) -> None:
    queries = ["amber birch", "unknown", "feather"]
    answer = ask(base, {"queries": queries, "topk": 2, "return_scores": True})
    assert answer == {"result": [wanted("amber birch", 2), [], wanted("feather", 2)]}
    assert len(answer["result"][0]) == 2


def test_results_without_scores_are_documents(base: str) -> None:
    """Also for two queries, which Search-R1's server unpacks as (documents, scores)."""
    for queries in (["amber"], ["amber", "birch"], ["amber", "birch", "canyon"]):
        for flag in ({}, {"return_scores": False}, {"return_scores": None}):
            assert ask(base, {"queries": queries, **flag}) == {
                "result": [[item["document"] for item in wanted(query)] for query in queries]
            }


def test_a_single_query(base: str) -> None:
    assert ask(base, {"query": "amber", "topk": 1, "return_scores": True}) == {
        "result": [wanted("amber", 1)]
    }


def test_empty_list_of_queries(base: str) -> None:
    assert ask(base, {"queries": [], "topk": 3, "return_scores": True}) == {"result": []}


def test_topk_defaults_to_the_servers_and_may_exceed_the_hits(path: Path) -> None:
    with serving(path, topk=5) as base:
        assert [len(found) for found in ask(base, {"queries": ["amber"]})["result"]] == [5]
        assert [
            len(found) for found in ask(base, {"queries": ["amber"], "topk": None})["result"]
        ] == [5]
        assert ask(base, {"query": "amber", "topk": 100, "return_scores": True}) == {
            "result": [wanted("amber", 100)]
        }
        assert CLIENT.get(f"{base}/health").json() == {
            "status": "ok",
            "documents": ROWS,
            "retriever": "bm25",
            "topk": 5,
        }


def test_request_larger_than_a_batch_keeps_its_order(path: Path) -> None:
    queries = [f"{first} {second}" for first in WORDS[:10] for second in WORDS[10:20]]
    with serving(path, max_batch=7) as base:
        assert ask(base, {"queries": queries, "return_scores": True}) == {
            "result": [wanted(query) for query in queries]
        }


def test_text_is_utf8(tmp_path: Path) -> None:
    path = write(tmp_path / "corpus.jsonl", [{"id": "é", "contents": '"Beyoncé"\n歌手 😀'}])
    with serving(path) as base:
        answer = CLIENT.post(f"{base}/retrieve", content=json.dumps({"query": "beyonce 歌手"}))
        assert answer.headers["content-type"] == "application/json"
        assert json.loads(answer.content.decode()) == {
            "result": [[{"id": "é", "contents": '"Beyoncé"\n歌手 😀'}]]
        }


class Slow:
    """An index that records its batches. It waits for `gate`, then sleeps for each query."""

    name = "slow"

    def __init__(self, index: BM25, seconds: float = 0.02) -> None:
        self.index = index
        self.seconds = seconds
        self.batches: list[list[str]] = []
        self.busy = self.at_once = 0
        self.gate = threading.Event()
        self.gate.set()

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        self.busy += 1
        self.at_once = max(self.at_once, self.busy)
        self.batches.append(list(queries))
        self.gate.wait(20)
        time.sleep(self.seconds * len(queries))
        found = self.index.search(queries, topk)
        self.busy -= 1
        return found


def slow(seconds: float = 0.02) -> tuple[list[Slow], Callable[[BM25], Any]]:
    made: list[Slow] = []

    def change(index: BM25) -> Any:
        made.append(Slow(index, seconds))
        return made[0]

    return made, change


def test_64_concurrent_clients_get_the_right_results(path: Path) -> None:
    made, change = slow(0.002)
    queries = [
        [f"{WORDS[i % 30]} {WORDS[(i * 7 + 3) % 30]}", WORDS[(i + 5) % 30]] for i in range(64)
    ]
    with serving(path, change, max_batch=16) as base, ThreadPoolExecutor(64) as clients:
        bodies = [
            {"queries": pair, "topk": 1 + i % 4, "return_scores": i % 2 == 0}
            for i, pair in enumerate(queries)
        ]
        made[0].gate.clear()
        answering = clients.map(lambda body: ask(base, body), bodies)
        time.sleep(1.0)  # long enough for most requests to be queued
        made[0].gate.set()
        answers = list(answering)
    for body, answer in zip(bodies, answers, strict=True):
        items = [wanted(query, body["topk"]) for query in body["queries"]]
        assert answer == {
            "result": items
            if body["return_scores"]
            else [[item["document"] for item in found] for found in items]
        }
    assert made[0].at_once == 1
    assert sum(map(len, made[0].batches)) == 128
    assert len(made[0].batches) < 64, "waiting requests were not batched"
    assert max(map(len, made[0].batches)) <= 16


def test_large_request_does_not_block_health_or_small_requests(path: Path) -> None:
    made, change = slow()
    with serving(path, change, max_batch=10) as base, ThreadPoolExecutor(1) as client:
        made[0].gate.clear()
        large = client.submit(ask, base, {"queries": ["amber"] * 150})
        wait_for(lambda: len(made[0].batches) > 0)
        try:
            assert CLIENT.get(f"{base}/health").json()["status"] == "ok"
        finally:
            made[0].gate.set()
        assert ask(base, {"query": "birch"})["result"][0] == [
            item["document"] for item in wanted("birch")
        ]
        assert len(large.result()["result"]) == 150
    assert "birch" in [query for batch in made[0].batches[:-1] for query in batch]


def test_disconnect_while_sending_is_not_an_error(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(path) as base:
        with socket.create_connection(("127.0.0.1", httpx.URL(base).port)) as client:
            client.sendall(
                b"POST /retrieve HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n"
                b"Content-Type: application/json\r\n\r\nhalf of it"
            )
        time.sleep(0.2)
        assert len(ask(base, {"query": "amber"})["result"]) == 1
    assert "Traceback" not in capsys.readouterr().err


def test_disconnect_stops_the_search_of_a_request(path: Path) -> None:
    made, change = slow()
    with serving(path, change, max_batch=5) as base:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{base}/retrieve", json={"queries": ["amber"] * 200}, timeout=0.3)
        time.sleep(1.0)
        searched = len(made[0].batches)
        assert 0 < searched < 40
        ask(base, {"query": "birch"})
        assert len(made[0].batches) == searched + 1


def test_queued_requests_of_disconnected_clients_are_dropped(path: Path) -> None:
    """A request that timed out must not delay the client's next try."""
    made, change = slow()
    timed_out = []

    def time_out(base: str) -> None:
        try:
            httpx.post(f"{base}/retrieve", json={"queries": ["amber"] * 5}, timeout=0.3)
        except httpx.ReadTimeout:
            timed_out.append(base)

    with serving(path, change, max_batch=5) as base:
        threads = [threading.Thread(target=time_out, args=[base]) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ask(base, {"query": "birch"})
        time.sleep(0.5)
        assert timed_out and len(made[0].batches) < 12, "only the first requests were searched"


class Failing(Slow):
    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        if "fail" in queries:
            raise MemoryError("too large")
        return self.index.search(queries, topk)


def test_failed_search_returns_500_and_the_service_continues(path: Path) -> None:
    with serving(path, lambda index: Failing(index)) as base:  # type: ignore[arg-type]
        answer = CLIENT.post(f"{base}/retrieve", json={"query": "fail"})
        assert (answer.status_code, answer.json()) == (
            500,
            {"detail": "the search failed: MemoryError: too large"},
        )
        assert ask(base, {"query": "amber", "return_scores": True}) == {"result": [wanted("amber")]}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "the body is not JSON: Expecting property name"),
        (b"\xff", "the body is not JSON: "),
        (b"[" * 100_000, "the body is not JSON: "),
        ([1], "the body is a list, expected an object such as"),
        ({}, "the body has no queries; give a list of texts"),
        ({"queries": None}, "the body has no queries; give a list of texts"),
        ({"queries": ["a"], "query": "a"}, "the body has both queries and query; keep one"),
        ({"queries": "amber"}, "queries is text, expected a list of texts"),
        ({"queries": ["a", 5]}, "queries[1] is a number, expected text"),
        ({"query": ["a"]}, "query is a list, expected text"),
        (
            {"queries": ["a"] * 1025},
            "queries has 1025 entries, at most 1024 may be asked at a time",
        ),
        (
            {"queries": ["a", "b" * 8193]},
            "queries[1] has 8193 characters, at most 8192 are allowed",
        ),
        (b'{"query": "\\ud83d"}', "query has an unpaired surrogate, which is not a character"),
        ({"query": "a", "topk": 0}, "topk is 0, expected a whole number from 1 to 100"),
        ({"query": "a", "topk": 101}, "topk is 101, expected a whole number from 1 to 100"),
        ({"query": "a", "topk": 2.0}, "topk is 2.0, expected a whole number from 1 to 100"),
        ({"query": "a", "topk": True}, "topk is true, expected a whole number from 1 to 100"),
        ({"query": "a", "return_scores": "yes"}, 'return_scores is "yes", expected true or false'),
    ],
    ids=str,
)
def test_invalid_request_returns_422_with_the_reason(base: str, body: Any, message: str) -> None:
    answer = CLIENT.post(
        f"{base}/retrieve", content=body if isinstance(body, bytes) else json.dumps(body)
    )
    assert answer.status_code == 422
    assert answer.json()["detail"].startswith(message)


def test_largest_allowed_requests(base: str) -> None:
    assert len(ask(base, {"queries": ["amber"] * 1024, "topk": 100})["result"]) == 1024
    assert len(ask(base, {"query": "b" * 8192})["result"]) == 1


def test_too_large_body_returns_413(path: Path) -> None:
    with serving(path, max_body=1000) as base:
        fits = json.dumps({"query": "amber"}).ljust(1000)
        assert CLIENT.post(f"{base}/retrieve", content=fits).status_code == 200
        for content in (fits + " ", (fits.encode() for _ in range(10)), "x" * 100_000):
            answer = CLIENT.post(f"{base}/retrieve", content=content)
            assert (answer.status_code, answer.json()["detail"]) == (
                413,
                "the body has more than 1000 bytes; send fewer queries at a time",
            )


def test_unusable_address_is_a_one_line_error(path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = CliRunner().invoke(
            command, ["serve", "retriever", "--corpus", str(path), "--port", str(port)]
        )
        assert (done.exit_code, done.stderr) == (
            1,
            f"--port {port}: is in use on 127.0.0.1; choose another, or 0 for any free one\n",
        )
    with pytest.raises(
        ServiceError, match=r"--host no\.such\.host\.invalid --port 0: is not a valid address"
    ):
        bind("no.such.host.invalid", 0)
    with pytest.raises(ServiceError, match=r"--host 192\.0\.2\.1 --port 0: cannot be listened on"):
        bind("192.0.2.1", 0)


def test_wrong_files_and_options_are_one_line_errors(path: Path, tmp_path: Path) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(command, ["serve", "retriever", "--port", "0", *arguments])
        return done.exit_code, done.stderr

    code, text = run("--corpus", str(tmp_path / "missing.jsonl"))
    assert (code, "missing.jsonl" in text, text.count("\n")) == (2, True, 1)
    assert run("--corpus", str(path), "--rebuild") == (
        2,
        "--rebuild has no effect without --index DIR\n",
    )
    write(tmp_path / "note.txt", ["mine"])
    code, text = run("--corpus", str(path), "--index", str(tmp_path))
    assert (code, "exists but is not a readable index" in text) == (2, True)


def test_command_serves_on_loopback_until_sigterm(path: Path, tmp_path: Path) -> None:
    line = [
        sys.executable,
        "-m",
        "verlite.cli",
        "serve",
        "retriever",
        "--corpus",
        str(path),
        "--port",
        "0",
        "--index",
        str(tmp_path / "index"),
    ]
    process = subprocess.Popen(
        [*line, "--k1", "1.5", "--b", "0.75", "--max-queries", "2"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        ready = process.stdout.readline()
        match = re.fullmatch(
            rf"serving {ROWS} documents \(bm25\) at (http://127\.0\.0\.1:(\d+))/retrieve\n", ready
        )
        assert match and int(match[2]) > 0, ready
        answer = ask(match[1], {"query": "amber birch", "return_scores": True})
        assert [item["score"] for item in answer["result"][0]] == [
            pytest.approx(score, rel=1e-5) for _, score in naive_bm25("amber birch", 1.5, 0.75)[:3]
        ]
        assert CLIENT.post(f"{match[1]}/retrieve", json={"queries": ["a"] * 3}).status_code == 422
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert process.stdout.read() == ""
    finally:
        process.kill()
        process.wait()
    assert (tmp_path / "index/verlite_index.json").exists()


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)
