"""Client of the reference service (verlite/services/reference.py) in a training run."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from verlite.engine.reference_wire import Job, ModelInfo, read_answer, read_info, request
from verlite.http.client import Client, Refused, Retry, Server, Unavailable
from verlite.spec.roles import ReferenceServiceSpec

REQUEST_TOKENS = 1 << 16
REQUEST_SEQUENCES = 512
START = "Start it (verlite serve reference --model_path PATH --port 8001), or correct "


class ReferenceUnavailable(RuntimeError):
    """The service does not answer, or rejects a request. The message has the remedy."""


class WrongReference(RuntimeError):
    """The service has another model than the run. The message has the remedy."""


def client_of(spec: ReferenceServiceSpec) -> Client:
    """Return a client, whose servers' addresses are without a path. Raises TokenError."""
    return Client(replace(spec, url=[url.rstrip("/") for url in spec.url]))


def check(spec: ReferenceServiceSpec) -> tuple[ModelInfo, str | None]:
    """Ask every server for its model. Return the model, and a warning about silent servers.

    Raises:
        ReferenceUnavailable: no server answers.
        WrongReference: servers have different models.
    """
    infos: dict[str, ModelInfo] = {}

    async def ask() -> str | None:
        client = client_of(spec)

        async def probe(server: Server) -> None:
            address = f"{server.url}/model"
            infos[str(server)] = await client.attempt(address, None, read_info, method="GET")

        return await client.check(probe, f"{START}{spec.section}.url")

    try:
        warning = asyncio.run(ask())
    except (Unavailable, ValueError) as error:
        raise ReferenceUnavailable(str(error)) from error
    (first, info), *others = infos.items()
    for address, other in others:
        if other.model != info.model:
            raise WrongReference(
                f"{spec.section}.url names services with different models: {first} has {info.name} "
                f"({info.model}), {address} has {other.name} ({other.model}). Start all of them "
                "with the same --model_path and --dtype"
            )
    return info, warning


def log_probs(
    spec: ReferenceServiceSpec,
    sequences: Sequence[np.ndarray],
    scored: Sequence[int],
    temperature: float,
    model: str,
) -> list[np.ndarray]:
    """Return the log-probs of each sequence's last `scored` tokens, float32.

    Args:
        sequences: token ids, each [n].
        scored: for each sequence, below n and at least 1.
        temperature: divisor of the logits.
        model: `ModelInfo.model` that the answers must have.

    Raises:
        ReferenceUnavailable: no answer within deadline_s, or a server rejects a request.
        WrongReference: an answer is from another model.
    """
    jobs = list(_jobs(sequences, scored, temperature))

    async def ask() -> list[list[np.ndarray]]:
        async with client_of(spec) as client:
            # A request's deadline begins when a server is free for it.
            room = asyncio.Semaphore(spec.max_in_flight * len(client.servers))
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(_one(client, spec, job, model, room)) for job in jobs]
            return [task.result() for task in tasks]

    try:
        return [row for rows in asyncio.run(ask()) for row in rows]
    except BaseExceptionGroup as errors:
        error = errors.exceptions[0]
        if isinstance(error, WrongReference):
            raise error from None
        if isinstance(error, Unavailable | Refused | Retry):
            raise ReferenceUnavailable(
                f"the {spec.name} computed no log-probs for a step: {error}. The run can be "
                "resumed when it answers"
            ) from error
        raise
    except ValueError as error:  # a token that cannot be read
        raise ReferenceUnavailable(str(error)) from error


async def _one(
    client: Client, spec: ReferenceServiceSpec, job: Job, model: str, room: asyncio.Semaphore
) -> list[np.ndarray]:
    def read(value: object) -> list[np.ndarray]:
        values, found = read_answer(value, job.scored)
        if found != model:
            raise WrongReference(
                f"the {spec.name} at {spec.section}.url answers with another model than at the "
                f"start of the run ({found}, not {model}). Restart it with the model of the run"
            )
        return values

    what = f"{len(job.sequences)} sequences"
    async with room:
        return (await client.post(request(job), read, path="/log_probs", what=what)).value


def _jobs(
    sequences: Sequence[np.ndarray], scored: Sequence[int], temperature: float
) -> Iterator[Job]:
    """Split the sequences into requests of at most REQUEST_TOKENS tokens (or one sequence)."""
    start, tokens = 0, 0
    for end, sequence in enumerate(sequences):
        full = tokens + len(sequence) > REQUEST_TOKENS or end - start == REQUEST_SEQUENCES
        if end > start and full:
            yield Job(list(sequences[start:end]), list(scored[start:end]), temperature)
            start, tokens = end, 0
        tokens += len(sequence)
    if start < len(sequences):
        yield Job(list(sequences[start:]), list(scored[start:]), temperature)
