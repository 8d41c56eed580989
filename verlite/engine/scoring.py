"""A frozen model on one or several processes of this machine that scores given tokens.

The caller's process holds no model. With several processes the weights are sharded over them
(FSDP2), and each computes a part of the sequences. Processes end with the caller.
"""

import logging
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np

from verlite.machine import visible_gpus
from verlite.spec.roles import FSDPSpec, ModelSpec
from verlite.threads import dividing

log = logging.getLogger(__name__)

SHAPE = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
"""Values of config.json that tell models apart."""


class ScoringError(RuntimeError):
    """The model cannot be loaded, or one of its processes has ended."""


@dataclass(frozen=True)
class ScoringSettings:
    """How to load a model and compute with it.

    Attributes:
        path: a Hugging Face folder, or a name on the hub.
        ranks: processes, each with a device of its own.
        device: "cuda" or "cpu".
        dtype: compute dtype; auto: bfloat16 on GPUs, float32 on CPUs.
        model_dtype: dtype of the weights in memory; auto: the compute dtype, which gives the same
            numbers as weights in float32 that are rounded in each pass.
        batch_tokens: tokens that one rank computes in one pass.
    """

    path: str
    ranks: int = 1
    device: str = "cpu"
    dtype: str = "auto"
    model_dtype: str = "auto"
    batch_tokens: int = 16384
    trust_remote_code: bool = False

    def resolved(self) -> "ScoringSettings":
        """Return the settings without auto."""
        dtype = self.dtype
        if dtype == "auto":
            dtype = "bfloat16" if self.device == "cuda" else "float32"
        held = dtype if self.model_dtype == "auto" else self.model_dtype
        return replace(self, dtype=dtype, model_dtype=held)


class TokenScorer:
    """The caller's side of the processes.

    facts: what rank 0 tells of the model: vocab_size, max_length, dtype, fingerprints, shape,
        vocabulary.
    """

    def __init__(self, settings: ScoringSettings) -> None:
        """Start the processes and load the model.

        Raises:
            ScoringError: a process has ended. Its traceback is on standard error.
        """
        context = get_context("spawn")
        settings = settings.resolved()
        self._settings = settings
        self._store = tempfile.TemporaryDirectory(prefix="verlite-scoring-")
        self._ends: list[Connection] = []
        self._processes = []
        for rank in range(settings.ranks):
            own, theirs = context.Pipe()
            arguments = (rank, settings, theirs, str(Path(self._store.name, "store")))
            process = context.Process(target=_work, args=arguments, daemon=True)
            with dividing(settings.ranks):
                process.start()
            theirs.close()
            self._ends.append(own)
            self._processes.append(process)
        try:
            self.facts: dict[str, Any] = self._gather()[0]
        except ScoringError:
            self.close()
            raise

    @property
    def identity(self) -> str:
        """Return a text that identifies the weights and the precision."""
        finest, fingerprint = next(iter(self.facts["fingerprints"].items()))
        return f"{self.facts['dtype']} {finest}:{fingerprint:08x}"

    def log_probs(
        self, sequences: Sequence[np.ndarray], scored: Sequence[int], temperature: float
    ) -> list[np.ndarray]:
        """Return the log-probs of each sequence's last `scored` tokens, float32.

        Args:
            sequences: token ids, each [n]; scored: below n, at least 1.
            temperature: divisor of the logits.

        Raises:
            ScoringError: a process has ended.
        """
        parts = _parts([len(sequence) for sequence in sequences], len(self._ends))
        for end, part in zip(self._ends, parts, strict=True):
            try:
                end.send(([sequences[i] for i in part], [scored[i] for i in part], temperature))
            except OSError:
                raise ScoringError("a process of the model has ended") from None
        found: list[np.ndarray] = [np.empty(0)] * len(sequences)
        for part, values in zip(parts, self._gather(), strict=True):
            for i, row in zip(part, values, strict=True):
                found[i] = row
        return found

    def close(self) -> None:
        """End the processes."""
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self._store.cleanup()

    def _gather(self) -> list[Any]:
        """Return what each rank sends. Raises ScoringError as soon as one has ended."""
        answers: dict[int, Any] = {}
        while len(answers) < len(self._ends):
            waiting = [end for rank, end in enumerate(self._ends) if rank not in answers]
            for end in wait(waiting):
                assert isinstance(end, Connection)
                try:
                    answers[self._ends.index(end)] = end.recv()
                except (EOFError, OSError):
                    rank = self._ends.index(end)
                    raise ScoringError(
                        f"process {rank} of the model {self._settings.path} has ended; its error "
                        "is above"
                    ) from None
        return [answers[rank] for rank in range(len(self._ends))]


def _parts(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Return the sequences of each rank, with about equal numbers of tokens."""
    parts: list[list[int]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        least = tokens.index(min(tokens))
        parts[least].append(i)
        tokens[least] += lengths[i]
    return parts


def _work(rank: int, settings: ScoringSettings, end: Connection, store: str) -> None:
    """Compute what the caller sends, until it closes its end."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the caller finishes its requests
    # All ranks are on this machine.
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}  # =: exactly that name
    import torch
    import torch.distributed as dist

    if settings.device == "cuda":
        torch.cuda.set_device(rank)
    backend = "cpu:gloo,cuda:nccl" if settings.device == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=dist.FileStore(store, settings.ranks), rank=rank, world_size=settings.ranks
    )
    try:
        _serve(rank, settings, end)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the caller has ended
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(0)  # other ranks may wait in a collective that this one does not enter any more


def _serve(rank: int, settings: ScoringSettings, end: Connection) -> None:
    from verlite.engine.fsdp import TrainEngine
    from verlite.engine.micro import MicroBatching

    model = ModelSpec(path=settings.path, trust_remote_code=settings.trust_remote_code)
    fsdp = FSDPSpec(dtype=settings.dtype, model_dtype=settings.model_dtype)
    device = f"cuda:{rank}" if settings.device == "cuda" else "cpu"
    engine = TrainEngine(model, fsdp, head="lm", device=device)
    if engine.unproven and rank == 0:
        log.warning(engine.unproven)
    end.send(_facts(engine, settings) | {"vocabulary": _vocabulary(model)})
    while True:
        sequences, scored, temperature = end.recv()
        longest = max([1, *map(len, sequences)])
        micro = MicroBatching(max_tokens=max(settings.batch_tokens, longest))
        found = engine.forward(rows_of(sequences, scored), micro, temperature)["log_probs"].numpy()
        end.send([row[:last].copy() for row, last in zip(found, scored, strict=True)])


def _facts(engine: Any, settings: ScoringSettings) -> dict[str, Any]:
    import torch

    config = engine.model.model.config
    text = config.get_text_config()
    held = settings.model_dtype
    names = ("float32", "bfloat16", "float16") if held == "float32" else (held,)
    return {
        "vocab_size": text.vocab_size,
        "max_length": int(getattr(text, "max_position_embeddings", None) or 1 << 20),
        "dtype": settings.dtype,
        "fingerprints": {name: engine.fingerprint(getattr(torch, name)) for name in names},
        "shape": {name: getattr(text, name) for name in SHAPE if hasattr(text, name)},
    }


def _vocabulary(model: ModelSpec) -> str:
    """Return the digest of the model's tokenizer, "" if it has none: only distillation needs it."""
    from verlite.engine.folder import ModelError, load_tokenizer, vocabulary_digest

    try:
        return vocabulary_digest(load_tokenizer(model))
    except ModelError:
        return ""


def rows_of(sequences: Sequence[np.ndarray], scored: Sequence[int]) -> Any:
    """Return the sequences as rows of a batch, whose responses are the scored tokens."""
    import torch

    from verlite.protocol.data import DataProto
    from verlite.protocol.ragged import pad

    prompts = [row[: len(row) - last] for row, last in zip(sequences, scored, strict=True)]
    responses = [row[len(row) - last :] for row, last in zip(sequences, scored, strict=True)]
    left = pad(prompts, max([1, *map(len, prompts)]), torch.int64, "left")
    right = pad(responses, max([1, *scored]), torch.int64)
    prompt_lengths = torch.tensor([len(row) for row in prompts], dtype=torch.int64)
    lengths = torch.tensor(list(scored), dtype=torch.int64)
    in_prompt = torch.arange(left.shape[1]) >= left.shape[1] - prompt_lengths[:, None]
    in_response = torch.arange(right.shape[1]) < lengths[:, None]
    attention = torch.cat([in_prompt, in_response], dim=1).long()
    return DataProto.from_dict(
        {
            "input_ids": torch.cat([left, right], dim=1),
            "prompts": left,
            "responses": right,
            "attention_mask": attention,
            "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
            "response_mask": in_response.long(),
        }
    )


def default_device() -> str:
    """Return "cuda" if this machine has a visible GPU, else "cpu"."""
    return "cuda" if visible_gpus() else "cpu"
