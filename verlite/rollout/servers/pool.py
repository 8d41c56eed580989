"""Several generation servers as one: which of them serve, who gets a request, what a failure does.

A server serves while it answers and reports the version of the weights that this pool gave it. That
name is new for each load of each pool, so a server that was restarted, or that another trainer
updates, cannot report it. A server that fails leaves the pool: its requests go to the others, with
their own seeds, so equal samples result. It is asked every BEAT_S seconds, and serves again when it
has the current weights: they are loaded into it first if it has others.
"""

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import InitVar, dataclass, field
from typing import Any

from verlite.http.client import Broken, Down, Refused, Retry, Slow
from verlite.rollout.servers.fit import NoServer
from verlite.rollout.servers.sending import Delivery
from verlite.rollout.servers.vllm_server import Reply, ServerSettings, Unfit, VLLMServer

BEAT_S = 2.0
"""Seconds between two questions whether a server is well."""
MOST_TRIES = 4
"""Attempts of one request on servers that are otherwise well."""
MOST_BROKEN = 40
"""The same for connections that break, as they do when hundreds begin at the same time."""
_AHEAD = 1.25
"""Requests sent to a server, as a share of those that it generates at the same time. The rest wait
here, so that a faster server gets more of them."""
_BURST = 64
"""Requests sent in one turn. Servers drop connections when hundreds begin at the same time."""
_CANCEL_S = 0.2
"""Seconds after which a task that was cancelled is cancelled again."""
_SAY_S = 30.0
"""Seconds between two lines in the log while no server serves."""

log = logging.getLogger(__name__)


@dataclass
class Ask:
    """One request.

    number: of the request.
    prompt_ids: of its prompt.
    params: vLLM's SamplingParams.
    tries: attempts that failed on servers that are well.
    broken: attempts whose connection broke.
    """

    number: int
    prompt_ids: list[int]
    params: dict[str, Any]
    tries: int = 0
    broken: int = 0


@dataclass(eq=False)
class Member:
    """A server and its state.

    problem: why it does not serve; None if it serves.
    verified: the weights whose fingerprint was found in it.
    room: requests that it gets at the same time.
    running: its requests, and the tasks that wait for the answers.
    progress: when it last finished a request, or began with the first.
    """

    server: VLLMServer
    problem: str | None = "it was not asked yet"
    verified: str | None = None
    room: int = 1
    running: dict[int, tuple[Ask, asyncio.Task[None]]] = field(default_factory=dict)
    progress: float = 0.0

    def __str__(self) -> str:
        return str(self.server)


@dataclass(frozen=True)
class ServedWeights:
    """What the members have to have.

    delivery: how they get them.
    name: of the version, as they report it.
    """

    delivery: Delivery
    name: str


@dataclass(eq=False)
class ServerPool:
    """The servers of a run. All methods run in one event loop."""

    servers: InitVar[Iterable[VLLMServer]]
    """At least one."""
    check: Callable[[ServerSettings], None]
    """Raises Unfit if a server with these settings cannot be used."""
    wait_s: float
    """How long the pool waits while no server serves; below 0 without end."""
    request_s: float
    """A server with requests that finishes none for so long has failed."""

    def __post_init__(self, servers: Iterable[VLLMServer]) -> None:
        self.members = [Member(server) for server in servers]
        self.finished: list[tuple[int, Reply]] = []
        self.fatal: Exception | None = None
        self._waiting: deque[Ask] = deque()
        self._watchers: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._weights: ServedWeights | None = None
        self._fingerprint: int | None = None
        self._prefix = f"verlite-{secrets.token_hex(8)}"
        self._loads = 0
        self._serving = time.monotonic()
        self._said = 0.0

    # Starting and weights

    async def connect(self) -> None:
        """Wait until a server answers.

        Raises:
            Unfit: a server answers, but cannot be used for this run.
            NoServer: none answers in time.
        """

        async def ask(member: Member) -> None:
            await member.server.version()
            await self._settle(member)

        await self._until_one("answers", ask)

    async def load(self, delivery: Delivery) -> None:
        """Give the weights to every server that answers.

        Raises:
            NoServer: none could load them in time.
        """
        await self._stop_watching()  # a watcher would load the weights into the same server
        self._loads += 1
        self._weights = ServedWeights(delivery, f"{self._prefix}-{self._loads}")
        self._fingerprint = None
        weights = self._weights

        async def install(member: Member) -> None:
            await member.server.version()  # fails fast
            await self._settle(member)
            await member.server.install(weights.delivery, weights.name)

        for member in self.members:
            self._stop_requests(member)
        await self._until_one("loaded the weights", install)

    async def fingerprint(self) -> int:
        """Return the fingerprint of the weights in the servers.

        Raises:
            NoServer: no server serves.
            RuntimeError: servers have different ones.
        """
        found = await self._of_all(lambda server: server.fingerprint())
        if len(set(found.values())) > 1:
            each = ", ".join(f"{member} has {value:08x}" for member, value in found.items())
            raise RuntimeError(f"the servers have different weights after one sync: {each}")
        assert self._weights is not None
        for member in found:
            member.verified = self._weights.name
        self._fingerprint = next(iter(found.values()))
        return self._fingerprint

    async def log_probs(self, ids: list[int]) -> dict[str, list[float]]:
        """Return the log-probs of each token but the first, of every server that serves."""
        found = await self._of_all(lambda server: server.log_probs(ids))
        return {str(member): values for member, values in found.items()}

    # Requests

    def add(self, ask: Ask) -> None:
        """Queue a request."""
        self._waiting.append(ask)

    def abort(self, number: int) -> None:
        """Drop a request. Unknown numbers are ignored."""
        for ask in [ask for ask in self._waiting if ask.number == number]:
            self._waiting.remove(ask)
        for member in self.members:
            if number in member.running:
                member.running.pop(number)[1].cancel()

    def pending(self) -> int:
        """Return the number of requests whose answer `turn` has not returned."""
        running = sum(len(member.running) for member in self.members)
        return len(self._waiting) + running + len(self.finished)

    async def turn(self, limit_s: float) -> list[tuple[int, Reply]]:
        """Send what can be sent, wait at most `limit_s` for answers, and return those that came.

        Raises:
            NoServer: none serves for longer than the pool waits.
            RuntimeError: a request cannot be answered.
        """
        if not self._watchers:
            self._serving = time.monotonic()
            self._watchers = [asyncio.create_task(self._watch(m)) for m in self.members]
        self._dispatch()
        self._changed.clear()
        if not self.finished:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), limit_s)
        if self.fatal is not None:
            raise self.fatal
        self._check_serving()
        answers, self.finished = self.finished, []
        if not self.pending():
            # The loop stands still until the next request. A question under way would time out.
            await self._stop_watching()
        return answers

    async def close(self) -> None:
        """Give all requests up."""
        for member in self.members:
            self._stop_requests(member)
        self._waiting.clear()
        await self._stop_watching()

    # Inside

    def _dispatch(self) -> None:
        last: tuple[list[int], Member] | None = None
        for _ in range(min(_BURST, len(self._waiting))):
            ask = self._waiting[0]
            free = [m for m in self.members if m.problem is None and len(m.running) < m.room]
            if not free:
                return
            # Samples of one prompt follow each other, and share its prefix in one server's cache.
            if last and last[0] == ask.prompt_ids and last[1] in free:
                member = last[1]
            else:
                member = min(free, key=lambda m: len(m.running) / m.room)
            last = ask.prompt_ids, member
            self._waiting.popleft()
            if not member.running:
                member.progress = time.monotonic()
            task = asyncio.create_task(self._answer(member, ask))
            member.running[ask.number] = ask, task

    async def _answer(self, member: Member, ask: Ask) -> None:
        assert self._weights is not None
        try:
            reply = await member.server.generate(ask.prompt_ids, ask.params)
            strange = reply.versions - {self._weights.name}
            if strange:
                raise _Failed(self._other_weights(min(strange)))
            if reply.finish_reason == "abort":
                raise Retry("the server aborted the request")
        except (_Failed, Slow) as error:
            self._leave(member, str(error))
        except Retry as error:
            member.running.pop(ask.number, None)
            ask.broken += isinstance(error, Broken)
            ask.tries += not isinstance(error, Down | Broken)
            self._waiting.appendleft(ask)
            await self._examine(member, ask, error)
        except (Refused, Exception) as error:
            self.fatal = RuntimeError(f"the generation server {member} rejected a request: {error}")
        else:
            member.running.pop(ask.number, None)
            member.progress = time.monotonic()
            self.finished.append((ask.number, reply))
        self._changed.set()

    async def _examine(self, member: Member, ask: Ask, error: Exception) -> None:
        """Find out whether a failed request shows that its server has failed."""
        try:
            await self._beat(member)
        except (Retry, Refused, Unfit, _Failed) as cause:
            self._leave(member, str(cause))
        else:
            if ask.tries >= MOST_TRIES or ask.broken >= MOST_BROKEN:
                self.fatal = RuntimeError(
                    f"a request failed {ask.tries + ask.broken} times; the last time {member} "
                    f"failed: {error}"
                )

    async def _watch(self, member: Member) -> None:
        """Ask a server from time to time whether it is well, and repair it if not."""
        while True:
            try:
                if member.problem is None:
                    await self._beat(member)
                else:
                    await self._repair(member)
            except (Retry, Refused, Unfit, _Failed) as error:
                self._leave(member, str(error))
            await asyncio.sleep(BEAT_S)

    async def _beat(self, member: Member) -> None:
        assert self._weights is not None
        version = await member.server.version()
        if version != self._weights.name:
            raise _Failed(self._other_weights(version))
        idle_s = time.monotonic() - member.progress
        if member.running and idle_s > self.request_s:
            raise _Failed(
                f"it finished none of {len(member.running)} requests for {idle_s:.0f} s "
                f"(rollout.request_timeout_s={self.request_s:g})"
            )

    def _other_weights(self, version: str) -> str:
        assert self._weights is not None
        return (
            f"it has the weights {version!r} and not {self._weights.name!r}: it was restarted, or "
            "something else updates it"
        )

    async def _repair(self, member: Member) -> None:
        """Give the current weights to a server that does not have them, and let it serve."""
        assert self._weights is not None
        version = await member.server.version()
        await self._settle(member)
        if not version == member.verified == self._weights.name:
            member.verified = None
            await member.server.install(self._weights.delivery, self._weights.name)
            found = await member.server.fingerprint()
            if found != self._fingerprint:
                raise _Failed(
                    f"its weights have fingerprint {found:08x} after loading, and those of the "
                    f"other servers {self._fingerprint or 0:08x}"
                )
            member.verified = self._weights.name
        else:
            await member.server.resume()
        log.warning("the generation server %s serves again", member)
        self._join(member)

    async def _settle(self, member: Member) -> None:
        settings = await member.server.settings()
        self.check(settings)
        member.room = max(1, int(settings.max_num_seqs * _AHEAD))

    def _join(self, member: Member) -> None:
        member.problem = None
        self._changed.set()

    def _leave(self, member: Member, problem: str) -> None:
        """Take a server out of the pool and queue its requests again."""
        if member.problem is None:
            log.warning(
                "the generation server %s does not serve any more, and %d requests go to others: "
                "%s",
                member,
                len(member.running),
                problem,
            )
        elif member.problem != problem:
            log.warning("the generation server %s still does not serve: %s", member, problem)
        member.problem = problem
        asks = self._stop_requests(member)
        self._waiting.extendleft(reversed(asks))
        self._changed.set()

    def _stop_requests(self, member: Member) -> list[Ask]:
        """Cancel a server's requests and return them in their order."""
        running, member.running = member.running, {}
        current = asyncio.current_task()
        for _, task in running.values():
            if task is not current:
                task.cancel()
        return [running[number][0] for number in sorted(running)]

    def _check_serving(self) -> None:
        """Raise NoServer if none serves for too long."""
        now = time.monotonic()
        if any(member.problem is None for member in self.members):
            self._serving = now
            return
        waited = now - self._serving
        if 0 <= self.wait_s <= waited:
            raise self._no_server("serves")
        if waited and now - self._said > _SAY_S:
            self._said = now
            log.warning("waiting for a generation server: %s", self._problems())

    def _no_server(self, what: str) -> NoServer:
        limit = f"actor_rollout_ref.rollout.server_wait_s={self.wait_s:g}"
        return NoServer(f"no generation server {what} within {limit}: {self._problems()}")

    def _problems(self) -> str:
        return "; ".join(f"{member}: {member.problem}" for member in self.members)

    async def _until_one(self, what: str, call: Callable[[Member], Awaitable[None]]) -> None:
        """Call every server, again and again until one succeeds. The others leave the pool."""
        began = time.monotonic()
        while True:
            results = await asyncio.gather(
                *(call(member) for member in self.members), return_exceptions=True
            )
            for member, result in zip(self.members, results, strict=True):
                if isinstance(result, Unfit):
                    raise Unfit(f"the generation server {member} cannot be used: {result}")
                if isinstance(result, BaseException) and not isinstance(result, Retry | Refused):
                    raise result
                if result is None:
                    self._join(member)
                else:
                    self._leave(member, str(result))
            if any(result is None for result in results):
                return
            if 0 <= self.wait_s <= time.monotonic() - began:
                raise self._no_server(what)
            await asyncio.sleep(min(BEAT_S, max(self.wait_s, 0.1)))

    async def _of_all(self, call: Callable[[VLLMServer], Awaitable[Any]]) -> dict[Member, Any]:
        """Call the servers that serve. Those that fail leave the pool."""
        serving = [member for member in self.members if member.problem is None]
        results = await asyncio.gather(
            *(call(member.server) for member in serving), return_exceptions=True
        )
        found = {}
        for member, result in zip(serving, results, strict=True):
            if isinstance(result, Retry | Refused):
                self._leave(member, str(result))
            elif isinstance(result, BaseException):
                raise result
            else:
                found[member] = result
        if not found:
            raise self._no_server("serves")
        return found

    async def _stop_watching(self) -> None:
        watchers, self._watchers = self._watchers, []
        while watchers:
            for task in watchers:
                task.cancel()
            # asyncio.wait_for of Python 3.11 may lose a cancellation (python/cpython#86296).
            _, left = await asyncio.wait(watchers, timeout=_CANCEL_S)
            watchers = list(left)


class _Failed(Exception):
    """A server answers, but it must not serve."""
