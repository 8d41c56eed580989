"""The `verlite` command. Every command imports what it needs when it runs, so that `verlite --help` is immediate."""

from enum import StrEnum
from typing import Annotated

import typer

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Reinforcement learning for language models. Training itself is `python -m verlite.main_ppo key=value ...`.",
)

serve = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Run a service that training asks over HTTP."
)
app.add_typer(serve, name="serve")


class Kind(StrEnum):
    """Functions of a user's own."""

    reward = "reward"
    estimator = "estimator"
    loss = "loss"


class Retriever(StrEnum):
    """How passages are found."""

    bm25 = "bm25"
    dense = "dense"


class FaissIndex(StrEnum):
    """FAISS's name of an index type."""

    Flat = "Flat"
    HNSW64 = "HNSW64"


Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="The training command's arguments, as they are."),
]
PASS_THROUGH = {
    "ignore_unknown_options": True,
    "allow_extra_args": True,
    "help_option_names": ["--help"],
}


@app.command(context_settings=PASS_THROUGH)
def check(arguments: Arguments = None) -> None:
    """Find everything wrong with a training command, in seconds, without starting anything. Exit code 2 if anything is.

    Takes what main_ppo takes: overrides, --config-name NAME, --config-path FOLDER.
    """
    from verlite.config.plan import make_plan
    from verlite.config.show import console, notes_text

    loaded = _load(arguments)
    out = console()
    if loaded.notes:
        out.print(notes_text(loaded.notes), soft_wrap=True)
    plan = make_plan(loaded.config)
    out.print(plan.table())
    if plan.max_turns and (silent := _silent_tools(loaded.config)):
        out.print(f"note: {silent}", soft_wrap=True, highlight=False)
    out.print("The configuration is fine.")


@app.command(context_settings=PASS_THROUGH)
def plan(
    arguments: Arguments = None,
    config: Annotated[
        bool, typer.Option("--config", help="Print every value and where it comes from, as YAML.")
    ] = False,
) -> None:
    """Print what a training command amounts to: batch sizes, updates, engines, devices."""
    from verlite.config.load import dump
    from verlite.config.plan import make_plan
    from verlite.config.show import console

    loaded = _load(arguments)
    if config:
        print(dump(loaded), end="")
    else:
        console().print(make_plan(loaded.config).table())


@app.command()
def explain(
    key: Annotated[
        str, typer.Argument(help="A key, a section, an old name, or the end of one: actor.optim.lr")
    ] = "",
) -> None:
    """Say what a configuration key means, its type, its default and its legal values."""
    from verlite.config.explain import explain as text_of

    try:
        print(text_of(key))
    except KeyError as error:
        typer.echo(error.args[0], err=True)
        raise typer.Exit(2) from None


@app.command()
def export(
    checkpoint: Annotated[str, typer.Argument(help="A global_step_N folder.")],
    target: Annotated[
        str, typer.Argument(help="The Hugging Face folder to write; must not have anything in it.")
    ],
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16")] = "float32",
) -> None:
    """Turn a checkpoint into a Hugging Face model folder, reload it, and compare the two. Needs no Ray and no GPU."""
    from pathlib import Path

    from verlite.report.export import export_checkpoint
    from verlite.trainer.checkpoints import CheckpointError

    try:
        difference = export_checkpoint(Path(checkpoint), Path(target), dtype)
    except CheckpointError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    print(
        f"wrote {target} in {dtype}; reloaded, its log-probs differ from the checkpoint's by at most {difference:.1e}"
    )


@app.command()
def curve(
    run_dir: Annotated[
        str, typer.Argument(help="A run directory: the folder that has metrics.jsonl.")
    ],
    picture: Annotated[
        str, typer.Option(help="Where the picture goes; its ending says its format.")
    ] = "RUN_DIR/reward_curve.png",
) -> None:
    """Show a run's reward over its steps, in the terminal and as a picture. Works while the run is going on."""
    from pathlib import Path

    from verlite.report.curve import draw, plot, read_curve

    target = Path(picture.replace("RUN_DIR", run_dir))
    try:
        found = read_curve(Path(run_dir) / "metrics.jsonl")
        draw(found, target, run_dir)
    except (ValueError, OSError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    curves = {"of each step's samples": found.training} | {
        f"on held-out prompts of {name}": points for name, points in found.validation.items()
    }
    for name, points in curves.items():
        if points:
            (first, begin), (last, end) = points[0], points[-1]
            print(
                f"mean reward {name}: {begin:.3f} at step {first}, {end:.3f} at step {last}\n{plot(points)}\n"
            )
    print(f"wrote {target}")


@app.command()
def show(
    run_dir: Annotated[str, typer.Argument(help="A run directory: the folder that has rollouts/.")],
    step: Annotated[int | None, typer.Option(help="Of which step; without it the newest.")] = None,
    worst: Annotated[
        int | None,
        typer.Option(metavar="K", min=1, help="Only the K samples with the lowest scores."),
    ] = None,
    count: Annotated[int, typer.Option(metavar="K", min=1, help="At most this many samples.")] = 4,
    validation: Annotated[
        bool, typer.Option("--val", help="Samples of the validation after the step.")
    ] = False,
    whole: Annotated[bool, typer.Option("--whole", help="Print long prompts whole.")] = False,
) -> None:
    """Print a step's samples: turns, tool calls and what they answered, rewards, and which text was trained."""
    from pathlib import Path

    from verlite.config.show import console
    from verlite.report.samples import legend, picture, read_samples
    from verlite.report.samples import worst as lowest

    try:
        path, samples = read_samples(Path(run_dir), step, validation)
    except ValueError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    shown = lowest(samples, worst) if worst else samples[:count]
    out = console()
    out.print(f"{path}: {len(shown)} of {len(samples)} samples", legend(), highlight=False)
    for number, sample in enumerate(shown, start=1):
        try:
            drawn = picture(sample, whole)
        except (KeyError, TypeError, AttributeError) as error:
            typer.echo(
                f"{path}: sample {number} is not as a run writes it: {type(error).__name__}: {error}",
                err=True,
            )
            raise typer.Exit(2) from None
        out.print()
        out.print(drawn)


@app.command()
def contract(
    kind: Annotated[Kind, typer.Argument(help="What the function is.")],
    function: Annotated[
        str,
        typer.Argument(
            help="package.module:function; a reward also as FILE.py or FILE.py:function."
        ),
    ],
    whitens: Annotated[
        bool,
        typer.Option("--whitens", help="The estimator compares with the whole batch on purpose."),
    ] = False,
    kwargs: Annotated[
        str,
        typer.Option(help="Its settings as JSON: adv_kwargs, policy_loss.kwargs or reward_kwargs."),
    ] = "{}",
) -> None:
    """Try a reward, advantage estimator or policy loss of your own on small known inputs. Exit code 1 if anything is wrong with it."""
    import json
    import sys

    sys.path.insert(0, "")  # as `python -m verlite.main_ppo` has it
    try:
        settings = json.loads(kwargs)
        if not isinstance(settings, dict):
            raise ValueError(
                f"--kwargs {kwargs}: expected a JSON object, such as '{{\"alpha\": 0.5}}'"
            )
        problems = _CONTRACTS[kind](function, settings, whitens)
    except ValueError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    for problem in problems:
        print(f"- {problem}")
    if problems:
        raise typer.Exit(1)
    print(f"{function} keeps the contract of {_ARTICLES[kind]}.")


@serve.command()
def retriever(
    corpus: Annotated[
        str,
        typer.Option(help="Passages, .jsonl or .jsonl.gz: id and contents, or id, title and text."),
    ],
    index: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Keep the index here: built once, loaded from then on."),
    ] = None,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Build the index of --index again, whatever is there.")
    ] = False,
    retriever: Annotated[
        Retriever, typer.Option(help="dense needs pip install 'verlite[dense]'.")
    ] = Retriever.bm25,
    topk: Annotated[
        int,
        typer.Option(min=1, max=100, help="Passages for a query, where a request does not say."),
    ] = 3,
    host: Annotated[
        str,
        typer.Option(help="Address to listen on. The default is reached from this machine only."),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8000,
    k1: Annotated[float, typer.Option(min=0, help="bm25: how much a repeated word adds.")] = 0.9,
    b: Annotated[
        float, typer.Option(min=0, max=1, help="bm25: how much a passage's length counts.")
    ] = 0.4,
    model: Annotated[
        str, typer.Option(help="dense: encoder, a sentence-transformers name or folder.")
    ] = "intfloat/e5-base-v2",
    faiss_index: Annotated[
        FaissIndex, typer.Option(help="dense: Flat is exact, HNSW64 quicker on a large corpus.")
    ] = FaissIndex.Flat,
    query_prefix: Annotated[str, typer.Option(help="dense: text before each query.")] = "query: ",
    passage_prefix: Annotated[
        str, typer.Option(help="dense: text before each passage.")
    ] = "passage: ",
    max_batch: Annotated[int, typer.Option(min=1, help="Queries that are searched at once.")] = 32,
    max_queries: Annotated[
        int, typer.Option(min=1, help="Queries that one request may have.")
    ] = 1024,
    max_body: Annotated[int, typer.Option(min=1, help="Bytes that one request may have.")] = 1
    << 20,
) -> None:
    """Search a corpus over HTTP: POST /retrieve, in Search-R1's wire format. docs/retriever.md describes it."""
    from pathlib import Path

    from verlite.services.corpus import ServiceError
    from verlite.services.index import BM25, Index, open_index
    from verlite.services.retriever import Limits, bind, make_app, progress, run, url

    try:
        bound = bind(host, port)
    except ServiceError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    try:
        if rebuild and index is None:
            raise ServiceError(
                "--rebuild: has no effect without --index, which says what to rebuild"
            )
        if retriever == Retriever.dense:
            from verlite.services.dense import Dense

            finder: Index = Dense(model, faiss_index, query_prefix, passage_prefix)
        else:
            finder = BM25(k1, b)
        with progress() as track:
            passages = open_index(
                Path(corpus), finder, Path(index) if index else None, rebuild, track
            )
    except (ServiceError, OSError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    app = make_app(passages, finder, topk, max_batch, Limits(body=max_body, queries=max_queries))
    run(app, bound, f"serving {len(passages)} documents ({finder.name}) at {url(bound)}")


def _silent_tools(config) -> str | None:
    """Why an agent's tools cannot be used now from here."""
    from verlite.envs.factory import build_env_factory, checked
    from verlite.envs.step import ToolError

    try:
        return checked(build_env_factory(config))
    except ToolError as error:
        return f"{error}. A run refuses to start until then."
    except ValueError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None


def _check_estimator(name: str, settings: dict, whitens: bool) -> list[str]:
    from verlite.algorithms.advantages import ESTIMATORS
    from verlite.algorithms.contract import check_estimator
    from verlite.algorithms.lookup import lookup

    return check_estimator(lookup(name, ESTIMATORS, "advantage estimator"), whitens, settings)


def _check_loss(name: str, settings: dict, whitens: bool) -> list[str]:
    from verlite.algorithms.contract import check_policy_loss
    from verlite.algorithms.lookup import lookup
    from verlite.algorithms.losses import POLICY_LOSSES

    return check_policy_loss(lookup(name, POLICY_LOSSES, "policy loss"), settings)


def _check_reward(name: str, settings: dict, whitens: bool) -> list[str]:
    from verlite.rewards.contract import check_reward

    return check_reward(name, settings)


_CONTRACTS = {Kind.reward: _check_reward, Kind.estimator: _check_estimator, Kind.loss: _check_loss}
_ARTICLES = {
    Kind.reward: "a reward function",
    Kind.estimator: "an advantage estimator",
    Kind.loss: "a policy loss",
}


def _load(arguments: list[str] | None):
    from verlite.config.load import main_argv

    return main_argv(arguments or [], program="verlite check")


if __name__ == "__main__":
    app()
