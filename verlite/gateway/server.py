"""An HTTP server on loopback in front of a generation engine: a session per sample, each with a
`base_url` and a token of its own, which clients of OpenAI, Anthropic and vLLM can use (`DIALECTS`).

    async with Gateway(engine, longest=4096) as gateway:
        session = gateway.open(Sampling(max_tokens=512))
        ...  # a program talks to session.base_url with session.token
        gateway.close(session)
        session.record  # what it asked, and what the model answered, token for token

A stream sends what the engine has sampled every STREAM_S. An answer is recorded when it is
complete, whether or not its client reads it; a client that disconnects before aborts its request.
Requests of one session may run in parallel.

Texts are encoded in a thread, one at a time and in the order of arrival: a long one takes seconds,
in which requests that have been encoded are answered. What a request continues is decided when it
arrives, before it waits for its turn: it cannot continue an answer that was not there yet.
"""

import asyncio
import functools
import json
import logging
import resource
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from verlite.envs.chat import Chat, TemplateError, TextTooLong, encode
from verlite.gateway.anthropic import MESSAGES
from verlite.gateway.conversation import Match, Node, Session
from verlite.gateway.dialect import (
    Asked,
    Choice,
    Dialect,
    GrowingText,
    Json,
    Refused,
    choice,
    event,
)
from verlite.gateway.openai import CHAT, COMPLETIONS, GENERATE, write_models
from verlite.gateway.responses import RESPONSES
from verlite.http.server import GONE, application, bind, parse_object, read_body, serving, url
from verlite.rollout.types import Completion, Engine, Sampling, with_seed

MAX_BODY = 16 << 20
"""Bytes of a request."""
MAX_REQUESTS = 1000
"""Requests of one session."""
MAX_CONNECTIONS = 4096
"""Open connections of all sessions: a thousand programs with a few requests in parallel each."""
STREAM_S = 0.1
"""Between two pieces of a stream."""
KEEP_ALIVE_S = 75
"""Seconds for which an idle connection is kept. Clients keep theirs for less, so none of them sends
a request while the connection is closed. httpx, which OpenAI's and Anthropic's use: 5 s."""
LENGTH = "context_length_exceeded"
"""OpenAI's code of a request that leaves no room for an answer."""
DIALECTS = {
    "v1/chat/completions": CHAT,
    "v1/completions": COMPLETIONS,
    "v1/responses": RESPONSES,
    "v1/messages": MESSAGES,
    "v1/messages/count_tokens": MESSAGES,
    "inference/v1/generate": GENERATE,
}
"""By path of a session. Anthropic's clients get the session's address without /v1."""
LOG = logging.getLogger(__name__)
_EXAMPLE = '{"messages": [{"role": "user", "content": "Hello"}]}'


@dataclass
class OpenSession:
    """A session that a program can talk to.

    Attributes:
        id: part of its address.
        token: the program's API key.
        base_url: address for the client, up to /v1.
        sampling: of each answer; `max_tokens` limits each.
        waits_for: called with "the engine" before a wait for it, and with "the program" after.
        record: all requests.
        said: messages up to each answer that later requests can name, and its own, by its
            node's number.
        ignored: how many requests had a field that has no effect, by the field's name.
        failed: gets the exception after which the sample cannot go on: of the engine.
        refused: requests that left no room for an answer.
        engine_seconds: time that requests waited for the engine.
    """

    id: str
    token: str
    base_url: str
    sampling: Sampling
    waits_for: Callable[[str], None]
    record: Session = field(default_factory=Session)
    said: dict[int, list[Json]] = field(default_factory=dict)
    ignored: Counter[str] = field(default_factory=Counter)
    failed: "asyncio.Future[None]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    refused: int = 0
    engine_seconds: float = 0.0
    running: "set[asyncio.Future[Any]]" = field(default_factory=set)

    def ledger(self) -> dict[str, int]:
        """Return what became of the requests."""
        ignored = self.ignored.total()
        return self.record.ledger() | {"refused": self.refused, "ignored_fields": ignored}

    def ended(self, answer: "asyncio.Future[Any]") -> None:
        self.running.discard(answer)
        if not answer.cancelled():
            answer.exception()  # whoever waits for it gets it, if the client is still there

    def fail(self, error: Exception) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)


class Gateway:
    """The server, between `async with` and its end, for the sessions of one engine."""

    def __init__(
        self, engine: Engine, longest: int, template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Prepare; nothing listens yet.

        Args:
            engine: answers the requests.
            longest: tokens of a context with its answer, at most.
            template_kwargs: data.apply_chat_template_kwargs.
        """
        self._engine = engine
        self._longest = longest
        self._characters = longest * max(map(len, engine.tokenizer.get_vocab()))
        self._template_kwargs = dict(template_kwargs or {})
        self._sessions: dict[str, OpenSession] = {}
        self._address = ""
        self._encoder = ThreadPoolExecutor(1, "encoder")
        self._text_of_token = functools.cache(lambda token: str(engine.tokenizer.decode([token])))
        self._warned: set[str] = set()
        self._looking: asyncio.Task[dict[Any, Completion]] | None = None
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        bound = bind("127.0.0.1", 0)
        self._address = url(bound)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < 2 * MAX_CONNECTIONS:  # mostly 1024
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 2 * MAX_CONNECTIONS), hard))
        app = self._application()
        limits = {"limit_concurrency": MAX_CONNECTIONS, "timeout_keep_alive": KEEP_ALIVE_S}
        await self._stack.enter_async_context(serving(app, bound, **limits))
        return self

    async def __aexit__(self, *error: object) -> None:
        for session in list(self._sessions.values()):
            self.close(session)
        await self._stack.aclose()
        self._encoder.shutdown(wait=False, cancel_futures=True)

    def open(
        self,
        sampling: Sampling,
        waits_for: Callable[[str], None] = lambda what: None,
        place: tuple[str, str] | None = None,
    ) -> OpenSession:
        """Begin a session. place: id and token of a closed one, whose address it gets."""
        name, token = place or (secrets.token_hex(8), secrets.token_urlsafe(24))
        base_url = f"{self._address}/sessions/{name}/v1"
        session = OpenSession(name, token, base_url, sampling, waits_for)
        self._sessions[name] = session
        return session

    def close(self, session: OpenSession) -> None:
        """End a session: what still runs is aborted, and no request is answered any more."""
        self._sessions.pop(session.id, None)
        for running in session.running:
            running.cancel()
        if session.failed.done() and not session.failed.cancelled():
            session.failed.exception()  # whoever closes it has seen it, or need not
        session.failed.cancel()

    # Requests

    def _application(self) -> FastAPI:
        app = application(
            "gateway", explain=lambda path, text, status: _dialect(path).error(text, status, None)
        )

        @app.exception_handler(HTTPException)
        async def explain(request: Request, error: HTTPException) -> Response:
            body = _error(_dialect(request.url.path), error)
            return JSONResponse(body, error.status_code, error.headers)

        @app.get("/sessions/{name}/v1/models")
        async def models(name: str, request: Request) -> Any:
            self._find(name, request)
            return write_models(self._longest)

        async def respond(name: str, request: Request) -> Response:
            return await self._respond(name, request, _dialect(request.url.path))

        for path in DIALECTS:
            app.post(f"/sessions/{{name}}/{path}")(respond)
        return app

    def _find(self, name: str, request: Request) -> OpenSession:
        """Return the session. Raises HTTPException: it does not exist, or the token is wrong."""
        session = self._sessions.get(name)
        given = request.headers.get("authorization", "")
        if "x-api-key" in request.headers:  # as most clients of Anthropic's messages send it
            given = f"Bearer {request.headers['x-api-key']}"
        wanted = f"Bearer {session.token}" if session else ""
        if session is None or not secrets.compare_digest(given.encode(), wanted.encode()):
            raise HTTPException(
                401, "no open session has this address and API key", {"WWW-Authenticate": "Bearer"}
            )
        return session

    async def _respond(self, name: str, request: Request, dialect: Dialect) -> Response:
        session = self._find(name, request)
        body = parse_object(await read_body(request, MAX_BODY), _EXAMPLE)
        asked = dialect.read(body, session.said)
        for field_name in asked.ignored:
            session.ignored[field_name] += 1
            if field_name not in self._warned:
                self._warned.add(field_name)
                LOG.warning("requests have the field %.80r, which has no effect", field_name)
        match, given, rewritten = await self._encode(session, asked)
        session = self._find(name, request)  # it may have been closed meanwhile
        parent = [] if match.parent is None or rewritten else match.parent.context
        if request.url.path.endswith("/count_tokens"):
            return JSONResponse({"input_tokens": len(parent) + len(given)})
        sampling = self._sampling(session, asked, len(parent) + len(given))
        nodes = [session.record.begin(match, given, rewritten) for _ in range(asked.n)]
        answer = asyncio.ensure_future(self._answer(session, asked, nodes, sampling))
        session.running.add(answer)
        answer.add_done_callback(session.ended)
        created = int(time.time())
        if not asked.stream:
            choices = await _unless_gone(request, answer)
            # Escaped as in a stream: tool calls may have lone surrogates.
            content = json.dumps(dialect.write(asked, choices, created))
            return Response(content, media_type="application/json")
        growing = self._growing(session, asked, nodes, sampling.stop, answer)
        events = dialect.events(asked, growing, created)
        first = await _unless_gone(request, asyncio.ensure_future(anext(events)))
        stream = _after(first, events, dialect)
        return StreamingResponse(stream, media_type="text/event-stream")

    def _sampling(self, session: OpenSession, asked: Asked, prompt: int) -> Sampling:
        """Return how a request with so many tokens is answered. Raises Refused."""
        if len(session.record.nodes) + asked.n > MAX_REQUESTS:
            raise Refused(f"a session has at most {MAX_REQUESTS} requests")
        room = self._longest - prompt
        if room < 1:
            session.refused += 1
            raise Refused(
                f"the context has {prompt} tokens, of {self._longest} with the answer "
                "(data.max_prompt_length + data.max_response_length)",
                LENGTH,
            )
        return replace(
            session.sampling,
            max_tokens=min(session.sampling.max_tokens, asked.max_tokens or room, room),
            stop=tuple(dict.fromkeys((*session.sampling.stop, *asked.stop))),
        )

    async def _encode(self, session: OpenSession, asked: Asked) -> tuple[Match, list[int], bool]:
        """Return what a request continues, its new tokens, and whether the chat template would
        write earlier messages in another way. Raises Refused."""
        record = session.record
        try:
            if asked.messages:
                match = record.match(asked.keys, asked.continues)
                return match, *await self._in_thread(self._encode_chat, asked, match)
            ids = asked.prompt
            if isinstance(ids, str):
                if len(ids) > self._characters:
                    raise TextTooLong(len(ids))
                ids = await self._in_thread(encode, self._engine.tokenizer, ids)
        except TextTooLong as error:  # encoding it would hold up all sessions
            session.refused += 1
            raise Refused(
                f"the text to encode has {error} characters, more than {self._longest} tokens can "
                "have (data.max_prompt_length + data.max_response_length)",
                LENGTH,
            ) from None
        match = record.match_tokens(ids)
        return match, ids[match.known :] if match.parent else ids, False

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._encoder, function, *arguments)

    def _encode_chat(self, asked: Asked, match: Match) -> tuple[list[int], bool]:
        """Return the tokens after the parent's, or all and whether it was rewritten. Raises
        Refused."""
        try:
            options = self._template_kwargs | asked.template_kwargs
            chat = Chat(self._engine.tokenizer, asked.tools, options, self._characters)
            rewritten = False
            if match.parent is not None:
                try:
                    return self._continue(chat, asked, match, match.parent), False
                except TemplateError:
                    rewritten = True
            return chat.encode_messages(chat.render, asked.messages), rewritten
        except TemplateError as error:
            raise Refused(str(error)) from error

    def _continue(self, chat: Chat, asked: Asked, match: Match, parent: Node) -> list[int]:
        """Return the tokens after the parent's. Raises TemplateError."""
        known = match.known - 1  # the first key is not a message
        before, after = asked.messages[: known - 1], asked.messages[known:]
        has_thoughts = "</think>" in self._text(parent.sampled)
        return chat.continuation(parent.context, before, after, has_thoughts)

    async def _answer(
        self, session: OpenSession, asked: Asked, nodes: Sequence[Node], sampling: Sampling
    ) -> list[Choice]:
        """Ask the engine, and record its answers. If anything prevents one, all are aborted.

        Raises HTTPException: the engine failed or rejects the request, or the session was closed.
        """
        began = time.monotonic()
        session.waits_for("the engine")
        waiting = [
            asyncio.ensure_future(
                self._engine.generate(
                    node.prompt,
                    with_seed(sampling, node.number),
                    name=(session.id, node.number) if asked.stream else None,
                )
            )
            for node in nodes
        ]
        try:
            completions = await asyncio.gather(*waiting)
            if any(completion.finish_reason == "abort" for completion in completions):
                raise RuntimeError("the engine aborted the request")
        except BaseException as error:
            for one, node in zip(waiting, nodes, strict=True):
                one.cancel()
                session.record.abort(node)
            if isinstance(error, ValueError):
                raise Refused(str(error)) from error
            if isinstance(error, RuntimeError):  # EngineError is one
                session.fail(error)
                raise HTTPException(503, str(error)) from error
            if isinstance(error, asyncio.CancelledError) and session.id not in self._sessions:
                raise HTTPException(503, "the session is closed") from None
            raise
        finally:
            session.engine_seconds += time.monotonic() - began
            if session.id in self._sessions:  # otherwise nothing waits any more
                session.waits_for("the program")
        choices = []
        for node, completion in zip(nodes, completions, strict=True):
            text = self._text(completion.ids)
            found = self._choice(asked, sampling.stop, node, completion, text)
            choices.append(found)
            session.record.answer(
                node,
                completion.ids,
                completion.log_probs,
                completion.weight_versions,
                completion.finish_reason,
                [*asked.keys, found.key] if asked.messages else (),
            )
            if asked.store:
                told = asked.messages[asked.instructions :]
                session.said[node.number] = [*told, found.as_read]
        return choices

    async def _growing(
        self,
        session: OpenSession,
        asked: Asked,
        nodes: Sequence[Node],
        stop: Sequence[str],
        answer: "asyncio.Future[list[Choice]]",
    ) -> AsyncIterator[tuple[int, Choice]]:
        """Yield each choice with its number, whenever its text has grown, and at last whole. Raises
        what `_answer` does."""
        shown = [""] * len(nodes)
        texts = [GrowingText(self._text) for _ in nodes]
        try:
            while not answer.done():
                look = self._look()
                await asyncio.wait((answer, look), return_when=asyncio.FIRST_COMPLETED)
                for index, node in enumerate(nodes if look.done() else ()):
                    completion = look.result().get((session.id, node.number))
                    if completion is not None and not answer.done():
                        text = texts[index].of(completion.ids)
                        found = self._choice(asked, stop, node, completion, text)
                        if found.content != shown[index]:
                            shown[index] = found.content
                            yield index, found
        finally:
            answer.cancel()
        for index, found in enumerate(answer.result()):
            yield index, found

    def _look(self) -> "asyncio.Task[dict[Any, Completion]]":
        """Return the next look at what streams have so far: one for all of them."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._running())
        return self._looking

    async def _running(self) -> dict[Any, Completion]:
        await asyncio.sleep(STREAM_S)
        try:
            return await asyncio.to_thread(self._engine.running)
        except Exception:  # it failed, which the answers say, or cannot tell, as servers
            return {}

    def _choice(
        self, asked: Asked, stop: Sequence[str], node: Node, completion: Completion, text: str
    ) -> Choice:
        shown = completion.ids if asked.logprobs else []
        tokens = list(map(self._text_of_token, shown))
        return choice(asked, node, completion, text, tokens, stop)

    def _text(self, ids: Sequence[int]) -> str:
        return str(self._engine.tokenizer.decode(list(ids), skip_special_tokens=True))


T = TypeVar("T")


async def _unless_gone(request: Request, waited: "asyncio.Future[T]") -> T:
    """Return what is waited for. Cancels it and raises HTTPException if the client disconnects
    before. The body of the request has been read."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    gone = asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait((waited, gone), return_when=asyncio.FIRST_COMPLETED)
        if not waited.done():
            raise GONE
        return waited.result()
    finally:
        waited.cancel()
        gone.cancel()


async def _after(first: str, events: AsyncIterator[str], dialect: Dialect) -> AsyncIterator[str]:
    yield first
    try:
        async for one in events:
            yield one
    except HTTPException as error:  # clients raise an exception when they read it
        yield event(_error(dialect, error), "error")


def _error(dialect: Dialect, error: HTTPException) -> Json:
    return dialect.error(str(error.detail), error.status_code, getattr(error, "code", None))


def _dialect(path: str) -> Dialect:
    """Return that of a request's path; for others, that of most clients."""
    return DIALECTS.get("/".join(path.split("/")[3:]), CHAT)
