"""A stream sends an answer while the engine makes it, and says what the whole answer says."""

import asyncio
import json
import random
import socket
from dataclasses import replace

import httpx
import pytest

from tests.gateway.speaker import Speaker, session_of, user
from tests.gateway.test_gateway import CALL, TOOLS, tokenizer
from tests.later import Later
from verlite.gateway import dialect, server
from verlite.gateway.conversation import Node, State
from verlite.gateway.dialect import Asked
from verlite.rollout.types import Completion, EngineDied

openai = Later("openai")
DIALECTS = {
    "chat/completions": {"messages": [user("u")]},
    "completions": {"prompt": "u", "max_tokens": 100},
    "messages": {"messages": [user("u")]},
    "responses": {"input": "u"},
}


@pytest.fixture(autouse=True)
def often(monkeypatch):
    monkeypatch.setattr(server, "STREAM_S", 0.001)


def text_of(event):
    """Return the new text of an event, in any dialect."""
    if "choices" in event:
        (choice,) = event["choices"]
        return choice.get("text", choice.get("delta", {}).get("content")) or ""
    delta = event.get("delta") or ""
    return delta if isinstance(delta, str) else delta.get("text", "")


async def events_of(response):
    async for line in response.aiter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def stream(client, path, **body):
    url = f"{client.session.base_url}/{path}"
    body = DIALECTS[path] | {"stream": True} | body
    return client.http.stream("POST", url, json=body, headers=client.headers)


@pytest.mark.parametrize("path", DIALECTS)
def test_text_is_sent_while_the_answer_is_made(path):
    """A character of four bytes, each a token, is held back until it is whole."""
    tokens = tokenizer()
    said = "Well, é🦩 and more"
    counts = [tokens.decode(tokens.encode(said)[:n]) for n in range(40)]
    cut = next(n for n, text in enumerate(counts) if text.endswith("é\ufffd"))

    async def talk():
        engine = Speaker(tokens, said)
        async with session_of(engine) as client:
            engine.may_answer.clear()
            engine.so_far = 3
            async with stream(client, path) as response:
                found, parts = "", []
                async for event in events_of(response):
                    new = text_of(event)
                    found += new
                    if new:
                        parts.append(found)
                    if found == counts[3]:
                        engine.so_far = cut
                    if found == "Well, é":
                        engine.so_far = cut + 4
                    if found.startswith("Well, é🦩"):
                        engine.may_answer.set()
            return parts, client.session.record.nodes[0]

    parts, node = asyncio.run(asyncio.wait_for(talk(), 60))
    assert parts[0] == counts[3] and "Well, é" in parts and parts[-1] == said
    assert node.state is State.ANSWERED and tokens.decode(node.sampled[:-1]) == said


@pytest.mark.parametrize("path", DIALECTS)
def test_a_client_that_breaks_its_stream_ends_the_generation(path):
    async def talk():
        engine = Speaker(tokenizer(), "lost", "kept")
        async with session_of(engine) as client:
            engine.may_answer.clear()
            engine.so_far = 2
            async with stream(client, path) as response:
                async for event in events_of(response):
                    if text_of(event):
                        break
            while not engine.cancelled:
                await asyncio.sleep(0.01)
            engine.may_answer.set()
            again = await client.post(path, **DIALECTS[path])
            return again, client.session.record

    again, record = asyncio.run(asyncio.wait_for(talk(), 60))
    assert again.status_code == 200
    assert [node.state for node in record.nodes] == [State.ABORTED, State.ANSWERED]
    assert not record.nodes[0].sampled


def test_log_probs_ids_and_choices_of_a_stream_are_the_recorded_ones():
    tokens = tokenizer()
    wanted = {"logprobs": True, "top_logprobs": 0, "return_token_ids": True, "n": 2}

    async def talk():
        engine = Speaker(tokens, "one and more", "two and less")
        async with session_of(engine) as client:
            engine.may_answer.clear()
            engine.so_far = 2
            async with stream(client, "chat/completions", **wanted) as response:
                found = []
                async for event in events_of(response):
                    found.append(event)
                    if len(found) == 2:
                        engine.may_answer.set()
            return found, client.session.record.nodes

    events, nodes = asyncio.run(asyncio.wait_for(talk(), 60))
    assert events[0]["choices"][0]["finish_reason"] is None
    for index, node in enumerate(nodes):
        choices = [c for e in events for c in e["choices"] if c["index"] == index]
        assert [t for c in choices for t in c.get("token_ids", [])] == node.sampled
        entries = [t for c in choices if c["logprobs"] for t in c["logprobs"]["content"]]
        assert [entry["logprob"] for entry in entries] == node.log_probs
        assert "".join(entry["token"] for entry in entries) == tokens.decode(node.sampled)
        roles = [c["delta"]["role"] for c in choices if "role" in c["delta"]]
        assert roles == ["assistant"] and choices[-1]["finish_reason"] == "stop"
    prompts = [event["prompt_token_ids"] for event in events if "prompt_token_ids" in event]
    assert prompts == [nodes[0].prompt] * 2


PIECES = ["é", "🦩", "<tool", "_call>", CALL, "STOP"[:2], " a", "<", "\ufffd", "</tool_call>", "OP"]


@pytest.mark.parametrize("seed", range(40))
def test_what_was_shown_of_a_beginning_never_changes(seed):
    """Whatever follows: characters, tool calls whole or malformed, stop strings and their parts."""
    rng = random.Random(seed)
    asked = Asked([user("u")], tools=TOOLS * (seed % 2), stop=("STOP", "OP a"))
    said = "".join(rng.choices(PIECES, k=8)).encode()
    places = [said.find(stop.encode()) + len(stop) for stop in asked.stop if stop.encode() in said]
    said = said[: min(places, default=len(said))]  # where the engine ends

    def choice(count, reason):
        ids = list(said[:count])
        completion = Completion(ids, [0.0] * count, reason, [(1, count)])
        text = bytes(ids).decode(errors="replace")
        return dialect.choice(asked, Node(0, None, [1]), completion, text, [], asked.stop)

    whole = choice(len(said), "stop")
    contents = [choice(count, "").content for count in range(len(said))]
    assert all(whole.content.startswith(content) for content in contents)
    lengths = list(map(len, contents))
    assert lengths == sorted(lengths)
    if not places and "<" not in said.decode():  # so only a beginning of a stop string is left
        assert len(whole.content) - lengths[-1] <= 4
    for before in (None, choice(len(said) // 2, "")):
        rest = whole.after(before)
        assert (before.content if before else "") + rest.content == whole.content
        assert (before.ids if before else []) + rest.ids == list(said)


async def cut(path, end):
    """Return the last event of a stream that `end(client, wait)` ends in the middle, the session,
    and how often the engine was cancelled."""
    engine = Speaker(tokenizer(), "never whole")
    async with session_of(engine) as client:
        wait = asyncio.get_running_loop().create_future()
        engine.may_answer.wait = lambda: wait
        engine.so_far = 2
        async with stream(client, path) as response:
            event = None
            async for event in events_of(response):
                if text_of(event):
                    end(client, wait)
        return event, client.session, engine.cancelled


@pytest.mark.parametrize("path", DIALECTS)
def test_a_stream_whose_session_ends_says_so(path, caplog):
    """In one event, and without a traceback in the log."""

    def closing(client, _):
        client.gateway.close(client.session)

    event, session, cancelled = asyncio.run(asyncio.wait_for(cut(path, closing), 60))
    assert event["error"]["message"] == "the session is closed" and cancelled == 1
    assert session.record.nodes[0].state is State.ABORTED
    assert not [record for record in caplog.records if record.exc_info]


def test_a_stream_whose_engine_fails_says_so():
    died = EngineDied("it died")

    def failing(_, wait):
        if not wait.done():
            wait.set_exception(died)

    event, session, _ = asyncio.run(asyncio.wait_for(cut("messages", failing), 60))
    assert event == {"type": "error", "error": {"type": "api_error", "message": "it died"}}
    assert session.failed.exception() is died
    assert session.record.nodes[0].state is State.ABORTED


@pytest.mark.parametrize("package", ["openai", "anthropic"])
def test_clients_raise_what_such_a_stream_says(package):
    async def talk():
        engine = Speaker(tokenizer(), "never whole")
        async with session_of(engine) as client:
            engine.may_answer.clear()
            engine.so_far = 2
            url, key = client.session.base_url, client.session.token
            asked = {"model": "m", "messages": [user("u")], "stream": True}
            if package == "openai":
                api = openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0)
                answer = await api.chat.completions.create(**asked)
            else:
                anthropic = pytest.importorskip("anthropic")
                url = url.removesuffix("/v1")
                api = anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0)
                answer = await api.messages.create(**asked, max_tokens=50)
            async for _ in answer:
                client.gateway.close(client.session)

    with pytest.raises(Exception, match="the session is closed") as raised:
        asyncio.run(asyncio.wait_for(talk(), 60))
    assert type(raised.value).__module__.startswith(package)


def test_the_text_of_growing_tokens_is_that_of_all_of_them():
    """Characters that are split over tokens, bytes that are none, special tokens."""
    rng = random.Random(0)
    tokens = tokenizer()
    words = ["é", "🦩", " a", "<|im_end|>", "\n", "b", "  "]
    for _ in range(200):
        ids = tokens.encode("".join(rng.choices(words, k=12)))
        ids += rng.choices(range(len(tokens)), k=rng.randrange(6))  # mostly no characters
        ids += tokens.encode("".join(rng.choices(words, k=4)))
        growing = dialect.GrowingText(lambda part: tokens.decode(part, skip_special_tokens=True))
        end = 0
        while end < len(ids):
            end = min(len(ids), end + rng.randrange(1, 6))
            whole = tokens.decode(ids[:end], skip_special_tokens=True)
            assert growing.of(ids[:end]) == whole


def test_growing_text_of_a_tokenizer_that_leaves_out_the_first_space():
    said = ["▁a", "b", "▁c", "▁", "▁d", ".", "▁e"]

    def decode(part):
        return "".join(part).replace("▁", " ").removeprefix(" ")

    growing = dialect.GrowingText(decode)
    assert [growing.of(said[:n]) for n in range(8)] == [decode(said[:n]) for n in range(8)]


def test_a_stream_decodes_each_token_a_few_times():
    tokens = tokenizer()
    said = "a few words " * 30
    count = len(tokens.encode(said))
    decoded = 0
    decode = tokens.decode

    def counting(ids, **options):
        nonlocal decoded
        decoded += len(ids)
        return decode(ids, **options)

    async def talk():
        engine = Speaker(tokens, said)
        async with session_of(engine) as client:
            client.session.sampling = replace(client.session.sampling, max_tokens=count + 1)
            engine.may_answer.clear()
            engine.so_far = 1
            tokens.decode = counting
            async with stream(client, "chat/completions", logprobs=True) as response:
                async for event in events_of(response):
                    if text_of(event):
                        engine.so_far += 1
                    if engine.so_far == count:
                        engine.may_answer.set()

    asyncio.run(asyncio.wait_for(talk(), 60))
    assert count > 250 and decoded < 8 * count


def test_an_answer_is_recorded_although_its_client_never_reads():
    """What its stream sends before has more bytes than the buffers of a connection take."""
    tokens = tokenizer()
    text = "abc " * 15_000

    async def talk():
        engine = Speaker(tokens, text, "next")
        async with session_of(engine, 100_000) as client:
            client.session.sampling = replace(client.session.sampling, max_tokens=99_999)
            engine.may_answer.clear()
            engine.so_far = 50_000
            body = json.dumps(DIALECTS["chat/completions"] | {"stream": True, "logprobs": True})
            url = httpx.URL(f"{client.session.base_url}/chat/completions")
            head = f"POST {url.path} HTTP/1.1\r\nHost: {url.host}\r\n"
            head += f"Authorization: Bearer {client.session.token}\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            loop = asyncio.get_running_loop()
            with socket.create_connection((url.host, url.port)) as connection:
                connection.setblocking(False)
                await loop.sock_sendall(connection, f"{head}{body}".encode())
                await loop.sock_recv(connection, 1)  # the stream has begun
                engine.may_answer.set()
                (node,) = client.session.record.nodes
                while node.state is State.RUNNING:
                    await asyncio.sleep(0.01)
                await client.say([user("v")])  # others are answered meanwhile
            return client.session.record

    record = asyncio.run(asyncio.wait_for(talk(), 60))
    assert [node.state for node in record.nodes] == [State.ANSWERED] * 2
    assert tokens.decode(record.nodes[0].sampled[:-1]) == text


@pytest.mark.parametrize(
    ("path", "kind"),
    [("chat/completions", "error"), ("responses", "error"), ("messages", "type")],
)
def test_refusals_before_a_request_is_read_have_the_form_of_its_dialect(path, kind):
    async def talk():
        async with session_of(Speaker(tokenizer())) as client:
            url = f"{client.session.base_url}/{path}"
            headers = client.headers | {"Content-Type": "text/plain"}
            typed = await client.http.post(url, content="{}", headers=headers)
            headers = client.headers | {"Host": "evil.example"}
            return typed, await client.http.post(url, json={}, headers=headers)

    typed, hosted = asyncio.run(talk())
    assert (typed.status_code, hosted.status_code) == (415, 403)
    assert "Content-Type: application/json" in typed.json()["error"]["message"]
    assert "evil.example" in hosted.json()["error"]["message"] and kind in hosted.json()
