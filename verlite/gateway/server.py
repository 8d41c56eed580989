"""An HTTP server on loopback in front of a generation engine: a session per sample, each with a
`base_url` and a token of its own, which any client of OpenAI's protocol can use.

    async with Gateway(engine, longest=4096) as gateway:
        session = gateway.open(Sampling(max_tokens=512))
        ...  # a program talks to session.base_url with session.token
        gateway.close(session)
        session.record  # what it asked, and what the model answered, token for token

An answer is sampled as a whole, also for a stream, which begins when it is complete. A client that
disconnects before aborts its request. Requests of one session may run in parallel.
"""

import asyncio
import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Self

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from verlite.envs.chat import Chat, TemplateError
from verlite.gateway.conversation import Match, Node, Session
from verlite.gateway.openai import (
    Asked,
    Choice,
    Refused,
    choice,
    events,
    read_chat,
    read_completion,
    write,
    write_error,
    write_models,
)
from verlite.http.server import GONE, application, bind, parse_object, read_body, serving, url
from verlite.rollout.types import Completion, Engine, Sampling, with_seed

MAX_BODY = 16 << 20
"""Bytes of a request."""
MAX_REQUESTS = 1000
"""Requests of one session."""
LENGTH = "context_length_exceeded"
"""OpenAI's code of a request that leaves no room for an answer."""
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
    failed: "asyncio.Future[None]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    refused: int = 0
    engine_seconds: float = 0.0
    running: "set[asyncio.Future[Any]]" = field(default_factory=set)

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
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        bound = bind("127.0.0.1", 0)
        self._address = url(bound)
        await self._stack.enter_async_context(serving(self._application(), bound))
        return self

    async def __aexit__(self, *error: object) -> None:
        for session in list(self._sessions.values()):
            self.close(session)
        await self._stack.aclose()

    def open(
        self, sampling: Sampling, waits_for: Callable[[str], None] = lambda what: None
    ) -> OpenSession:
        """Begin a session."""
        name = secrets.token_hex(8)
        base_url = f"{self._address}/sessions/{name}/v1"
        session = OpenSession(name, secrets.token_urlsafe(24), base_url, sampling, waits_for)
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
        app = application("gateway")

        @app.exception_handler(HTTPException)
        async def explain(request: Request, error: HTTPException) -> Response:
            body = write_error(str(error.detail), error.status_code)
            return JSONResponse(body, error.status_code, error.headers)

        @app.exception_handler(Refused)
        async def refuse(request: Request, error: Refused) -> Response:
            return JSONResponse(write_error(str(error), 400, error.code), 400)

        @app.get("/sessions/{name}/v1/models")
        async def models(name: str, request: Request) -> Any:
            self._find(name, request)
            return write_models(self._longest)

        @app.post("/sessions/{name}/v1/chat/completions")
        async def chat(name: str, request: Request) -> Response:
            return await self._respond(name, request, read_chat)

        @app.post("/sessions/{name}/v1/completions")
        async def completions(name: str, request: Request) -> Response:
            return await self._respond(name, request, read_completion)

        return app

    def _find(self, name: str, request: Request) -> OpenSession:
        """Return the session. Raises HTTPException: it does not exist, or the token is wrong."""
        session = self._sessions.get(name)
        given = request.headers.get("authorization", "")
        wanted = f"Bearer {session.token}" if session else ""
        if session is None or not secrets.compare_digest(given.encode(), wanted.encode()):
            raise HTTPException(
                401, "no open session has this address and API key", {"WWW-Authenticate": "Bearer"}
            )
        return session

    async def _respond(
        self, name: str, request: Request, read: Callable[[dict[str, Any]], Asked]
    ) -> Response:
        self._find(name, request)
        asked = read(parse_object(await read_body(request, MAX_BODY), _EXAMPLE))
        session = self._find(name, request)  # it may have been closed meanwhile
        nodes, sampling = self._begin(session, asked)
        completions = await self._sample(session, nodes, sampling, request)
        choices = [
            self._answer(session, asked, sampling.stop, node, completion)
            for node, completion in zip(nodes, completions, strict=True)
        ]
        created = int(time.time())
        if asked.stream:
            return StreamingResponse(
                events(asked, choices, created), media_type="text/event-stream"
            )
        # Escaped as in a stream: tool calls may have lone surrogates.
        return Response(json.dumps(write(asked, choices, created)), media_type="application/json")

    def _begin(self, session: OpenSession, asked: Asked) -> tuple[list[Node], Sampling]:
        """Add a request to the record, once per answer. Raises Refused.

        It never waits, so requests that run in parallel are recorded one after the other.
        """
        record = session.record
        if len(record.nodes) + asked.n > MAX_REQUESTS:
            raise Refused(f"a session has at most {MAX_REQUESTS} requests")
        said = [message["content"] for message in asked.messages if message["role"] != "assistant"]
        characters = sum(map(len, [*said, asked.prompt if isinstance(asked.prompt, str) else ""]))
        if characters > self._characters:  # encoding them would hold up all sessions
            session.refused += 1
            raise Refused(
                f"the context has {characters} characters, more than {self._longest} tokens can "
                "have (data.max_prompt_length + data.max_response_length)",
                LENGTH,
            )
        match, given, rewritten = self._encode(record, asked)
        parent = [] if match.parent is None or rewritten else match.parent.context
        room = self._longest - len(parent) - len(given)
        if room < 1:
            session.refused += 1
            raise Refused(
                f"the context has {len(parent) + len(given)} tokens, of {self._longest} with the "
                "answer (data.max_prompt_length + data.max_response_length)",
                LENGTH,
            )
        limits = (session.sampling.max_tokens, asked.max_tokens or room, room)
        sampling = replace(
            session.sampling,
            max_tokens=min(limits),
            stop=tuple(dict.fromkeys((*session.sampling.stop, *asked.stop))),
        )
        return [record.begin(match, given, rewritten) for _ in range(asked.n)], sampling

    def _encode(self, record: Session, asked: Asked) -> tuple[Match, list[int], bool]:
        """Return what a request continues, its new tokens, and whether the chat template would
        write earlier messages in another way. Raises Refused."""
        if not asked.messages:
            ids = asked.prompt
            if isinstance(ids, str):
                ids = self._engine.tokenizer.encode(ids)
            match = record.match_tokens(ids)
            return match, ids[match.known :] if match.parent else ids, False
        try:
            options = self._template_kwargs | asked.template_kwargs
            chat = Chat(self._engine.tokenizer, asked.tools, options)
            match = record.match(asked.keys)
            rewritten = False
            if match.parent is not None:
                try:
                    return match, self._continue(chat, asked, match, match.parent), False
                except TemplateError:
                    rewritten = True
            return match, chat.encode_messages(chat.render, asked.messages), rewritten
        except TemplateError as error:
            raise Refused(str(error)) from error

    def _continue(self, chat: Chat, asked: Asked, match: Match, parent: Node) -> list[int]:
        """Return the tokens after the parent's. Raises TemplateError."""
        known = match.known - 1  # the first key is not a message
        before, after = asked.messages[: known - 1], asked.messages[known:]
        has_thoughts = "</think>" in self._text(parent.sampled)
        return chat.continuation(parent.context, before, after, has_thoughts)

    async def _sample(
        self, session: OpenSession, nodes: Sequence[Node], sampling: Sampling, request: Request
    ) -> list[Completion]:
        """Ask the engine. If anything prevents an answer, the nodes are aborted.

        Raises HTTPException: the client is gone, the engine failed or rejects the request.
        """
        began = time.monotonic()
        session.waits_for("the engine")
        asked = [
            asyncio.ensure_future(
                self._engine.generate(node.prompt, with_seed(sampling, node.number))
            )
            for node in nodes
        ]
        answers = asyncio.gather(*asked)
        gone = asyncio.ensure_future(_disconnected(request))
        session.running.add(answers)
        try:
            await asyncio.wait((answers, gone), return_when=asyncio.FIRST_COMPLETED)
            if not answers.done():
                raise GONE
            completions: list[Completion] = answers.result()
            if any(completion.finish_reason == "abort" for completion in completions):
                raise RuntimeError("the engine aborted the request")
            return completions
        except BaseException as error:
            for answer, node in zip(asked, nodes, strict=True):
                answer.cancel()
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
            gone.cancel()
            session.running.discard(answers)
            session.engine_seconds += time.monotonic() - began
            if session.id in self._sessions:  # otherwise nothing waits any more
                session.waits_for("the program")

    def _answer(
        self,
        session: OpenSession,
        asked: Asked,
        stop: Sequence[str],
        node: Node,
        completion: Completion,
    ) -> Choice:
        """Record an answer, and return it as the program sees it."""
        text = self._text(completion.ids)
        text = text[: min((text.index(string) for string in stop if string in text), default=None)]
        shown = completion.ids if asked.logprobs else []
        tokens = [str(self._engine.tokenizer.decode([token])) for token in shown]
        found = choice(node, text, tokens, completion.finish_reason, bool(asked.tools))
        session.record.answer(
            node,
            completion.ids,
            completion.log_probs,
            completion.weight_versions,
            completion.finish_reason,
            [*asked.keys, found.key] if asked.messages else (),
        )
        return found

    def _text(self, ids: Sequence[int]) -> str:
        return str(self._engine.tokenizer.decode(list(ids), skip_special_tokens=True))


async def _disconnected(request: Request) -> None:
    """Return once the client has disconnected. Its body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
