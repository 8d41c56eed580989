"""`verlite check` and the training commands refuse the same, in the same words: each check of the
list fails in both."""

import ast
import json
import shlex
import shutil
import sys
from collections import namedtuple
from collections.abc import Callable
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
from transformers import AutoTokenizer

import verlite
from tests.errors.cases import directory_in_use, one_row, text, write_folder
from tests.models import tiny_model
from tests.trainer.runs import driver_state
from verlite import hub, main_dpo, main_ppo, main_sft
from verlite.cli.before_run import check as check_command
from verlite.config.commands import DPO as DPO_COMMAND
from verlite.config.commands import SFT as SFT_COMMAND
from verlite.config.critical import begin_run, critical_settings, tuning_settings
from verlite.config.load import compose
from verlite.engine.reference_wire import ModelInfo
from verlite.sft import run as sft_run
from verlite.spec.catalog import load
from verlite.trainer import build, checkpoints, checks, disk, launch, opening
from verlite.trainer.errors import RunRefused
from verlite.trainer.preflight import CHECKS, DPO, FILES, RL, SFT, SPLITS, Check
from verlite.trainer.saving import STEP_FILE

pytestmark = pytest.mark.process

AWAY = "http://127.0.0.1:1"
ACTOR = "actor_rollout_ref."
TEACHER = "distillation.teacher_models.teacher_model"
MAINS = {RL: main_ppo.main, SFT: main_sft.main, DPO: main_dpo.main}
NAMED = {RL: [], SFT: ["main_sft"], DPO: ["main_dpo"]}
ARGUMENTS = {
    RL: ["--config-path", ".", "--config-name", "sums"],
    SFT: ["data.train_files=pairs.jsonl", "model.path=model", "trainer.default_local_dir=run"],
}
ARGUMENTS[SFT] += ["data.train_batch_size=8", "trainer.device=cpu", "trainer.project_name=x"]
ARGUMENTS[DPO] = ARGUMENTS[SFT]
PAIR = {"prompt": "1+1=", "response": "2", "chosen": "2", "rejected": "3"}
SCALED = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0}


@dataclass(frozen=True)
class Failure:
    """A configuration with which one check fails."""

    typed: str
    """Overrides."""
    words: str
    """In the message."""
    files: Callable[[], object] | None = None
    """Changes the folder."""
    kind: str = "error"
    """missing: check notes that a run would not start. warning: both commands go on. complete: both
    end with 0."""


def both(name: str, typed: str, words: str, files: Callable[[], object] | None = None, **more: str):
    """The same failure of main_sft and main_dpo."""
    return {(kind, name): Failure(typed, words, files, **more) for kind in (SFT, DPO)}


def saved(step: int = 20, sampler: dict[str, object] | None = None, **settings: object) -> Callable:
    """Return a function that writes a checkpoint of the valid command as far as it is read."""

    def write(kind: str) -> None:
        begin_run()
        if kind == RL:
            now = critical_settings(opening.absolutize_paths(compose("sums", (), ".").config))
            order = {"seed": 42, "shuffle": True, "epoch": 2, "position": 32, "size": 64}
        else:
            command = SFT_COMMAND if kind == SFT else DPO_COMMAND
            loaded = compose(None, ARGUMENTS[SFT], command=command)
            now = tuning_settings(loaded.config)
            order = {"seed": 42, "shuffle": True, "epoch": 2, "position": 8, "size": 16}
        state = driver_state(step, critical=now | settings, sampler=order | (sampler or {}))
        Path("run").mkdir()
        checkpoints.write(Path("run"), step, state, lambda folder: None)

    return write


def complete(kind: str) -> None:
    saved()(kind)
    Path("run/huggingface").mkdir()
    Path("run/huggingface", STEP_FILE).write_text("20")


def val_rows(number: int, **change: object) -> Callable[[], None]:
    """Write val.parquet, with values changed in one row."""

    def write() -> None:
        rows = pq.read_table("train.parquet").to_pylist()
        rows[number] |= change
        pq.write_table(pa.Table.from_pylist(rows), "val.parquet")

    return write


def pairs(name: str, *rows: dict[str, str]) -> Callable[[], None]:
    """Write a file for main_sft and main_dpo that ends with these rows."""

    def write() -> None:
        lines = [json.dumps(row) for row in (*[PAIR] * (16 - len(rows)), *rows)]
        Path(name).write_text("\n".join(lines))

    return write


def gemma(folder: str) -> Callable[[], None]:
    def write() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        tiny_model(Path(folder), "gemma2")

    return write


def phi3_of_2024() -> None:
    """Give the model longrope for more than 8 tokens by its first name, which rules do not know."""
    shutil.rmtree("model")
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    long = {"original_max_position_embeddings": 8}
    tiny_model(Path("model"), "phi3", rope_parameters={**SCALED, **factors, **long}, **long)
    file = Path("model/config.json")
    described = json.loads(file.read_text())
    del described["rope_parameters"]
    scaling = {"rope_scaling": {"type": "su", **factors, **long}}
    file.write_text(json.dumps(described | scaling))


def few_tokens(characters: str = "") -> Callable[[], None]:
    """Let the model have the tokens of these characters only; "": the first ten."""

    def write() -> None:
        tokenizer = AutoTokenizer.from_pretrained("model")
        count = max(tokenizer.encode(characters), default=9) + 1
        file = Path("model/config.json")
        file.write_text(json.dumps(json.loads(file.read_text()) | {"vocab_size": count}))

    return write


def other_tokens() -> None:
    """Write a model whose tokens 7 and 8 have each other's ids."""
    shutil.copytree("model", "other")
    file = Path("other/tokenizer.json")
    described = json.loads(file.read_text())
    ids = described["model"]["vocab"]
    ids["7"], ids["8"] = ids["8"], ids["7"]
    file.write_text(json.dumps(described))


def other_python() -> None:
    """Write an interpreter that has the standard library only."""
    Path("python").write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    Path("python").chmod(0o755)


def no_tokenizer() -> None:
    Path("model/tokenizer.json").write_text("{}")


OWN = "import nowhere\ndef own(**given): ...\n"
ORDER = (
    "class Own:\n    def __init__(self, **given): ...\n    def order(self, epoch): return [99]\n"
)
LONG = [{"role": "user", "content": "11111+11111="}]
LETTERS = [{"role": "user", "content": "abc="}]
VAL = "data.val_files=val.jsonl"
FAILURES: dict[tuple[str, str], Failure] = {
    (RL, "run directory"): Failure("", "is in use by process", directory_in_use),
    **both("run directory", "", "is in use by process", directory_in_use),
    (RL, "checkpoint"): Failure("", "data.seed: 7 in the checkpoint", saved(**{"data.seed": 7})),
    **both("checkpoint", "data.max_length=999", "data.max_length: 1024 in the check", saved()),
    (RL, "train rows"): Failure(
        "", "train.parquet row 5: column 'reward_model'", one_row(5, reward_model=None)
    ),
    (RL, "val rows"): Failure(
        "data.val_files=val.parquet", "val.parquet row 5", val_rows(5, reward_model=None)
    ),
    (SFT, "train rows"): Failure("data.prompt_key=q", "has no column 'q'"),
    (DPO, "train rows"): Failure("data.chosen_key=q", "has no column 'q'"),
    **both("val rows", VAL, "val.jsonl has no rows", text("val.jsonl", "")),
    (RL, "reward function"): Failure(
        "custom_reward_function.path=reward.py",
        "No module named 'nowhere'",
        text("reward.py", OWN + "compute_score = own\n"),
    ),
    (RL, "disk space"): Failure("trainer.save_freq=1", "Free some space", kind="warning"),
    (RL, "tools"): Failure(
        f"max_turns=2 env.name=search retriever.url={AWAY}/retrieve",
        f"the retriever at {AWAY}/retrieve does not answer",
        kind="missing",
    ),
    (RL, "verifiers"): Failure(
        f"agent.verifiers=a agent.python={sys.executable}",
        "agent.verifiers=a: ",
    ),
    (RL, "imports of agents"): Failure(
        "'agent.command=./python own.py' agent.preload=[json,numpy]",
        "preload=['json', 'numpy']: ./python ended with exit code 1: numpy cannot be imported by",
        lambda: (text("own.py", "")(), other_python()),
    ),
    (RL, "reference service"): Failure(
        f"{ACTOR}ref.url={AWAY} {ACTOR}actor.use_kl_loss=true", AWAY, kind="missing"
    ),
    (RL, "generation servers"): Failure(
        f"{ACTOR}rollout.name=server {ACTOR}rollout.servers=[{AWAY}] "
        f"{ACTOR}rollout.server_wait_s=0",
        "no generation server answers",
        kind="missing",
    ),
    (RL, "Ray cluster"): Failure("", f"RAY_ADDRESS={AWAY}: this process must run inside"),
    **both("order", "data.train_batch_size=17", "is more than the 16 training rows"),
    (RL, "estimator"): Failure(
        "algorithm.adv_estimator=own_function:own", "nowhere", text("own_function.py", OWN)
    ),
    (RL, "policy loss"): Failure(
        f"{ACTOR}actor.policy_loss.loss_mode=own_function:own",
        "nowhere",
        text("own_function.py", OWN),
    ),
    (RL, "model configuration"): Failure(
        f"+{ACTOR}model.override_config.nope=1", "override_config.nope is not a value of"
    ),
    **both("model configuration", "+model.override_config.nope=1", "override_config.nope is not"),
    (RL, "positions"): Failure("", "data.max_response_length=8: beyond 8 tokens", phi3_of_2024),
    (RL, "tokenizer"): Failure("", "has no tokenizer", no_tokenizer),
    **both("tokenizer", "", "has no tokenizer", no_tokenizer),
    (RL, "reference model"): Failure(
        f"{ACTOR}ref.url={AWAY} {ACTOR}actor.use_kl_loss=true", "hidden_size 7 instead of"
    ),
    (RL, "teacher service"): Failure(
        f"distillation.enabled=true {TEACHER}.url={AWAY}", AWAY, kind="missing"
    ),
    (RL, "teacher"): Failure(
        f"distillation.enabled=true {TEACHER}.model_path=other",
        "2 tokens differ, the first is '7' with id 29 instead of 28",
        other_tokens,
    ),
    (RL, "trainable model"): Failure("", f"{ACTOR}model.path=", gemma("model")),
    **both("trainable model", "", "(gemma2) cannot be trained", gemma("model")),
    (RL, "adapters"): Failure(
        f"{ACTOR}model.lora_rank=8 {ACTOR}model.target_modules=[nope]",
        "actor_rollout_ref.model.target_modules=['nope'] cannot be adapted",
    ),
    **both(
        "adapters",
        "model.lora_rank=8 model.target_modules=[nope]",
        "model.target_modules=['nope'] cannot be adapted",
    ),
    (RL, "trainable critic"): Failure(
        "algorithm.adv_estimator=gae critic.model.path=critic critic.ppo_mini_batch_size=8 "
        "critic.ppo_micro_batch_size_per_gpu=4",
        "critic.model.path=",
        gemma("critic"),
    ),
    (RL, "environment"): Failure(
        "max_turns=2 env.name=calculator", "chat template", text("model/chat_template.jinja", "x")
    ),
    (RL, "train prompts"): Failure(
        "data.truncation=error data.filter_overlong_prompts=false",
        "train.parquet row 3: the prompt has 12 tokens",
        one_row(3, prompt=LONG),
    ),
    (RL, "val prompts"): Failure(
        "data.val_files=val.parquet data.truncation=error data.filter_overlong_prompts=false",
        "val.parquet row 3: the prompt has 12 tokens",
        val_rows(3, prompt=LONG),
    ),
    **both(
        *("train examples", "", "pairs.jsonl row 15: "),
        pairs("pairs.jsonl", PAIR | {"response": "2" * 2000, "chosen": "2" * 2000}),
    ),
    **both(
        *("val examples", VAL, "val.jsonl row 15: "),
        pairs("val.jsonl", PAIR | {"response": "2" * 2000, "chosen": "2" * 2000}),
    ),
    **both(
        "room for train rows", "data.max_token_len_per_gpu=5", "longest row of data.train_files"
    ),
    **both(
        *("room for val rows", f"{VAL} data.max_token_len_per_gpu=12", "row of data.val_files"),
        pairs("val.jsonl", PAIR | {"response": "2" * 20, "chosen": "2" * 20}),
    ),
    **both("positions of train tokens", "", "data.train_files has a sequence of"),
    **both(
        *("positions of val tokens", VAL, "data.val_files has a sequence of"),
        pairs("val.jsonl", PAIR | {"response": "2" * 20, "chosen": "2" * 20}),
    ),
    (RL, "train tokens"): Failure("", "train.parquet row 0: the prompt has token", few_tokens()),
    (RL, "val tokens"): Failure(
        "data.val_files=val.parquet",
        "val.parquet row 3: the prompt has token",
        lambda: (few_tokens("0123456789+=")(), val_rows(3, prompt=LETTERS)()),
    ),
    **both("train tokens", "", "row 0 of data.train_files: the example has token", few_tokens()),
    **both(
        *("val tokens", VAL, "row 15 of data.val_files: the example has token"),
        lambda: (few_tokens("0123456789+=")(), pairs("val.jsonl", PAIR | {"prompt": "abc="})()),
    ),
    (RL, "order"): Failure(
        "data.sampler.class_path=own_order.py data.sampler.class_name=Own",
        "must be a list of row numbers",
        text("own_order.py", ORDER),
    ),
    (RL, "position"): Failure(
        "trainer.total_training_steps=99",
        "counted 63 training prompts",
        saved(sampler={"size": 63}),
    ),
    **both(
        *("position", "trainer.total_epochs=99", "counted 15 training prompts"),
        saved(sampler={"size": 15}),
    ),
    (RL, "steps left"): Failure("", "already complete: ", complete, kind="complete"),
    **both("steps left", "", "already complete: ", complete, kind="complete"),
}


def rows() -> list[tuple[Check, str, str]]:
    """Return each check of each command: (row, command, its name)."""
    return [
        (check, kind, check.name.format(split=split))
        for check in CHECKS
        for kind in check.commands
        for split in (SPLITS if "{split}" in check.name else ("",))
    ]


def test_every_row_has_a_failure() -> None:
    assert sorted(FAILURES) == sorted((kind, name) for _, kind, name in rows())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("preflight") / "made"
    write_folder(folder)
    with chdir(folder):
        pairs("pairs.jsonl")()
    return folder


def printed(command: Callable[[list[str]], int | None], arguments: list[str]) -> tuple[int, str]:
    """Return exit code and output of a command in this process."""
    output = StringIO()
    with redirect_stdout(output), redirect_stderr(output):
        try:
            code = command(arguments) or 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        except typer.Exit as stop:
            code = stop.exit_code
    return code, output.getvalue()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a command has started. Nothing really starts."""
    found: list[str] = []

    class Started(RunRefused):
        pass

    def start(name: str) -> Callable[..., object]:
        def begin(*given: object, **named: object) -> object:
            found.append(name)
            return SimpleNamespace(__enter__=None)

        return begin

    def workers(*given: object, **named: object) -> None:
        found.append("workers")
        raise Started("workers would start")

    @launch.contextmanager
    def ray(*given: object, **named: object):
        found.append("Ray")
        yield SimpleNamespace()

    monkeypatch.setattr(launch, "connect_ray", ray)
    monkeypatch.setattr(launch, "reserve_devices", start("devices"))
    monkeypatch.setattr(launch, "prestart_workers", start("processes"))
    monkeypatch.setattr(build, "record_config", workers)
    monkeypatch.setattr(sft_run, "TrainEngine", workers)
    return found


def written() -> dict[str, int]:
    """The files of the working directory, and when they were written. Python's bytecode aside."""
    files = (file for file in Path().rglob("*") if "__pycache__" not in file.parts)
    return {str(file): file.stat().st_mtime_ns for file in files if file.is_file()}


@pytest.mark.parametrize(
    ("check", "kind", "name"), rows(), ids=[f"{kind}-{name}" for _, kind, name in rows()]
)
def test_check_and_command_say_the_same(
    check: Check,
    kind: str,
    name: str,
    made: Path,
    started: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failure = FAILURES[kind, name]
    folder = shutil.copytree(made, tmp_path / "sums")
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(hub, "unreachable", lambda: "no network")
    for variable in ("RAY_ADDRESS", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    if name == "Ray cluster":
        monkeypatch.setenv("RAY_ADDRESS", AWAY)
    if name == "disk space":
        usage = namedtuple("usage", "free")(1000)
        monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: usage)
    if name == "reference model":
        info = ModelInfo("m", "toy", 128, 99, "float32", {}, {"hidden_size": 7}, 1)
        monkeypatch.setattr(checks.reference_client, "check", lambda ref: (info, None))
    if name.startswith("positions"):
        limit = 15 if "val" in name else 3
        monkeypatch.setattr("verlite.sft.checks.position_limit", lambda config: ("x", limit))
    undo = None
    if failure.files:
        takes_kind = failure.files is complete or failure.files.__qualname__.startswith("saved")
        undo = failure.files(kind) if takes_kind else failure.files()
    arguments = [*ARGUMENTS[kind], *shlex.split(failure.typed)]
    before = written()
    code, said = printed(check_command, [*NAMED[kind], *arguments])
    assert written() == before
    assert started == [], "check starts nothing"
    run_code, run_said = printed(MAINS[kind], arguments)
    if callable(undo):
        undo()
    start = {"error": "error: ", "missing": "error: ", "warning": "warning: "}.get(failure.kind, "")
    begins = run_said.index(start or "already complete: ")  # lines of progress may stand before
    message = run_said[begins + len(start) :].strip()
    if failure.kind == "warning":
        message = message.splitlines()[0]
    assert failure.words in message, run_said
    if failure.kind == "warning":
        assert (code, run_code) == (0, 2) and message in said and started[-1] == "workers"
        return
    before_ray = check.phase == FILES or name in ("reward function", "tools")
    assert "workers" not in started and not (before_ray and started)
    assert message.rstrip(".") in said
    assert (code, run_code) == {"error": (2, 2), "missing": (0, 2), "complete": (0, 0)}[
        failure.kind
    ]
    if failure.kind == "missing":
        assert "a run would not start now" in said


@pytest.mark.parametrize(
    ("kind", "typed", "words"),
    [
        (RL, "data.max_prompt_length=1", "data.filter_overlong_prompts=True"),
        (SFT, "data.max_token_len_per_gpu=5", "data.max_token_len_per_gpu=5 has no room"),
        (DPO, "data.max_token_len_per_gpu=5", "data.max_token_len_per_gpu=5 has no room"),
    ],
)
def test_a_refused_run_says_what_was_found_before(
    kind: str,
    typed: str,
    words: str,
    made: Path,
    started: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which checkpoint was passed over, when a later check ends the run."""
    monkeypatch.chdir(shutil.copytree(made, tmp_path / "sums"))
    saved()(kind)
    Path("run/global_step_30").mkdir()
    code, said = printed(MAINS[kind], [*ARGUMENTS[kind], typed])
    assert code == 2 and words in said
    assert " ".join(said.split()).count("warning: ignored incomplete checkpoint") == 1


def test_sft_refuses_too_few_rows_before_it_tokenizes(
    made: Path, started: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(shutil.copytree(made, tmp_path / "sums"))
    no_tokenizer()
    code, said = printed(MAINS[SFT], [*ARGUMENTS[SFT], "data.train_batch_size=17"])
    assert code == 2 and "is more than the 16 training rows" in said and "tokenizer" not in said


@pytest.mark.parametrize(
    ("program", "environment", "words"),
    [
        ("own.py:run", "python_interpreter_path: /x/python", "python_interpreter_path=/x/python"),
        ("./python own.py", "env_vars: [{PYTHONPATH: /x}]", "env_vars PYTHONPATH"),
        ("./python own.py", "python_interpreter_path: /x/python", ""),
    ],
)
def test_imports_are_tried_where_the_engines_have_this_environment(
    program: str,
    environment: str,
    words: str,
    made: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A function runs in the engines' Python, a file in its own; both have their variables."""
    monkeypatch.chdir(shutil.copytree(made, tmp_path / "sums"))
    text("own.py", "def run(task): pass")()
    other_python()
    group = f"{{label: a, node_ranks: 0, env_configs: [{{node_ranks: 0, {environment}}}]}}"
    agent = [f"agent.command={program}", "agent.preload=[no_such_module]"]
    code, said = printed(check_command, [*ARGUMENTS[RL], *agent, f"cluster.node_groups=[{group}]"])
    if words:
        expected = f"was not tried: the engines start programs with {words} (cluster.node_groups)"
        assert code == 0 and expected in said
    else:
        assert code == 2 and "no_such_module cannot be imported by" in said


def called_checks(module: str, source: str) -> set[str]:
    """Return the check functions that a module imports or calls, as "module:name"."""
    functions = {check.function for check in CHECKS}
    own = {name for home, _, name in (f.partition(":") for f in functions) if home == module}
    modules: dict[str, str] = {}
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                found.add(f"{node.module}:{alias.name}")
                modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in own:
            found.add(f"{module}:{node.func.id}")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found.add(f"{modules.get(node.value.id)}:{node.attr}")
    return found & functions


def test_check_functions_are_called_by_the_walk_alone() -> None:
    root = Path(verlite.__file__).parent
    for path in root.rglob("*.py"):
        module = ".".join(["verlite", *path.relative_to(root).with_suffix("").parts])
        assert called_checks(module, path.read_text()) == set(), path
    assert all(callable(load(check.function)) for check in CHECKS)


@pytest.mark.parametrize(
    ("module", "source", "function"),
    [
        ("a", "from verlite.trainer.checks import tools as t", "verlite.trainer.checks:tools"),
        ("a", "from verlite.sft import checks\nchecks.room(1)", "verlite.sft.checks:room"),
        ("verlite.sft.checks", "def f(x):\n    room(x)", "verlite.sft.checks:room"),
    ],
)
def test_a_call_from_elsewhere_is_found(module: str, source: str, function: str) -> None:
    assert called_checks(module, source) == {function}


def test_checks_come_after_those_that_they_use() -> None:
    """And no check uses one that its command does not have."""
    for kind in (RL, SFT, DPO):
        before: list[str] = []
        for check in CHECKS:
            if kind in check.commands:
                assert set(check.uses) <= {*before, "train rows", "val rows", "train prompts"}
                before.append(check.name)
        assert len(before) == len(set(before))


@pytest.mark.parametrize("answers", [False, True])
def test_a_cluster_that_does_not_answer(
    made: Path, started: list[str], monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    """A run waits for it. check asks once, however long the run would wait."""
    monkeypatch.chdir(made)
    address = "ray_kwargs.ray_init.address=127.0.0.1:1"
    if answers:
        monkeypatch.setattr("verlite.controller.head._what_is_missing", lambda *given: None)
    code, said = printed(check_command, [*ARGUMENTS[RL], address, "ray_kwargs.wait_s=600"])
    assert code == 0 and started == []
    assert ("a run would not start now" in said) == (not answers)
    assert ("ray_kwargs.wait_s (here 600 s)" in said) == (not answers)
