"""The `verlite` command: output, exit codes, start-up imports, modules of the working directory."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

import verlite as verlite_package
from tests.sizing.conftest import config_folder
from verlite.cli import app
from verlite.cli.common import from_data_classes
from verlite.config.load import main_argv

pytestmark = pytest.mark.process

PACKAGE = Path(verlite_package.__file__).parent


def verlite(*arguments: str) -> tuple[int, str]:
    """Run the command in this process; return the exit code and the output."""
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.output


def run_python(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run Python in a new process. Its PYTHONPATH contains this checkout."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=cwd)


def test_check_accepts_a_valid_command(material):
    code, text = verlite(
        "check",
        "--config-name",
        "grpo",
        *material.good,
        "actor_rollout_ref.rollout.n_agent=8",
        "data.train_batch_size=512",
    )
    assert code == 0, text
    assert "note: renamed keys: rollout.n_agent -> rollout.n\n" in text
    sizes = "512 prompts x 8 = 4096 samples / 8 devices = 512 each"
    assert f"{sizes}; 2 updates of 2048; micro-batches of 4" in text
    assert text.strip().endswith("The configuration is fine. See the notes above.")


def test_check_lists_all_problems(material):
    code, text = verlite("check", *material.good, "data.sede=1", "trainer.nnodes=0", "--wrong")
    assert code == 2
    for words in (
        "3 problems",
        "data.sede",
        "Did you mean data.seed",
        "trainer.nnodes",
        "must be >= 1",
        "--wrong",
    ):
        assert words in text


def test_check_imports_modules_of_the_working_directory(material, tmp_path):
    """The example environment of docs/agents.md passes `verlite check` as it passes main_ppo."""
    page = (PACKAGE.parent / "docs" / "agents.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(# my_game\.py\n.*?)```", page, re.DOTALL)
    (tmp_path / "my_game.py").write_text(example)
    line = [*material.good, "max_turns=5", "env.name=my_game:Game"]
    # -P: as for an installed script, the working directory is not on sys.path at the start.
    done = run_python("-P", "-m", "verlite", "check", *line, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("The configuration is fine. See the notes above.")


def test_plan_prints_values_and_origins(material):
    code, text = verlite("plan", "--config", *material.good)
    assert code == 0 and "n_gpus_per_node: 8  # command line" in text


def test_plan_needs_no_weights_and_no_data(tmp_path):
    """It runs where the job is written, which has neither GPUs nor the cluster's files."""
    config_folder(tmp_path / "model", "tiny")
    line = [
        f"actor_rollout_ref.model.path={tmp_path}/model",
        "data.train_files=/cluster/train.parquet",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "trainer.n_gpus_per_node=8",
    ]
    code, text = verlite("plan", "--no-memory", "--devices", "8xH100-80GB", *line)
    assert code == 0, text
    for words in (
        "run on this machine would be refused: data.train_files=/cluster/train.parquet",
        "would be refused: trainer.n_gpus_per_node=8",
        "cuda, FSDP2",
        "A node has 8 H100-80GB, 79.1 GiB each.",
        "Qwen2ForCausalLM, 8 layers",
        "8 engines on 1 node",
    ):
        assert words in text, words
    code, text = verlite("plan", "--devices", "4xH100-80GB", *line)
    assert code == 2 and "has 4 devices, but trainer.n_gpus_per_node=8" in text


def test_plan_survives_a_model_that_needs_values(tmp_path, monkeypatch):
    def needs_values(*arguments):
        raise RuntimeError("data-dependent\nand a long trace")

    monkeypatch.setattr("verlite.sizing.measure.Measurer.__call__", needs_values)
    config_folder(tmp_path / "model", "tiny")
    line = [f"actor_rollout_ref.model.path={tmp_path}/model", "data.train_files=absent.parquet"]
    line += ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4", "trainer.n_gpus_per_node=8"]
    code, text = verlite("plan", "--devices", "8x24GB", *line)
    assert code == 0 and "Memory cannot be shown: RuntimeError: data-dependent\n" in text
    assert "weight sync" in text


def test_plan_says_what_it_cannot_show(tmp_path):
    line = [f"actor_rollout_ref.model.path={tmp_path}", "data.train_files=absent.parquet"]
    line += ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4", "trainer.n_gpus_per_node=8"]
    code, text = verlite("plan", *line)
    assert code == 0 and "8 devices" in text
    assert "cannot be shown: model.path=" in text and "folder with a config.json" in text
    # What the run itself would get wrong anywhere is still refused.
    code, text = verlite("plan", *line, "trainer.nnodes=0")
    assert code == 2 and "trainer.nnodes" in text


def test_simulate_compares_modes_with_given_costs(tmp_path):
    """A model that this machine does not have, and engines on the trainer's devices."""
    line = [
        "simulate",
        "actor_rollout_ref.model.path=absent/model",
        "data.train_files=absent.parquet",
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "trainer.n_gpus_per_node=8",
        "trainer.device=cpu",
        "--response-length=100",
        "--prompt-length=10",
        "--decode-step-s=0.1",
        "--update-token-s=0.008",
    ]
    code, text = verlite(*line, "--json")
    assert code == 0, text
    found = json.loads(text)
    assert found["source"] == "given" and found["costs"]["update_token_s"] == 0.008
    names = [(r["settings"]["mode"], r["settings"]["max_age"]) for r in found["rows"]]
    ages = [("async", 1), ("async", 2), ("async", 4), ("async", 8)]
    assert names == [("sync", 1), ("pipelined", 1), *ages]
    assert found["rows"][0]["timing_s/step"] == pytest.approx(100 * 0.1 + 8 * 110 * 0.008 / 8)
    assert found["rows"][2]["timing_s/step"] < found["rows"][0]["timing_s/step"]
    code, text = verlite(*line)
    assert code == 0 and "Not modeled: failures" in text and "speed" in text
    assert "an engine generates 10 tokens/s of one sample and 640 of 64" in text
    code, text = verlite(*line, "--tool-latency=fast")
    assert code == 2 and "--tool-latency 'fast' must be a number above 0" in text
    code, text = verlite("simulate", str(tmp_path), *line[1:])
    assert code == 2 and "is not a run directory: it has no metrics.jsonl" in text


def test_explain_suggests_a_key():
    code, text = verlite("explain", "data.sede")
    assert code == 2 and "Did you mean data.seed" in text


def test_version_and_help():
    assert verlite("--version") == (0, f"verlite {verlite_package.__version__}\n")
    code, text = verlite("--help")
    assert code == 0 and "check " in text and "explain " in text
    code, text = verlite("check", "--help")
    assert code == 0 and "arguments of main_ppo" in text


LOADED = """
import sys
from verlite.cli import app
from verlite.main_ppo import main

def code(call, line):
    try:
        return call(line) or 0
    except SystemExit as stop:
        return stop.code or 0

for call, line, expected in ({calls}):
    assert code(call, line) == expected, line
print(sorted({heavy} & set(sys.modules)))
"""
SLOW_IMPORTS = {"torch", "transformers", "ray", "vllm", "numpy", "pyarrow", "fastapi", "uvicorn"}


@pytest.mark.parametrize(
    ("calls", "heavy"),
    [
        ("(app, ['--help'], 0), (app, ['simulate', '--help'], 0)", {"hydra", "omegaconf"}),
        ("(app, ['explain', 'data.seed'], 0), (app, ['check', 'a.b=1'], 2)", set()),
        ("(main, ['a.b=1'], 2),", set()),
    ],
    ids=["help", "check", "main_ppo"],
)
def test_help_and_refused_keys_do_not_wait_for_imports(calls, heavy):
    done = run_python("-c", LOADED.format(calls=calls, heavy=SLOW_IMPORTS | heavy))
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stderr


def test_check_imports_neither_ray_nor_an_engine_nor_an_http_client(material):
    calls = f"(app, {['check', *material.good]!r}, 0),"
    heavy = {"ray", "vllm", "fastapi", "wandb", "httpx", "verlite.trainer.groups"}
    done = run_python("-c", LOADED.format(calls=calls, heavy=heavy))
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stderr


ENDED = """
import atexit, sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from verlite.cli import program

class Freed:
    def __del__(self):
        print("freed")

sys.modules["torch"] = module_from_spec(ModuleSpec("torch", None))
kept = Freed()
atexit.register(print, "at exit")
sys.argv[1:] = {line}
program()
"""


@pytest.mark.parametrize(
    ("line", "code"), [(["--version"], 0), (["check", "a.b=1"], 2), (["no-such-command"], 2)]
)
def test_a_command_that_has_imported_torch_ends_at_once_with_its_exit_code(line, code):
    done = run_python("-c", ENDED.format(line=line))
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (code, ["at exit"]), done.stderr


def test_wheel_contains_yaml_files(material, tmp_path):
    """A wheel stores conf/ as verlite/conf. A user's YAML file can extend it from any folder."""
    ignore = shutil.ignore_patterns("__pycache__", "conf")
    shutil.copytree(PACKAGE, tmp_path / "verlite", ignore=ignore)
    shutil.copytree(PACKAGE.parent / "conf", tmp_path / "verlite" / "conf")
    own = "defaults:\n  - grpo\n  - _self_\ndata:\n  train_batch_size: 512\n"
    (tmp_path / "mine.yaml").write_text(own)
    line = ["plan", "--config-name", "mine", "--config-path", ".", *material.good]
    done = run_python("-m", "verlite.cli", *line, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "512 prompts x 5 = 2560 samples" in done.stdout
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["force-include"] == {"conf": "verlite/conf"}


@dataclass(frozen=True)
class _Common:
    """Options of several commands."""

    port: Annotated[int, typer.Option(min=1, help="Where.")] = 1
    name: Annotated[tuple[str, ...], typer.Option()] = ()
    inner: str = "not an option"


@dataclass(frozen=True)
class _Required:
    size: Annotated[int, typer.Option()]


def test_options_are_those_of_a_data_class():
    """Bounds, required and repeated options, and a command's own defaults."""
    seen = []
    own = typer.Typer()

    @own.command()
    @from_data_classes
    def command(required: _Required, common: _Common = _Common(port=7, name=("x",))) -> None:  # noqa: B008
        seen.append((required, common))

    runner = CliRunner()
    assert runner.invoke(own, ["--size", "3"]).exit_code == 0
    assert runner.invoke(own, ["--size", "3", "--port", "9", "--name=a", "--name=b"]).exit_code == 0
    assert seen == [(_Required(3), _Common(7, ("x",))), (_Required(3), _Common(9, ("a", "b")))]
    for wrong in ([], ["--size", "3", "--port", "0"], ["--size", "3", "--inner", "x"]):
        assert runner.invoke(own, wrong).exit_code == 2
    assert len(seen) == 2


def test_a_deleted_working_folder_is_named(tmp_path, monkeypatch, capsys):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    done = CliRunner().invoke(app, ["explain", "kl"])
    assert done.exit_code == 2 and not isinstance(done.exception, OSError)
    assert "the current folder cannot be used: No such file or directory" in done.output
    with pytest.raises(SystemExit) as ended:
        main_argv(["trainer.total_epochs=1"])
    assert ended.value.code == 2
    assert "the current folder" in capsys.readouterr().err
