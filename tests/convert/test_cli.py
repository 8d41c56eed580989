"""`verlite convert` in a terminal: output, files, exit codes."""

import shlex

import pytest
from typer.testing import CliRunner

from tests.convert.conftest import SAMPLES
from tests.convert.test_openrlhf import SMALLEST
from verlite.cli import app
from verlite.config.load import compose


def run(*arguments: object):
    return CliRunner().invoke(app, ["convert", *map(str, arguments)])


def test_openrlhf_prints_a_command():
    done = run("openrlhf", "--", "ray", "job", "submit", "--", "python3", "-m",
               "openrlhf.cli.train_ppo_ray", *shlex.split(SMALLEST))  # fmt: skip
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("# Converted from OpenRLHF by `verlite convert`.\n")
    assert "\npython -m verlite.main_ppo \\\n  data.train_files=/d/x.parquet \\\n" in done.stdout


def test_the_output_says_whose_defaults_apply(tmp_path):
    done = run("openrlhf", "--source-version", "0.6.1", "--", *shlex.split(SMALLEST))
    assert "# Defaults of OpenRLHF 0.6.1 (--source-version). Others in older" in done.stdout
    assert "\n  algorithm.lam=0.95 \\\n" in done.stdout
    run("openrlhf", "-o", tmp_path / "run", "--", *shlex.split(SMALLEST))
    assert "# Defaults of OpenRLHF 0.11.2" in (tmp_path / "run.yaml").read_text()


def test_rlinf_prints_a_command():
    done = run("rlinf", SAMPLES / "convert/rlinf.yaml")
    assert done.exit_code == 0, done.output
    assert "\n  actor_rollout_ref.rollout.n=16 \\\n" in done.stdout


@pytest.mark.parametrize("name", ["run", "run.yaml", "new/run.yaml"])
def test_a_yaml_file_is_written_and_never_replaced(tmp_path, name):
    done = run("openrlhf", "-o", tmp_path / name, "--", *shlex.split(SMALLEST))
    assert done.exit_code == 0, done.output
    path = (tmp_path / name).with_suffix(".yaml")
    assert f"--config-path {path.parent} --config-name run" in done.stdout
    assert compose("run", [], path.parent, check=False).config.data.max_prompt_length == 1024
    again = run("openrlhf", "-o", tmp_path / name, "--", *shlex.split(SMALLEST))
    assert (again.exit_code, again.stderr) == (
        2,
        f"{path} exists. Remove it, or choose another name.\n",
    )


def test_errors_print_no_command():
    done = run("openrlhf", "--", *shlex.split(SMALLEST), "--enable_ema", "--load_in_4bit")
    assert done.exit_code == 2
    assert done.stdout == ""
    assert "2 problems" in done.stderr
    assert "    OpenRLHF saves the moving average" in done.stderr
    assert "--enable_ema\n    has no counterpart in verlite.\n" in done.stderr


def test_a_wrong_flag_is_named():
    done = run("openrlhf", "--", "--zero_stge", "3")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "Did you mean --zero_stage?" in done.stderr


@pytest.mark.slow
def test_a_file_without_end_is_one_message(tmp_path):
    (tmp_path / "run.yaml").write_text("odd: &a [*a]\n")
    done = run("trl", tmp_path / "run.yaml")
    assert done.exit_code == 2 and "it has an alias of itself" in done.stderr
    done = run("trl", "--", "trl", "grpo", "--reward_weights", "[" * 5000 + "]" * 5000)
    assert done.exit_code == 2 and "nested too deeply, or without end" in done.stderr
