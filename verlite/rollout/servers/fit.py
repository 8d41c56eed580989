"""Do the generation servers answer, and do they fit the run? The driver asks before Ray starts, and
the rollout process again. Imports no torch."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from verlite.http.client import Client, Refused, Retry
from verlite.rollout.engines.vllm_plugin import BACKEND
from verlite.rollout.servers.vllm_server import ServerSettings, Unfit, VLLMServer
from verlite.spec.roles import GenerationSpec, ServiceSpec

AGAIN_S = 2.0
"""Seconds between two questions while no server answers."""
KEY = "actor_rollout_ref.rollout.servers"


class NoServer(RuntimeError):
    """No server can be used. The message names each and says why."""


@dataclass(frozen=True)
class Needs:
    """What a run needs of its servers.

    Attributes:
        max_model_len: tokens of its longest sequence.
        vocab_size: of its model; None: not known here.
        dtype: of the weights, such as "bfloat16"; None: not known here.
    """

    max_model_len: int
    vocab_size: int | None
    dtype: str | None


def check_fit(found: ServerSettings, needs: Needs) -> None:
    """Raise Unfit if a server's settings do not fit the run."""
    wrong = []
    if found.max_model_len < needs.max_model_len:
        wrong.append(
            f"--max-model-len is {found.max_model_len}, and sequences have up to "
            f"{needs.max_model_len} tokens"
        )
    if needs.vocab_size is not None and found.vocab_size != needs.vocab_size:
        wrong.append(
            f"its model has {found.vocab_size} tokens in its vocabulary, and "
            f"actor_rollout_ref.model.path {needs.vocab_size}"
        )
    if needs.dtype is not None and found.dtype != needs.dtype:
        wrong.append(f"--dtype is {found.dtype}, and actor_rollout_ref.rollout.dtype {needs.dtype}")
    if found.logprobs_mode != "processed_logprobs":
        wrong.append(f"--logprobs-mode is {found.logprobs_mode}, not processed_logprobs")
    if found.weight_transfer != BACKEND:
        wrong.append(
            f"the backend of --weight-transfer-config is {found.weight_transfer}, not {BACKEND}"
        )
    if wrong:
        raise Unfit("; ".join(wrong))


def service(rollout: GenerationSpec) -> ServiceSpec:
    """Return how the servers are called."""
    return ServiceSpec(
        "generation server",
        "actor_rollout_ref.rollout",
        rollout.servers,
        timeout_s=rollout.request_timeout_s,
        deadline_s=rollout.request_timeout_s,
        token_env=rollout.server_token_env,
        token_key="server_token_env",
        max_values=8_000_000,  # about 15 for each token of a response, with its log-prob
    )


def check(
    rollout: GenerationSpec, needs: Needs, say: Callable[[str], None], waits: bool = True
) -> str | None:
    """Ask every server for its settings. Waits rollout.server_wait_s for the first answer.

    Args:
        say: prints that it waits.
        waits: False: ask once.

    Returns:
        A warning about the servers that do not answer; None if all do.

    Raises:
        NoServer: none answers in time.
        ValueError: a server cannot be used for this run, or the token cannot be read.
    """
    return asyncio.run(_check(rollout, needs, say, waits))


async def _check(
    rollout: GenerationSpec, needs: Needs, say: Callable[[str], None], waits: bool
) -> str | None:
    began, has_said = time.monotonic(), False
    async with Client(service(rollout)) as client:
        servers = [
            VLLMServer(client, server, rollout.server_timeout_s, rollout.request_timeout_s)
            for server in client.servers
        ]
        while True:
            found = await asyncio.gather(*(_problem(server, needs) for server in servers))
            silent = {str(server): why for server, why in zip(servers, found, strict=True) if why}
            each = "; ".join(f"{server}: {why}" for server, why in silent.items())
            if len(silent) < len(servers):
                return (
                    f"{KEY}: not in use as long as they do not answer: {each}" if silent else None
                )
            limit = f"actor_rollout_ref.rollout.server_wait_s={rollout.server_wait_s:g}"
            if not waits or 0 <= rollout.server_wait_s <= time.monotonic() - began:
                raise NoServer(
                    f"no generation server answers (how long a run waits: {limit}): {each}. Start "
                    f"them (`verlite serve generation`), or correct {KEY}"
                )
            if not has_said:
                say(f"waiting for a generation server ({limit}): {each}")
            has_said = True
            await asyncio.sleep(min(AGAIN_S, max(rollout.server_wait_s, 0.1)))


async def _problem(server: VLLMServer, needs: Needs) -> str:
    """Return why a server does not answer, "" if it does.

    Raises:
        Unfit: it answers, but cannot be used for this run.
    """
    try:
        await server.version()
        check_fit(await server.settings(), needs)
    except Unfit as error:
        raise Unfit(f"the generation server {server} cannot be used: {error}") from error
    except (Retry, Refused) as error:
        return str(error)
    return ""
