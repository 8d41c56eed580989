"""`verlite serve`: run a service that training calls over HTTP."""

import os
import signal
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from verlite.cli.common import fail, failing, from_data_classes
from verlite.rollout.servers.command import ServerOptions

if TYPE_CHECKING:
    import socket

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Run a service that training calls over HTTP.",
    # Options may be written with _ in place of -, as OpenRLHF and others write them.
    context_settings={"token_normalize_func": lambda name: name.replace("_", "-")},
)


@dataclass(frozen=True)
class Listen:
    """Where a service listens, and who may use it."""

    # fmt: off
    host: Annotated[str, Option(
        help="Address to listen on. By default only this machine can connect.")] = "127.0.0.1"
    port: Annotated[int, Option(min=0, max=65535, help="0: any free port.")] = 8000
    allow_host: Annotated[tuple[str, ...], Option(metavar="NAME",
        help="Host name that clients may use, besides this machine's (repeat for several). With "
        "a token any name will do.")] = ()
    token_env: Annotated[str | None, Option(metavar="NAME",
        help="Environment variable with the token that clients have to send.")] = None
    token_file: Annotated[str | None, Option(metavar="FILE", help="File with that token.")] = None
    # fmt: on

    def reserve(self) -> tuple["socket.socket", str | None]:
        """Return a bound socket and the token. Print the problem and exit if there is one.

        A service that other machines can reach without a token gets a warning.
        """
        from verlite.http.client import TokenError, token_of_file, token_of_variable
        from verlite.http.server import ServiceError, bind, open_to_others

        token = None
        with failing(TokenError), failing(ServiceError, code=1):
            if self.token_env and self.token_file:
                raise TokenError("--token-env and --token-file are both given; keep one")
            if self.token_env:
                token = token_of_variable(self.token_env, "--token-env")
            elif self.token_file:
                token = token_of_file(self.token_file, "--token-file")
            bound = bind(self.host, self.port)
        if token is None and open_to_others(bound):
            typer.echo(
                f"warning: every machine that reaches {self.host} can use this service; "
                "--token-env NAME or --token-file FILE asks clients for a token",
                err=True,
            )
        return bound, token

    def names(self) -> list[str]:
        """Return the host names that clients may use."""
        return [self.host, *self.allow_host]


@dataclass(frozen=True)
class ListenOnPort(Listen):
    """The same for a service that binds a given port itself."""

    port: Annotated[int, Option(min=1, max=65535)] = 8000


class Retriever(StrEnum):
    """Search methods."""

    bm25 = "bm25"
    dense = "dense"


class FaissIndex(StrEnum):
    """Index types, by their FAISS names."""

    Flat = "Flat"
    HNSW64 = "HNSW64"


@app.command()
@from_data_classes
def retriever(
    corpus: Annotated[
        str, Option(help="Passages, .jsonl or .jsonl.gz: id and contents, or id, title and text.")
    ],
    index: Annotated[
        str | None, Option(metavar="DIR", help="Build the index here once, then load it from here.")
    ] = None,
    rebuild: Annotated[
        bool, Option("--rebuild", help="Build the index again and replace the old one.")
    ] = False,
    retriever: Annotated[
        Retriever, Option(help="dense needs pip install 'verlite[dense]'.")
    ] = Retriever.bm25,
    topk: Annotated[
        int, Option(min=1, max=100, help="Passages per query, if the request has no topk.")
    ] = 3,
    k1: Annotated[float, Option(min=0, help="bm25: weight of repeated words.")] = 0.9,
    b: Annotated[float, Option(min=0, max=1, help="bm25: strength of length normalization.")] = 0.4,
    model: Annotated[
        str, Option(help="dense: encoder, a sentence-transformers name or folder.")
    ] = "intfloat/e5-base-v2",
    faiss_index: Annotated[
        FaissIndex, Option(help="dense: Flat is exact; HNSW64 is faster on large corpora.")
    ] = FaissIndex.Flat,
    query_prefix: Annotated[str, Option(help="dense: text before each query.")] = "query: ",
    passage_prefix: Annotated[str, Option(help="dense: text before each passage.")] = "passage: ",
    max_batch: Annotated[int, Option(min=1, help="Queries per search batch.")] = 32,
    max_queries: Annotated[int, Option(min=1, help="Queries per request.")] = 1024,
    max_body: Annotated[int, Option(min=1, help="Bytes per request.")] = 1 << 20,
    listen: Listen = Listen(),
) -> None:
    """Serve search over a corpus: POST /retrieve in Search-R1's wire format.

    docs/retriever.md describes the format.
    """
    from verlite.http.server import ServiceError, run, url
    from verlite.services.index import BM25, Index, open_index
    from verlite.services.retriever import make_app, progress

    bound, token = listen.reserve()
    with failing(ServiceError, OSError):
        if rebuild and index is None:
            raise ServiceError("--rebuild has no effect without --index DIR")
        if retriever == Retriever.dense:
            from verlite.services.index import Dense

            finder: Index = Dense(model, faiss_index, query_prefix, passage_prefix)
        else:
            finder = BM25(k1, b)
        folder = Path(index) if index else None
        with progress() as track:
            passages = open_index(Path(corpus), finder, folder, rebuild, track)
    service = make_app(passages, finder, topk, max_batch, max_body, max_queries, token)
    address = url(bound, "/retrieve")
    line = f"serving {len(passages)} documents ({finder.name}) at {address}"
    run(service, bound, line, listen.names())


class PromptTemplate(StrEnum):
    """How text prompts mark turns."""

    chatml = "chatml"
    qwen1 = "qwen1"
    base = "base"


@app.command()
@from_data_classes
def reward(
    dataset: Annotated[
        str | None,
        Option(
            help="Ground truths by prompt: .json, .jsonl, .csv or .parquet, or several with "
            "commas. Not needed if every request has labels."
        ),
    ] = None,
    input_key: Annotated[
        str, Option(help="Column of the prompt: chat messages, or text.")
    ] = "prompt",
    answer_key: Annotated[
        str | None,
        Option(
            help="Column of the ground truth; dots for nested ones.",
            show_default="answer, else reward_model.ground_truth",
        ),
    ] = None,
    prompt_template: Annotated[
        PromptTemplate, Option(help="How text prompts mark turns.")
    ] = PromptTemplate.chatml,
    format_weight: Annotated[
        float, Option(min=0, help="Reward of <think>...</think><answer>...</answer>.")
    ] = 0.5,
    function: Annotated[
        str | None,
        Option(
            metavar="FILE:NAME",
            help="Your own compute_score(data_source, solution_str, ground_truth, extra_info), "
            "or OpenRLHF's reward_func(queries, prompts, labels).",
        ),
    ] = None,
    ground_truth: Annotated[
        bool,
        Option(
            "--ground-truth/--no-ground-truth",
            help="--no-ground-truth: call your own function with None for an answer that has "
            "neither a label nor an entry in --dataset, such as for a judge.",
        ),
    ] = True,
    secret_env: Annotated[
        list[str] | None,
        Option(
            metavar="NAME",
            help="Environment variable that the function needs although its name looks like that "
            "of a secret (repeat for several).",
        ),
    ] = None,
    processes: Annotated[
        int | None, Option(min=1, help="Scoring processes.", show_default="one per core")
    ] = None,
    item_timeout: Annotated[float, Option(min=0.01, help="Seconds to score one answer.")] = 10.0,
    max_answers: Annotated[int, Option(min=1, help="Answers per request.")] = 4096,
    max_waiting: Annotated[
        int, Option(min=1, help="Answers that may wait. A further request gets status 503.")
    ] = 65536,
    max_body: Annotated[int, Option(min=1, help="Bytes per request.")] = 1 << 26,
    listen: Listen = Listen(port=5000),
) -> None:
    """Serve rewards: POST /get_reward in OpenRLHF's wire format, for mathematics or a function.

    docs/reward_service.md describes the format.
    """
    from verlite.http.server import ServiceError, run, url
    from verlite.rewards.process import FunctionError
    from verlite.services.reward import Scoring, make_app
    from verlite.services.truths import TEMPLATES, read_truths

    if not ground_truth and function is None:
        fail("--no-ground-truth is for a --function: mathematics compares with the ground truth")
    bound, token = listen.reserve()
    template = TEMPLATES[prompt_template]
    with failing(ServiceError, FunctionError):
        files = [file for file in (dataset or "").split(",") if file]
        truths = read_truths(files, input_key, answer_key, template) if files else None
        limits = (item_timeout, processes, max_waiting)
        scorer = Scoring(function, format_weight, *limits, secret_env or [])
        scorer.start()
    service = make_app(scorer, truths, template, max_body, max_answers, token, ground_truth)
    known = f"{len(truths)} ground truths" if truths else "the ground truths of requests"
    line = f"scoring with {known} at {url(bound, '/get_reward')}"
    run(service, bound, line, listen.names())


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
@from_data_classes
def generation(
    context: typer.Context, options: ServerOptions, listen: ListenOnPort = ListenOnPort()
) -> None:
    """Serve generation for rollout.name=server: a stock `vllm serve` with the flags it needs.

    Further options are those of `vllm serve`. docs/generation_service.md describes the service.
    """
    from verlite import machine
    from verlite.config.plan import resolve_dtype
    from verlite.rollout.servers.command import command, environment, missing_plugin

    problem = missing_plugin()
    if problem:
        fail(problem, code=1)
    device = "cuda" if machine.visible_gpus() else "cpu"
    options = replace(
        options,
        dtype=resolve_dtype(options.dtype, device),
        gpu_memory_utilization=options.gpu_memory_utilization if device == "cuda" else None,
        kv_cache_gb=options.kv_cache_gb if device == "cpu" else None,
    )
    bound, token = listen.reserve()
    bound.close()  # vLLM opens the port itself
    words = command(options, listen.host, listen.port, context.args)
    os.execve(words[0], words, os.environ | environment(options, listen.names(), token))


class Dtype(StrEnum):
    """Precisions of a model."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Device(StrEnum):
    """Kinds of devices."""

    auto = "auto"
    cuda = "cuda"
    cpu = "cpu"


@app.command()
@from_data_classes
def reference(
    model_path: Annotated[str, Option(help="Hugging Face folder, or hub name.")],
    tensor_parallel_size: Annotated[
        int,
        Option(
            min=1,
            help="GPUs: the weights are sharded over them (FSDP2), and each computes a part of "
            "the sequences. On CPUs: processes.",
        ),
    ] = 1,
    dtype: Annotated[
        Dtype, Option(help="In which it computes. auto: bfloat16 on GPUs, float32 on CPUs.")
    ] = Dtype.auto,
    model_dtype: Annotated[
        Dtype, Option(help="Of the weights in memory. auto: as --dtype.")
    ] = Dtype.auto,
    device: Annotated[Device, Option(help="auto: cuda if there is a GPU.")] = Device.auto,
    max_tokens_per_gpu: Annotated[int, Option(min=1, help="Tokens of one pass.")] = 16384,
    max_sequences: Annotated[int, Option(min=1, help="Per request.")] = 4096,
    max_body: Annotated[int, Option(min=1, help="Bytes per request.")] = 1 << 26,
    trust_remote_code: Annotated[
        bool, Option("--trust-remote-code", help="Run Python code that comes with the model.")
    ] = False,
    listen: Listen = Listen(port=8001),
) -> None:
    """Serve log-probs of given tokens: POST /log_probs, GET /model, GET /health.

    Training uses it with actor_rollout_ref.ref.url. docs/reference_service.md
    """
    from verlite.engine.reference_wire import ModelInfo
    from verlite.engine.scoring import ScoringError, ScoringSettings, TokenScorer, default_device
    from verlite.http.server import run, url
    from verlite.machine import visible_gpus
    from verlite.services.reference import make_app

    kind = default_device() if device == Device.auto else device.value
    if kind == "cuda" and tensor_parallel_size > visible_gpus():
        fail(
            f"--tensor_parallel_size {tensor_parallel_size}: this machine has {visible_gpus()} "
            "visible GPUs. Use fewer, or --device cpu."
        )
    bound, token = listen.reserve()
    settings = ScoringSettings(
        model_path,
        tensor_parallel_size,
        kind,
        dtype.value,
        model_dtype.value,
        max_tokens_per_gpu,
        trust_remote_code,
    )
    with failing(ScoringError, code=1):
        scorer = TokenScorer(settings)
    info = ModelInfo(
        model=scorer.identity, name=Path(model_path).name, ranks=settings.ranks, **scorer.facts
    )
    room = settings.ranks * max_tokens_per_gpu

    def end() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    service = make_app(scorer, info, room, max_body, max_sequences, token, end)
    processes = "1 process" if settings.ranks == 1 else f"{settings.ranks} processes"
    line = f"serving {info.name} ({info.dtype}, {processes}) at {url(bound)}"
    try:
        run(service, bound, line, listen.names())
    finally:
        scorer.close()
    if service.state.desk.lost:
        raise typer.Exit(1)
