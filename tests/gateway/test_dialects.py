"""A conversation has the same tokens in every dialect, with the real clients of each."""

import asyncio
import logging
import resource
import threading

import httpx
import pytest
import uvicorn

from tests.gateway.speaker import Speaker, session_of, tool, user
from tests.gateway.test_gateway import CALL, TOOLS, rendered, tokenizer
from tests.later import Later
from verlite.envs.calculator import Calculator
from verlite.gateway.conversation import Root, State

ANSWERS = ("Well. " + CALL + CALL.replace("6*7", "1"), "It is 42.", "Bye.")
anthropic, openai = Later("anthropic"), Later("openai")
FUNCTION = Calculator.schema["function"]
SYSTEM = "Be short."


async def chat(client, stream):
    session = client.session
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.token) as api:
        history = [{"role": "system", "content": SYSTEM}, user("6*7?")]

        async def ask():
            request = {"model": "m", "messages": history, "tools": TOOLS}
            if not stream:
                return (await api.chat.completions.create(**request)).choices[0].message
            async with api.chat.completions.stream(**request) as events:
                return (await events.get_final_completion()).choices[0].message

        said = await ask()
        history += [said, *(tool(call.model_dump(), call.id) for call in said.tool_calls)]
        history += [await ask(), user("Thanks")]
        return (await ask()).content


async def messages(client, stream):
    url = client.session.base_url.removesuffix("/v1")
    async with anthropic.AsyncAnthropic(base_url=url, api_key=client.session.token) as api:
        history = [user("6*7?")]
        made = {"name": FUNCTION["name"], "description": FUNCTION["description"]}

        async def ask():
            request = {
                "model": "m",
                "max_tokens": 1000,
                "messages": history,
                "system": [{"type": "text", "text": SYSTEM}],
                "tools": [made | {"input_schema": FUNCTION["parameters"]}],
            }
            if not stream:
                return await api.messages.create(**request)
            async with api.messages.stream(**request) as events:
                return await events.get_final_message()

        said = await ask()
        assert said.stop_reason == "tool_use"
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": block.id}
            for block in said.content
            if block.type == "tool_use"
        ]
        history += [{"role": "assistant", "content": said.content}]
        history += [{"role": "user", "content": results}]
        said = await ask()
        assert said.stop_reason == "end_turn"
        history += [{"role": "assistant", "content": said.content}, user("Thanks")]
        return (await ask()).content[0].text


async def responses(client, stream, by_id):
    session = client.session
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.token) as api:
        history = [user("6*7?")]
        last = None

        async def ask(new):
            nonlocal history, last
            history = new if by_id else [*history, *new]
            names = ("name", "description", "parameters")
            request = {
                "model": "m",
                "input": history,
                "instructions": SYSTEM,
                "tools": [{"type": "function"} | {name: FUNCTION[name] for name in names}],
            }
            if by_id and last:
                request["previous_response_id"] = last
            if stream:
                async with api.responses.stream(**request) as events:
                    said = await events.get_final_response()
            else:
                said = await api.responses.create(**request)
            last = said.id
            history = [*history, *said.output]
            return said

        said = await ask([user("6*7?")] if by_id else [])
        results = [
            {"type": "function_call_output", "call_id": item.call_id, "output": item.call_id}
            for item in said.output
            if item.type == "function_call"
        ]
        await ask(results)
        return (await ask([user("Thanks")])).output_text


async def responses_by_id(client, stream):
    return await responses(client, stream, True)


async def responses_in_full(client, stream):
    return await responses(client, stream, False)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("dialect", [chat, messages, responses_in_full, responses_by_id])
def test_a_tool_loop_has_the_same_tokens_in_every_dialect(dialect, stream):
    """Two calls at once, their results, and another turn: against the template, as a whole."""
    tokens = tokenizer()

    async def talk():
        async with session_of(Speaker(tokens, *ANSWERS)) as client:
            return await dialect(client, stream), client.session

    text, session = asyncio.run(talk())
    nodes = session.record.nodes
    assert text == "Bye." and session.record.ledger()["branches"] == 1 and not session.ignored
    history = [{"role": "system", "content": SYSTEM}, user("6*7?")]
    assert nodes[0].given == rendered(tokens, history, tools=TOOLS)
    results = [{"role": "tool", "content": f"call_0_{i}"} for i in range(2)]
    history += [{"role": "assistant", "content": ANSWERS[0]}, *results]
    history += [{"role": "assistant", "content": ANSWERS[1]}, user("Thanks")]
    assert nodes[2].prompt == rendered(tokens, history, tools=TOOLS)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("value", ["NaN", "1e999", '"\\ud800"'])
def test_what_a_client_cannot_send_back_is_no_call(value, stream):
    """Otherwise a mistake of the model would end the program, or be another history."""
    call = f'<tool_call>{{"name": "f", "arguments": {{"x": {value}}}}}</tool_call>'

    async def talk():
        async with session_of(Speaker(tokenizer(), call, "b")) as client:
            url = client.session.base_url.removesuffix("/v1")
            async with anthropic.AsyncAnthropic(base_url=url, api_key=client.session.token) as api:
                request = {"model": "m", "max_tokens": 99, "messages": [user("u")]}
                request["tools"] = [{"name": "f", "input_schema": {"type": "object"}}]

                async def ask():
                    if not stream:
                        return await api.messages.create(**request)
                    async with api.messages.stream(**request) as events:
                        return await events.get_final_message()

                said = await ask()
                request["messages"] += [{"role": "assistant", "content": said.content}, user("v")]
                await ask()
            return said, client.session.record.nodes

    said, nodes = asyncio.run(talk())
    assert said.stop_reason == "end_turn" and [block.text for block in said.content] == [call]
    assert nodes[1].parent is nodes[0]


def test_a_conversation_goes_on_in_another_dialect():
    async def talk():
        async with session_of(Speaker(tokenizer(), "a", "b", "c", "d")) as client:
            history = [*await client.say([user("u")]), user("v")]
            body = {"max_tokens": 9, "messages": history}
            said = (await client.post("messages", **body)).json()["content"][0]["text"]
            history += [{"role": "assistant", "content": said}, user("w")]
            await client.post("responses", input=history)
            context = client.session.record.nodes[2].context
            root = client.session.base_url.removesuffix("v1")
            await client.http.post(
                f"{root}inference/v1/generate",
                json={"token_ids": [*context, 5], "sampling_params": {}},
                headers=client.headers,
            )
            return client.session.record

    record = asyncio.run(talk())
    parents = [node.parent and node.parent.number for node in record.nodes]
    assert parents == [None, 0, 1, 2] and record.nodes[3].given == [5]


def test_tokens_are_counted_and_not_recorded():
    tokens = tokenizer()

    async def talk():
        async with session_of(Speaker(tokens, "a", "b")) as client:
            url = client.session.base_url.removesuffix("/v1")
            async with anthropic.AsyncAnthropic(base_url=url, api_key=client.session.token) as api:
                request = {"model": "m", "messages": [user("u")], "system": SYSTEM}
                counts = [await api.messages.count_tokens(**request)]
                said = await api.messages.create(**request, max_tokens=9)
                request["messages"] += [{"role": "assistant", "content": said.content}, user("v")]
                counts.append(await api.messages.count_tokens(**request))
                said = await api.messages.create(**request, max_tokens=9)
            return [count.input_tokens for count in counts], said, client.session.record

    counts, said, record = asyncio.run(talk())
    assert counts == [len(node.prompt) for node in record.nodes] and len(record.nodes) == 2
    assert said.usage.input_tokens == counts[1]
    assert said.usage.output_tokens == len(record.nodes[1].sampled)


def test_how_an_answer_ended_in_each_dialect():
    async def talk(*turns, **body):
        async with session_of(Speaker(tokenizer(), *turns)) as client:
            message = (await client.post("messages", messages=[user("u")], **body)).json()
            body = {"max_output_tokens": body.get("max_tokens")}
            response = (await client.post("responses", input="u", **body)).json()
            return message, response

    message, _ = asyncio.run(talk("one;two", "b", stop_sequences=["zzz", ";two"], max_tokens=99))
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", ";two")
    assert message["content"] == [{"type": "text", "text": "one"}]
    message, response = asyncio.run(talk("one two three", "four five six", max_tokens=2))
    assert (message["stop_reason"], message["stop_sequence"]) == ("max_tokens", None)
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}


def test_a_response_is_named_where_texts_are_equal_and_only_if_it_is_stored():
    """Instructions are only for one answer, so they are another beginning."""

    async def talk():
        async with session_of(Speaker(tokenizer(), *["same"] * 3, "b", "c")) as client:
            bodies = [{"input": "u"}, {"input": "u"}, {"input": "u", "store": False}]
            ids = [(await client.post("responses", **body)).json()["id"] for body in bodies]
            await client.post("responses", input="v", previous_response_id=ids[1])
            await client.post(
                "responses", input="v", previous_response_id=ids[1], instructions=SYSTEM
            )
            lost = await client.post("responses", input="v", previous_response_id=ids[2])
            return client.session.record, lost

    record, lost = asyncio.run(talk())
    assert record.nodes[3].parent is record.nodes[1]
    assert record.nodes[4].root is Root.NEW
    assert (
        tokenizer()
        .decode(record.nodes[4].given)
        .startswith("<|im_start|>system\nYou are helpful.<|im_end|>\n<|im_start|>system\n" + SYSTEM)
    )
    assert lost.status_code == 400 and "previous_response_id='resp_2'" in lost.text


# As sent by verifiers 0.4.0 with renderers 0.1.12 (`TrainClient`) for "hello".
GENERATE = (
    b'{"model":"policy","token_ids":[77,74,81,81,84],"sampling_params":{"temperature":0.7,'
    b'"max_tokens":16,"stop_token_ids":[1],"logprobs":1,"skip_special_tokens":false}}'
)


def test_generate_as_verifiers_asks_and_reads():
    """The rules by which its client rejects an answer: `renderers/client.py`."""
    tokens = tokenizer()

    async def talk():
        async with session_of(Speaker(tokens, "hi there"), 77) as client:
            root = client.session.base_url.removesuffix("v1")
            headers = client.headers | {"X-Session-ID": "s", "Content-Type": "application/json"}
            answer = await client.http.post(
                f"{root}inference/v1/generate", content=GENERATE, headers=headers
            )
            models = await client.http.get(f"{root}v1/models", headers=headers)
            return answer.json(), models.json(), client.session

    answer, models, session = asyncio.run(talk())
    node = session.record.nodes[0]
    assert answer["prompt_token_ids"] == node.given == [77, 74, 81, 81, 84] and not session.ignored
    (choice,) = answer["choices"]
    assert choice["token_ids"] == node.sampled and choice["finish_reason"] == "stop"
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [f"token_id:{i}" for i in node.sampled]
    assert [entry["token_id"] for entry in content] == node.sampled
    assert [entry["logprob"] for entry in content] == node.log_probs
    (model,) = models["data"]
    assert (model["id"], model["max_model_len"]) == ("policy", 77)


def test_sampling_params_of_generate_cannot_ask_for_a_stream():
    """vLLM ignores unknown ones. Its `stream` is a field of the request, which is refused."""

    async def talk():
        async with session_of(Speaker(tokenizer(), "hi")) as client:
            sampling = {"stream": True, "stream_options": {"include_usage": True}}
            asked = {"token_ids": [5], "sampling_params": sampling}
            answer = await client.post("../inference/v1/generate", **asked)
            return answer.json(), client.session

    answer, session = asyncio.run(talk())
    assert answer["choices"][0]["token_ids"] == session.record.nodes[0].sampled
    assert dict(session.ignored) == {
        "sampling_params.stream": 1, "sampling_params.stream_options": 1
    }  # fmt: skip


def test_fields_that_have_no_effect_are_counted_and_said_once(caplog):
    message = {"role": "user", "content": "u", "provider_specific_fields": {"a": 1}, "audio": None}

    async def talk():
        async with session_of(Speaker(tokenizer(), *"abcd")) as client:
            for _ in range(2):
                await client.chat([message], temperature=0, reasoning_effort="low", user="me")
            blocks = [{"type": "text", "text": "u", "citations": [1]}]
            said = [{"role": "user", "content": blocks}]
            await client.post("messages", messages=said, max_tokens=9, thinking={"type": "on"})
            item = {"type": "message", "role": "user", "content": "u", "phase": "final"}
            await client.post("responses", input=[item], truncation="auto")
            return client.session.ignored

    with caplog.at_level(logging.WARNING):
        counts = asyncio.run(talk())
    assert counts == {
        "messages[].provider_specific_fields": 2,
        "reasoning_effort": 2,
        "messages[].content[].citations": 1,
        "thinking": 1,
        "input[].phase": 1,
        "truncation": 1,
    }
    said = [record.message for record in caplog.records if "has no effect" in record.message]
    assert len(said) == len(set(said)) == len(counts)


def test_a_request_that_ends_with_the_models_answer_continues_it():
    """Also one of tokens, after an answer that was cut."""
    tokens = tokenizer()

    async def talk():
        async with session_of(Speaker(tokens, "a", "b", "long words", "more")) as client:
            history = await client.say([user("u")])
            await client.say(history)
            await client.post("completions", prompt=[5], max_tokens=2)
            context = client.session.record.nodes[2].context
            await client.post("completions", prompt=context)
            return client.session.record, history

    record, history = asyncio.run(talk())
    assert record.nodes[1].parent is record.nodes[0]
    assert record.nodes[1].prompt == rendered(tokens, history)
    assert record.nodes[2].finish_reason == "length"
    assert (record.nodes[3].parent, record.nodes[3].given) == (record.nodes[2], [])


def test_a_client_of_another_dialect_that_disconnects_aborts_its_request():
    async def talk(path, body):
        engine = Speaker(tokenizer(), "lost", "kept")
        async with session_of(engine) as client:
            engine.may_answer.clear()
            lost = asyncio.create_task(client.post(path, **body))
            await engine.began.wait()
            lost.cancel()
            await asyncio.gather(lost, return_exceptions=True)
            while not engine.cancelled:
                await asyncio.sleep(0.01)
            engine.may_answer.set()
            assert (await client.post(path, **body)).status_code == 200
            return [node.state for node in client.session.record.nodes], client.session.said

    for stream in (False, True):
        for path, body in (("messages", {"messages": [user("u")]}), ("responses", {"input": "u"})):
            states, said = asyncio.run(asyncio.wait_for(talk(path, body | {"stream": stream}), 60))
            assert states == [State.ABORTED, State.ANSWERED]
            assert list(said) == ([1] if path == "responses" else [])


def test_errors_are_those_of_the_dialect():
    async def talk():
        async with session_of(Speaker(tokenizer()), 30) as client:
            url = client.session.base_url.removesuffix("/v1")
            caught = []
            for key, text in ((client.session.token, "x" * 100), ("wrong", "x")):
                async with anthropic.AsyncAnthropic(base_url=url, api_key=key) as api:
                    try:
                        request = {"model": "m", "max_tokens": 9, "messages": [user(text)]}
                        await api.messages.create(**request)
                    except anthropic.APIStatusError as error:
                        caught.append(error)
            models = f"{client.session.base_url}/models"
            keys = (client.session.token, "wrong")  # as other clients send it
            answers = [await client.http.get(models, headers={"x-api-key": key}) for key in keys]
            assert [answer.status_code for answer in answers] == [200, 401]
            return caught, client.session

    (long, wrong), session = asyncio.run(talk())
    assert isinstance(long, anthropic.BadRequestError) and "of 30 with the answer" in long.message
    assert long.body["type"] == "error" and long.body["error"]["type"] == "invalid_request_error"
    assert isinstance(wrong, anthropic.AuthenticationError) and session.refused == 1


BLOCK = {"type": "image", "source": {}}


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("messages", {"messages": []}, "messages=[] must be a list"),
        ("messages", {"messages": [{"role": "tool"}]}, "role is one of system, user, assistant"),
        ("messages", {"messages": [{"role": "user"}]}, "must be a text or a list of blocks"),
        ("messages", {"messages": [{"role": "user", "content": [BLOCK]}]}, "type 'image' of user"),
        (
            "messages",
            {"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]},
            "type 'tool_use' of user",
        ),
        (
            "messages",
            {"messages": [user("u"), {"role": "assistant", "content": "It"}]},
            "cannot be continued",
        ),
        (
            "messages",
            {"messages": [user("u")], "tools": [{"type": "bash_20250124", "name": "bash"}]},
            "type 'bash_20250124'",
        ),
        (
            "messages",
            {"messages": [user("u")], "tool_choice": {"type": "any"}},
            "must be auto or none",
        ),
        (
            "messages",
            {"messages": [user("u")], "output_config": {"format": {"type": "json_schema"}}},
            "format={'type': 'json_schema'} is not supported",
        ),
        (
            "messages",
            {"messages": [{"role": "user", "content": [{"type": []}]}]},
            "a block of type [] of user",
        ),
        ("responses", {}, "input=None must be a list"),
        ("responses", {"input": [{"type": {}}]}, "input[0] must be an object of type"),
        ("responses", {"input": [{"type": "reasoning"}]}, "input[0] must be an object of type"),
        ("responses", {"input": "u", "tools": [{"type": "web_search"}]}, "type 'web_search'"),
        ("responses", {"input": "u", "background": True}, "background=True is not supported"),
        ("responses", {"input": "u", "text": {"format": {"type": "json_object"}}}, "must be text"),
        ("../inference/v1/generate", {"token_ids": "x"}, "token_ids='x' must be a list of token"),
        ("../inference/v1/generate", {"token_ids": [5], "stream": True}, "stream=True is not"),
        ("chat/completions", {"messages": [user("u")], "functions": [{}]}, "functions=[{}] is not"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_every_dialect(path, body, text):
    async def talk():
        async with session_of(Speaker(tokenizer())) as client:
            return await client.post(path, **body), client.session.record

    response, record = asyncio.run(talk())
    assert response.status_code == 400 and text in response.json()["error"]["message"]
    assert not record.nodes


def test_other_sessions_are_answered_while_a_long_text_is_encoded():
    tokens = tokenizer()
    encode, answered = tokens.encode, threading.Event()

    def slow(text, **options):
        if "long" in text:
            assert answered.wait(60)
        return encode(text, **options)

    async def talk():
        tokens.encode = slow
        async with session_of(Speaker(tokens, "a", "b")) as client:
            other = client.gateway.open(client.session.sampling)
            history = await client.say([user("u")])
            long = asyncio.create_task(client.say([*history, user("long")]))
            url = f"{other.base_url}/models"
            headers = {"Authorization": f"Bearer {other.token}"}
            models = await client.http.get(url, headers=headers)
            answered.set()
            await long
            return models.status_code

    assert asyncio.run(asyncio.wait_for(talk(), 60)) == 200


def test_an_answer_that_comes_while_a_request_waits_for_the_encoder_is_not_continued_by_it():
    """It was sent before, so it cannot know the answer. Both are siblings."""
    tokens = tokenizer()
    encode, held, go = tokens.encode, threading.Event(), threading.Event()

    def slow(text, **options):
        if "second" in text:
            held.set()
            assert go.wait(60)
        return encode(text, **options)

    async def talk():
        engine = Speaker(tokens, "same", "same", "x")
        async with session_of(engine) as client:
            history = await client.say([user("u")])
            engine.may_answer.clear()
            twin = asyncio.create_task(client.say([user("u")]))
            while len(engine.calls) < 2:
                await asyncio.sleep(0.01)
            tokens.encode = slow
            second = asyncio.create_task(client.say([*history, user("second")]))
            await asyncio.to_thread(held.wait, 60)
            engine.may_answer.set()
            await twin
            go.set()
            await second
            return client.session.record

    record = asyncio.run(asyncio.wait_for(talk(), 60))
    assert record.nodes[2].parent is record.nodes[0]


def test_more_than_a_thousand_connections_stay_open(monkeypatch):
    """Each of a thousand programs keeps one. uvicorn ends idle ones after 5 s by default, and most
    systems let a process open 1,024 files unless it asks for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    kept = []

    class Config(uvicorn.Config):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            kept.append(self.timeout_keep_alive)

    monkeypatch.setattr(uvicorn, "Config", Config)

    async def talk():
        async with session_of(Speaker(tokenizer(), "a")) as client:
            host, port = (
                httpx.URL(client.session.base_url).host,
                httpx.URL(client.session.base_url).port,
            )
            idle = [await asyncio.open_connection(host, port) for _ in range(1100)]
            await client.say([user("u")])
            for _, writer in idle:
                writer.close()

    try:
        asyncio.run(asyncio.wait_for(talk(), 120))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert kept == [75]


@pytest.mark.parametrize("has_ids", [True, False])
def test_calls_of_two_answers_in_a_row_are_told_apart_in_responses(has_ids):
    """Clients send items, not messages: only the ids say which of them are of one answer."""
    twice = [CALL, "Well. " + CALL + CALL, "42"]

    async def talk():
        async with session_of(Speaker(tokenizer(), *twice)) as client:
            names = ("name", "description", "parameters")
            tools = [{"type": "function"} | {name: FUNCTION[name] for name in names}]
            history = [user("6*7?")]
            for _ in range(2):  # the second answer continues the first
                said = await client.post("responses", input=history, tools=tools)
                history += said.json()["output"]
            for item in history[1:]:
                if item["type"] == "function_call":
                    output = {"call_id": item["call_id"], "output": "42"}
                    history.append({"type": "function_call_output", **output})
            if not has_ids:
                history = [{k: v for k, v in item.items() if k != "id"} for item in history]
            await client.post("responses", input=history, tools=tools)
            return client.session.record

    record = asyncio.run(talk())
    assert [node.parent and node.parent.number for node in record.nodes] == [None, 0, 1]
    assert record.ledger()["branches"] == 1
