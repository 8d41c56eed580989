"""One vLLM server, through the HTTP endpoints of a stock `vllm serve`.

Generation is POST /inference/v1/generate: token ids in, token ids out. A server without it gets
POST /v1/completions with token ids. Weights go through vLLM's own endpoints for reinforcement
learning: /pause, /start_weight_update, /update_weights, /finish_weight_update, /resume.
Imports no torch: the driver asks servers for their settings before it starts anything.

Sources: vllm/entrypoints/rl/online/api_router.py, vllm/entrypoints/serve/dev/ and
vllm/entrypoints/scale_out/token_in_token_out/ of vLLM 0.32.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verlite.http.client import Broken, Client, Down, Refused, Retry, Server, Slow
from verlite.weights import TransportError

if TYPE_CHECKING:
    from verlite.rollout.servers.sending import Delivery

_RESETS = 50
"""Attempts to reset the prefix cache, which fails while blocks are held."""
_RESET_S = 0.1
_REMEDY = "Start it with `verlite serve generation`"


class Unfit(ValueError):
    """The server works, but it cannot be used for this run."""


@dataclass(frozen=True)
class Reply:
    """One generated sequence; fields as in `Completion`.

    versions: names of the weights that sampled its tokens.
    """

    ids: list[int]
    log_probs: list[float]
    finish_reason: str
    versions: frozenset[str]


@dataclass(frozen=True)
class ServerSettings:
    """What a server was started with."""

    max_model_len: int
    vocab_size: int
    dtype: str
    logprobs_mode: str
    max_num_seqs: int
    weight_transfer: str | None


@dataclass(eq=False)
class VLLMServer:
    """The calls of one server. All raise the errors of `Client.attempt`."""

    client: Client
    """Open whenever a method runs."""
    server: Server
    """Its address."""
    timeout_s: float
    """Of a call that needs no computation."""
    long_s: float
    """Of a call that generates or loads weights."""

    def __post_init__(self) -> None:
        self._base = self.server.url.rstrip("/")
        self._model: str | None = None
        self._has_token_endpoint = True

    def __str__(self) -> str:
        return str(self.server)

    async def version(self) -> str:
        """Return the name of the weights. It passes through vLLM's engine loop, so an answer also
        shows that the engine runs."""
        try:
            return await self._call(
                "GET", "/weight_info", read=lambda it: str(it["weight_version"])
            )
        except Refused as error:
            raise Unfit(
                f"GET /weight_info: {error}. The server needs vLLM 0.32 with "
                f"VLLM_SERVER_DEV_MODE=1. {_REMEDY}"
            ) from error

    async def settings(self) -> ServerSettings:
        """Return the server's settings.

        Raises:
            Unfit: the server has no worker extension of verlite, or that of another version.
        """

        def read(answer: Any) -> ServerSettings:
            return ServerSettings(**answer["results"][0])

        try:
            return await self._workers("verlite_settings", read=read)
        except (Down, Broken, Slow):
            raise
        except (Refused, Retry) as error:
            raise Unfit(
                f"its workers do not answer verlite_settings ({error}). {_REMEDY}, or with "
                "--worker-extension-cls verlite.rollout.engines.vllm_worker.WorkerExtension"
            ) from error

    async def fingerprint(self) -> int:
        """Return the fingerprint of the weights in its workers, measured now."""
        from verlite.rollout.engines.vllm_worker import combine_shards

        return combine_shards(await self._workers("verlite_fingerprints", self.long_s))

    async def install(self, delivery: "Delivery", version: str) -> None:
        """Replace all weights and drop what was computed with earlier ones.

        Requests that run are aborted. If this raises, the server stays paused: it does not generate
        with weights that were loaded in part.

        Args:
            delivery: of the weights.
            version: the name that the server reports for these weights.
        """
        await self._call("POST", "/pause?mode=abort")
        await self._start_update()
        try:
            async with delivery.to(self._base) as update:
                body = {"update_info": dict(update)}
                await self._call("POST", "/update_weights", body, self.long_s)
        except (TransportError, OSError) as error:
            raise Retry(f"the weights could not be sent: {error}") from error
        await self._call("POST", "/finish_weight_update", {"weight_version": version})
        await self._reset_prefix_cache()
        await self.resume()

    async def _start_update(self) -> None:
        """Begin an update. The update of an earlier trainer, which died in the middle, is ended."""
        try:
            await self._call("POST", "/start_weight_update")
        except Retry:
            ended = "it was ended"
            try:
                await self._call("POST", "/finish_weight_update")
            except Retry as error:
                ended = f"POST /finish_weight_update: {error}"
            try:
                await self._call("POST", "/start_weight_update")
            except Retry as error:
                raise Retry(f"{error}. An earlier update may be open; {ended}") from error

    async def resume(self) -> None:
        """Go on with generation. Does nothing if the server is not paused."""
        await self._call("POST", "/resume")

    async def generate(self, prompt_ids: Sequence[int], params: Mapping[str, Any]) -> Reply:
        """Generate one sequence.

        Args:
            prompt_ids: of the prompt.
            params: vLLM's SamplingParams.
        """
        reply = await self._by_tokens(prompt_ids, params, _token_reply)
        return await self._complete(prompt_ids, params) if reply is None else reply

    async def _by_tokens(self, ids: Sequence[int], params: Mapping[str, Any], read: Any) -> Any:
        """Ask the endpoint that takes token ids. None: the server has none, and /v1/completions is
        asked from now on."""
        if not self._has_token_endpoint:
            return None
        body = {"token_ids": list(ids), "sampling_params": dict(params)}
        try:
            return await self._call("POST", "/inference/v1/generate", body, self.long_s, read)
        except Refused as error:
            if error.status not in (403, 404):
                raise
        self._has_token_endpoint = False
        return None

    async def log_probs(self, ids: Sequence[int]) -> list[float]:
        """Return the log-prob of each token but the first, at temperature 1."""
        params: dict[str, Any] = {"temperature": 0, "max_tokens": 1, "prompt_logprobs": 0}

        def read(answer: Any) -> list[float]:
            scored = answer.get("prompt_logprobs") or answer["choices"][0]["prompt_logprobs"]
            return [
                float(found[str(token)]["logprob"])
                for found, token in zip(scored[1:], ids[1:], strict=True)
            ]

        found: list[float] | None = await self._by_tokens(ids, params | {"detokenize": False}, read)
        if found is not None:
            return found
        body = {"model": await self._model_name(), "prompt": list(ids), **params}
        return await self._call("POST", "/v1/completions", body, self.long_s, read)

    async def _complete(self, prompt_ids: Sequence[int], params: Mapping[str, Any]) -> Reply:
        """Generate by /v1/completions, whose answers do not name the weights."""
        own = {name: value for name, value in params.items() if name != "detokenize"}
        body = {
            "model": await self._model_name(),
            "prompt": list(prompt_ids),
            "return_token_ids": True,
            **own,
        }
        before = await self.version()
        reply = await self._call("POST", "/v1/completions", body, self.long_s, _completion_reply)
        return Reply(
            reply.ids,
            reply.log_probs,
            reply.finish_reason,
            frozenset({before, await self.version()}),
        )

    async def _model_name(self) -> str:
        if self._model is None:
            self._model = await self._call("GET", "/v1/models", read=lambda it: it["data"][0]["id"])
        return self._model

    async def _reset_prefix_cache(self) -> None:
        for _ in range(_RESETS):
            done = await self._call(
                "POST", "/reset_prefix_cache", read=lambda answer: bool(answer["success"])
            )
            if done:
                return
            await asyncio.sleep(_RESET_S)
        raise Retry("its prefix cache could not be reset")

    async def _workers(
        self,
        method: str,
        limit_s: float | None = None,
        read: Any = lambda answer: list(answer["results"]),
    ) -> Any:
        """Call a method of verlite's worker extension in every worker."""
        return await self._call("POST", "/collective_rpc", {"method": method}, limit_s, read)

    async def _call(
        self,
        method: str,
        path: str,
        body: Any = None,
        limit_s: float | None = None,
        read: Any = lambda answer: answer,
    ) -> Any:
        def checked(answer: Any) -> Any:
            try:
                return read(answer)
            except (KeyError, IndexError, TypeError) as error:
                raise ValueError(f"{type(error).__name__}: {error}") from error

        return await self.client.attempt(
            self._base + path,
            body,
            checked,
            method=method,
            limit_s=limit_s or self.timeout_s,
            what=f"{method} {path}",
        )


def _token_reply(answer: Any) -> Reply:
    (choice,) = answer["choices"]
    ids = [int(token) for token in choice["token_ids"]]
    content = (choice["logprobs"] or {}).get("content") or []
    if [entry["token_id"] for entry in content] != ids:
        raise ValueError("the log-probs do not belong to the sampled tokens")
    spans = choice["weight_versions"] or []
    return Reply(
        ids,
        [float(entry["logprob"]) for entry in content],
        str(choice["finish_reason"]),
        frozenset(str(span["version"]) for span in spans),
    )


def _completion_reply(answer: Any) -> Reply:
    (choice,) = answer["choices"]
    ids = [int(token) for token in choice["token_ids"]]
    log_probs = [float(value) for value in choice["logprobs"]["token_logprobs"]]
    if len(log_probs) != len(ids):
        raise ValueError(f"{len(log_probs)} log-probs of {len(ids)} tokens")
    return Reply(ids, log_probs, str(choice["finish_reason"]), frozenset())
