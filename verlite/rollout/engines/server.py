"""The engine `server`: generation by stock vLLM servers (`rollout.servers`), over HTTP.

It has no model and needs no device. docs/generation_service.md describes the servers.
"""

import asyncio
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from verlite.http.client import Client
from verlite.rollout.batched import FinishedRequest, eos_ids
from verlite.rollout.servers.fit import Needs, check_fit, service
from verlite.rollout.servers.pool import Ask, ServerPool
from verlite.rollout.servers.sending import Delivery, Network, SharedFiles
from verlite.rollout.servers.vllm_server import Reply, VLLMServer
from verlite.rollout.types import EngineOptions, Sampling
from verlite.weights.buckets import BucketFiles
from verlite.weights.probe import Probe, gap

_SERVERS_AGREE = 0.1
"""Limit between two servers: that of `probe_limit` in half precision."""
_STEP_S = 0.05
"""Longest time of a step. New requests wait for its end."""


class ServerCore:
    """Generation by one or several servers; see `batched.Core`."""

    def __init__(self, options: EngineOptions) -> None:
        rollout, model = options.rollout, options.model
        if rollout.kv_at_update:
            raise ValueError(
                "rollout.name=server: weights cannot be loaded while requests run. Use "
                "rollout.name=vllm or hf"
            )
        if options.pretrained:
            raise ValueError("rollout.name=server: servers get their weights from the trainer")
        self.tokenizer = AutoTokenizer.from_pretrained(
            model.tokenizer_path or model.path, trust_remote_code=model.trust_remote_code
        )
        config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
        self.max_model_len = options.max_model_len
        self.vocab_size = config.get_text_config().vocab_size
        dtype = str(options.dtype).removeprefix("torch.")
        needs = Needs(self.max_model_len, self.vocab_size, dtype)
        self._eos = eos_ids(model.path, config, self.tokenizer)
        self._by_network = rollout.weight_transport == "collective"
        self._bucket_bytes = rollout.sync_bucket_mb << 20
        self._delivery: Delivery | None = None
        self._loop = asyncio.new_event_loop()
        self._client = Client(service(rollout))
        self._run(self._client.__aenter__())
        servers = [
            VLLMServer(self._client, server, rollout.server_timeout_s, rollout.request_timeout_s)
            for server in self._client.servers
        ]
        self._pool = ServerPool(
            servers,
            lambda found: check_fit(found, needs),
            rollout.server_wait_s,
            rollout.request_timeout_s,
        )
        try:
            self._run(self._pool.connect())
        except BaseException:
            self.close()
            raise

    def add(
        self, request_id: int, prompt_ids: list[int], sampling: Sampling, so_far: None = None
    ) -> None:
        """Queue a request. None has tokens already: see the constructor."""
        params = self._params(sampling, self.max_model_len - len(prompt_ids))
        self._pool.add(Ask(request_id, prompt_ids, params))

    def _params(self, sampling: Sampling, room: int) -> dict[str, Any]:
        """Return vLLM's SamplingParams. Each is given, so no default of the server applies.

        room: tokens that fit after the prompt. The server may allow more.
        """
        return {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": max(sampling.top_k, 0),
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "min_tokens": 0,
            "max_tokens": min(sampling.max_tokens, room),
            "seed": sampling.seed,
            "stop": list(sampling.stop),
            "include_stop_str_in_output": True,
            "stop_token_ids": [] if sampling.ignore_eos else self._eos,
            "ignore_eos": sampling.ignore_eos,
            "logprobs": 0,  # only those of the sampled tokens
            "detokenize": bool(sampling.stop),
        }

    def abort(self, request_id: int) -> None:
        """Drop a request."""
        self._pool.abort(request_id)

    def pending(self) -> int:
        """Return the number of requests without an answer."""
        return self._pool.pending()

    def step(self) -> list[FinishedRequest]:
        """Send requests and return the answers that came."""
        return [_finished(*answer) for answer in self._run(self._pool.turn(_STEP_S))]

    def progress(self) -> dict[int, int]:
        """Not needed: see the constructor."""
        raise NotImplementedError

    def so_far(self) -> list[FinishedRequest]:
        """Not needed: see the constructor."""
        raise NotImplementedError

    def load(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Let the servers load the weights and reset their caches."""
        if not isinstance(named, BucketFiles):
            raise TypeError(f"servers read weights from files, got {type(named).__name__}")
        before = self._delivery
        self._delivery = SharedFiles(named)
        if self._by_network:
            self._delivery = Network(named, self._bucket_bytes)
        self._run(self._pool.load(self._delivery))
        if before is not None:
            before.close()

    def reset_caches(self) -> None:
        """Nothing: a server resets its caches with each load, before it serves again."""

    def fingerprint(self) -> int:
        """Return the fingerprint of the weights in the servers."""
        return self._run(self._pool.fingerprint())

    def log_probs(self, ids: list[int]) -> list[float]:
        """Return the log-prob of each token but the first.

        Raises:
            RuntimeError: two servers compute different ones.
        """
        found = self._run(self._pool.log_probs(ids))
        (first, one), *others = found.items()
        for server, other in others:
            apart = gap(Probe(tuple(ids), tuple(one), _SERVERS_AGREE), other)
            if not apart.is_within(_SERVERS_AGREE):
                raise RuntimeError(
                    f"the servers {first} and {server} have equal weights and compute different "
                    f"log-probs with them: the difference is {apart}"
                )
        return one

    def sleep(self) -> set[str]:
        """Nothing: servers have devices of their own."""
        return set()

    def wake(self, tag: str) -> None:
        """Nothing: see `sleep`."""

    def close(self) -> None:
        """Give requests up and close the connections. The servers go on."""
        if hasattr(self, "_pool"):
            self._run(self._pool.close())
        if self._delivery is not None:
            self._delivery.close()
        self._run(self._client.__aexit__())
        self._loop.close()

    def _run(self, call: Any) -> Any:
        return self._loop.run_until_complete(call)


def _finished(number: int, reply: Reply) -> FinishedRequest:
    return FinishedRequest(number, reply.ids, reply.log_probs, reply.finish_reason)
