"""The retriever client against a real server: batches, wire formats, faults, outages."""

import asyncio
import re
import time

import pytest

from tests.envs.retriever import Retriever, free_port
from verlite.envs.retriever import RetrieverClient
from verlite.envs.step import ToolError
from verlite.spec.roles import RetrieverSpec

pytestmark = pytest.mark.process

FRANCE = '"Paris"\nParis is the capital of France.'


@pytest.fixture
def server():
    with Retriever() as server:
        yield server


def client_of(*servers, **settings) -> RetrieverClient:
    urls = [server if isinstance(server, str) else server.url for server in servers]
    return RetrieverClient(
        RetrieverSpec(url=tuple(urls), **{"deadline_s": 5.0, "timeout_s": 1.0, **settings})
    )


def ask(client, *queries):
    """Return all answers, with exceptions for failed searches, and the total seconds."""

    async def run():
        async with client:
            return await asyncio.gather(
                *(client.search(query) for query in queries), return_exceptions=True
            )

    began = time.monotonic()
    return asyncio.run(run()), time.monotonic() - began


def test_each_query_gets_its_own_passages(server):
    queries = ["capital of France", "Everest", "Paul Walker", "nothing like that"]
    client = client_of(server, topk=1)
    found, _ = ask(client, *queries)
    assert [answer.passages for answer in found] == [
        [FRANCE],
        ['"Mount Everest"\nMount Everest is 8849 metres high.'],
        ['"Paul Walker"\nPaul Walker was an American actor who died in 2013.'],
        [],
    ]
    again, _ = ask(client, *queries[::-1])
    assert [answer.passages for answer in again[::-1]] == [
        answer.passages for answer in found
    ] and all(answer.cached for answer in again)
    assert server.requests == [{"queries": queries, "topk": 1, "return_scores": True}]


def test_queries_share_requests_and_equal_ones_are_sent_once(server):
    found, _ = ask(
        client_of(server, batch_size=64), *[f"metres {i}" for i in range(256)], *["Everest"] * 50
    )
    assert all(answer.passages for answer in found)
    assert len(server.requests) <= 6 and max(len(body["queries"]) for body in server.requests) == 64
    asked = [query for body in server.requests for query in body["queries"]]
    assert len(asked) == len(set(asked)) == 257
    assert sum(answer.cached for answer in found) == 49


def test_cache_is_bounded(server):
    client = client_of(server, cache_size=2)
    ask(client, "Paris")
    again, _ = ask(client, "Paris")
    assert again[0].cached and again[0].passages == ask(client_of(server), "Paris")[0][0].passages
    ask(client, "Everest"), ask(client, "Walker")  # Paris is the oldest now
    before = len(server.requests)
    ask(client, "Walker"), ask(client, "Paris")
    assert [body["queries"] for body in server.requests[before:]] == [["Paris"]]


@pytest.mark.parametrize(
    "item",
    [
        {"document": {"id": "7", "contents": FRANCE}, "score": 0.5},
        {"contents": FRANCE},
        {"document": FRANCE},
        FRANCE,
        {"document": {"contents": FRANCE}},
        {"title": '"Paris"', "text": "Paris is the capital of France."},
    ],
)
def test_all_passage_formats_are_read(server, item):
    server.answer = lambda body: (200, {"result": [[item] * 5 for _ in body["queries"]]})
    found, _ = ask(
        client_of(server, topk=2), "q", "p"
    )  # some servers send more than they were asked for
    assert [answer.passages for answer in found] == [[FRANCE, FRANCE]] * 2


def test_single_query_servers_get_one_query_per_request(server):
    def one_query(body):
        return (
            (200, {"result": [server.usual({"queries": [body["query"]]})[1]["result"][0]]})
            if "query" in body
            else (422, {"detail": "query"})
        )

    server.answer = one_query
    client = client_of(server, topk=1)

    async def run():
        async with client:
            await client.check()
            return [
                (await client.search(query)).passages for query in ("capital of France", "Everest")
            ]

    assert asyncio.run(run())[0] == [FRANCE]
    assert [body.get("query") for body in server.requests[2:]] == ["capital of France", "Everest"]


def fails(times, status=500, answer=b"broken"):
    """Answer the first `times` requests with a fault, then normally."""
    left = [times]

    def behave(body):
        left[0] -= 1
        return (status, answer) if left[0] >= 0 else Retriever.usual(body)

    return behave


@pytest.mark.parametrize(
    "fault",
    [
        (500, b"boom"),
        (503, b""),
        (429, b"slow down"),
        (200, b"<html>no JSON</html>"),
        (200, {"results": []}),
        (200, {"result": "x"}),
        (200, {"result": [[]]}),
        (200, {"result": [[{"score": 1}], []]}),
        (200, [1]),
        (200, b"\xff"),
    ],
)
def test_transient_fault_costs_one_retry(server, fault):
    server.answer = fails(1, *fault)
    found, _ = ask(client_of(server, topk=1), "capital of France", "Everest")
    assert found[0].passages == [FRANCE] and found[0].retries == 1 and len(found[1].passages) == 1
    assert [len(body["queries"]) for body in server.requests] == [2, 1, 1], (
        "a request that failed is asked again in halves"
    )


@pytest.mark.parametrize("fault", ["breaks", "is slow"])
def test_one_bad_query_does_not_fail_the_others(server, fault):
    """256 searches through the real client: 255 are answered, whatever happens to the other."""

    def picky(body):
        if not any("poison" in query for query in body["queries"]):
            return Retriever.usual(body)
        return 500, b"poisoned"

    server.answer = picky
    if fault == "is slow":
        server.delays = lambda body: (
            5.0 if any("poison" in query for query in body["queries"]) else 0.0
        )
        server.answer = Retriever.usual
    found, seconds = ask(
        client_of(server, timeout_s=0.3, deadline_s=4.0),
        *[f"capital {i}" for i in range(255)],
        "poison",
    )
    assert [isinstance(answer, ToolError) for answer in found] == [False] * 255 + [
        True
    ] and seconds < 15


def test_requests_shrink_for_a_slow_server(server):
    """A query takes 20 ms, so 64 exceed the timeout. The smaller batch size is kept."""
    server.delays = lambda body: 0.02 * len(body["queries"])
    client = client_of(server, timeout_s=0.5, deadline_s=20.0, max_in_flight=1)
    waves = []
    for wave in range(3):
        before = len(server.requests)
        found, _ = ask(client, *[f"capital {wave} {i}" for i in range(64)])
        assert all(answer.passages for answer in found)
        waves.append(max(len(body["queries"]) for body in server.requests[before:]))
    assert waves == [64, 32, 16], "each wave begins with half of what took too long"


def test_one_slow_query_does_not_shrink_other_requests(server):
    server.delays = lambda body: 5.0 if "poison" in body["queries"] else 0.0
    client = client_of(server, timeout_s=0.2, deadline_s=1.5)
    ask(client, *[f"capital {i}" for i in range(63)], "poison")
    before = len(server.requests)
    ask(client, *[f"metres {i}" for i in range(64)])
    assert [len(body["queries"]) for body in server.requests[before:]] == [32, 32]


def test_joining_a_pending_query_gets_the_full_time(server):
    server.answer = fails(10**9)

    async def run():
        async with client_of(server, deadline_s=1.0) as client:
            first = asyncio.create_task(client.search("Everest"))
            await asyncio.sleep(0.8)
            second = asyncio.create_task(client.search("Everest"))
            server.answer = Retriever.usual
            await asyncio.gather(first, second, return_exceptions=True)
            return second

    second = asyncio.run(run())
    assert second.exception() is None and second.result().passages


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ((500, b"boom"), "HTTP 500: boom"),
        ((200, b"nonsense"), "not in the retriever's format"),
        ((200, {"result": []}), "0 results for 1 queries"),
    ],
)
def test_persistent_fault_is_a_tool_error_with_its_cause(server, fault, message):
    server.answer = lambda body: fault
    (error,), seconds = ask(client_of(server, deadline_s=0.8), "q")
    assert (
        isinstance(error, ToolError)
        and message in str(error)
        and "deadline_s=0.8" in str(error)
        and server.url in str(error)
    )
    assert seconds < 15


def test_timeout_is_a_tool_error(server):
    server.delay = 3.0
    (error,), seconds = ask(client_of(server, timeout_s=0.2, deadline_s=0.7), "q")
    # The last try has what the pauses before it, whose lengths are drawn, left of the deadline.
    assert isinstance(error, ToolError) and re.search(
        r"the last: .*: no answer to 1 query within 0\.[012]\d* s", str(error)
    )
    assert 0.6 < seconds < 2.9, "an answer takes 3 s"


def test_one_rejected_query_does_not_fail_the_others(server):
    def picky(body):
        return (
            (422, {"detail": "odd"})
            if any("odd" in query for query in body["queries"])
            else Retriever.usual(body)
        )

    server.answer = picky
    found, _ = ask(client_of(server, topk=1), "capital of France", "odd", "Everest")
    assert found[0].passages == [FRANCE] and found[2].passages
    assert (
        isinstance(found[1], ToolError)
        and "refuses the query 'odd'" in str(found[1])
        and "422" in str(found[1])
    )
    assert len(server.requests) <= 5, "a refusal is not tried again"


def test_another_server_takes_over(server):
    with Retriever() as other:
        server.answer = lambda body: (500, b"")
        found, _ = ask(client_of(server, other, topk=1), "capital of France", "Everest")
        assert found[0].passages == [FRANCE] and (len(server.requests), len(other.requests)) == (
            1,
            2,
        )
    found, _ = ask(
        client_of(
            f"http://127.0.0.1:{free_port()}/retrieve",
            Retriever.__name__ and server.url,
            deadline_s=0.5,
        ),
        "q",
    )
    assert isinstance(found[0], ToolError)


def test_least_busy_server_gets_the_request(server):
    with Retriever() as other:
        server.delay = other.delay = 0.1
        ask(client_of(server, other, batch_size=1, max_in_flight=4), *[f"q{i}" for i in range(6)])
        assert len(server.requests) == len(other.requests) == 3


def test_max_in_flight_limits_requests_per_server(server):
    running = [0]
    most = [0]

    def count(body):
        most[0] = max(most[0], running[0])
        return Retriever.usual(body)

    app = server._app
    server.answer = count
    server.delay = 0.05

    async def counted(scope, receive, send):
        running[0] += 1
        await app(scope, receive, send)
        running[0] -= 1

    server._server.config.app = server._server.config.loaded_app = counted
    ask(client_of(server, batch_size=1, max_in_flight=3), *[f"q{i}" for i in range(12)])
    assert most[0] <= 3 and len(server.requests) == 12


def test_server_restart_loses_no_query():
    port = free_port()
    client = client_of(f"http://127.0.0.1:{port}/retrieve", deadline_s=20.0, batch_size=4, topk=1)

    async def run():
        async with client:
            asked = [
                asyncio.create_task(client.search(f"capital of France {i}")) for i in range(40)
            ]
            await asyncio.sleep(1.0)
            with Retriever(port) as server:
                found = await asyncio.gather(*asked)
                return found, len(server.requests)

    found, requests = asyncio.run(run())
    assert (
        all(answer.passages == [FRANCE] for answer in found)
        and max(answer.retries for answer in found) >= 1
    )
    assert requests == 10


def test_failing_server_is_paused_and_probed_by_one_request(server):
    server.answer = lambda body: (500, b"")
    found, _ = ask(
        client_of(server, batch_size=1, max_in_flight=8, deadline_s=1.5),
        *[f"q{i}" for i in range(200)],
    )
    assert all(isinstance(error, ToolError) for error in found)
    assert len(server.requests) <= 5 + 8, (
        "at most those that were on their way when it was put to rest"
    )


def test_each_pause_ends_with_a_single_request(server, monkeypatch):
    monkeypatch.setattr("verlite.http.client.PAUSE_S", 0.3)
    server.answer = lambda body: (500, b"")
    ask(
        client_of(server, batch_size=1, max_in_flight=8, deadline_s=1.5),
        *[f"q{i}" for i in range(50)],
    )
    assert 5 + 2 <= len(server.requests) <= 5 + 8 + 5, "one every 0.3 s of the 1.5"


def test_internal_client_error_reaches_the_sample(server, monkeypatch):
    def broken(self, question, passages, retries):
        raise KeyError("a bug")

    monkeypatch.setattr(RetrieverClient, "_keep", broken)
    (error,), seconds = ask(client_of(server), "q")
    assert isinstance(error, ToolError) and str(error) == "KeyError: 'a bug'" and seconds < 15


def test_check_names_the_server_and_the_remedy(server):
    async def check(client):
        await client.check()

    asyncio.run(check(client_of(server)))
    gone = f"http://me:secret@127.0.0.1:{free_port()}/retrieve"
    with pytest.raises(ToolError, match="verlite serve retriever") as caught:
        asyncio.run(check(client_of(gone)))
    assert "me:***@127.0.0.1" in str(caught.value) and "secret" not in str(caught.value)
    note = asyncio.run(client_of(server, gone).check())
    assert "me:***@127.0.0.1" in note and "does not answer" in note, (
        "one is enough, and the other is named"
    )


def test_client_works_in_consecutive_event_loops(server):
    client = client_of(server)
    for _ in range(3):
        found, _ = ask(client, "Everest", f"Paris {time.monotonic()}")
        assert found[0].passages and found[1].passages


def test_cancelled_sample_does_not_cancel_a_shared_search(server):
    server.delay = 0.2
    client = client_of(server)

    async def run():
        async with client:
            first, second = (asyncio.create_task(client.search("Everest")) for _ in range(2))
            await asyncio.sleep(0.05)
            first.cancel()
            return await second

    assert asyncio.run(run()).passages


def test_single_query_server_respects_deadline_and_max_in_flight(server):
    """40 queries of 0.1 s, four at a time. Sequentially they would take 4 s, over the limit."""
    server.answer = lambda body: (
        server.usual({**body, "queries": [body["query"]]}) if "query" in body else (422, {})
    )
    client = client_of(server, topk=1, deadline_s=3.9)

    async def run():
        async with client:
            await client.check()
            server.delay = 0.1
            began = time.monotonic()
            found = await asyncio.gather(
                *(client.search(f"capital of France {i}") for i in range(40))
            )
            return found, time.monotonic() - began

    found, seconds = asyncio.run(run())
    assert all(answer.passages == [FRANCE] for answer in found) and seconds < 3.9
