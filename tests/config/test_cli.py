"""The `verlite` command in a process of its own: what it prints, its exit codes, how light it is."""

import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

import verlite as verlite_package


def verlite(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "verlite.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_check_of_a_good_line(material):
    done = verlite(
        "check",
        "--config-name",
        "grpo",
        *material.good,
        "actor_rollout_ref.rollout.n_agent=8",
        "data.train_batch_size=512",
    )
    assert done.returncode == 0, done.stderr
    assert (
        "note: actor_rollout_ref.rollout.n_agent is now called actor_rollout_ref.rollout.n\n"
        in done.stdout
    )
    assert (
        "512 prompts x 8 = 4096 samples / 8 devices = 512 each; 2 updates of 2048; micro-batches of 4"
        in done.stdout
    )
    assert done.stdout.strip().endswith("The configuration is fine.")


def test_check_of_a_bad_line_names_everything(material):
    done = verlite("check", *material.good, "data.sede=1", "trainer.nnodes=0", "--wrong")
    assert done.returncode == 2
    for words in (
        "3 problems",
        "data.sede",
        "Did you mean data.seed",
        "trainer.nnodes",
        "must be >= 1",
        "--wrong",
    ):
        assert words in done.stderr


def test_plan_prints_values_and_their_origins(material):
    done = verlite("plan", "--config", *material.good)
    assert (done.returncode, "n_gpus_per_node: 8  # command line" in done.stdout) == (0, True)


def test_explain_of_an_unknown_key():
    done = verlite("explain", "data.sede")
    assert (done.returncode, "Did you mean data.seed" in done.stderr) == (2, True)


@pytest.mark.parametrize("arguments", [["--help"], ["check"], ["explain", "data.seed"]])
def test_neither_torch_nor_ray_is_imported(material, arguments):
    line = [*arguments, *(material.good if arguments == ["check"] else [])]
    code = (
        "import sys\nfrom verlite.cli import app\n"
        f"try:\n    app({line!r})\nexcept SystemExit as stop:\n    assert not stop.code, stop.code\n"
        "heavy = {'torch', 'ray', 'transformers', 'vllm'} | ({'hydra', 'omegaconf'} if '--help' in "
        + repr(line)
        + " else set())\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert time.perf_counter() - start < 20  # seconds on a busy machine; about 1.5 on a quiet one


def test_an_installed_wheel_brings_its_yaml_files(material, tmp_path):
    """A wheel holds conf/ as verlite/conf (pyproject); a user's own file on top of it works from any folder."""
    package = Path(verlite_package.__file__).parent
    for name in ("__init__.py", "cli.py"):
        (tmp_path / "verlite").mkdir(exist_ok=True)
        shutil.copy(package / name, tmp_path / "verlite" / name)
    for room in (
        "config",
        "algorithms",
        "rewards",
        "envs",
    ):  # config reads names from the text of the others
        shutil.copytree(package / room, tmp_path / "verlite" / room)
    shutil.copytree(package.parent / "conf", tmp_path / "verlite" / "conf")
    (tmp_path / "mine.yaml").write_text(
        "defaults:\n  - grpo\n  - _self_\ndata:\n  train_batch_size: 512\n"
    )
    line = ["plan", "--config-name", "mine", "--config-path", ".", *material.good]
    done = subprocess.run(
        [sys.executable, "-m", "verlite.cli", *line],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "512 prompts x 5 = 2560 samples" in done.stdout
    wheel = tomllib.loads((package.parent / "pyproject.toml").read_text())["tool"]["hatch"][
        "build"
    ]["targets"]["wheel"]
    assert wheel["force-include"] == {"conf": "verlite/conf"}
