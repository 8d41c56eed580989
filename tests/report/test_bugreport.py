"""`verlite doctor` and `verlite bugreport`: what is found, what is masked, what is left out."""

import json
import os
import resource
import shutil
import subprocess
import sys
import zipfile
from collections import namedtuple
from pathlib import Path

import pytest
from typer.testing import CliRunner

from verlite.cli import app
from verlite.masking import mask_text
from verlite.report import doctor

USAGE = namedtuple("USAGE", "total used free")


def run(*arguments):
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.output


def named(findings, name):
    return [finding for finding in findings if finding.name == name]


def test_doctor_shows_this_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (65536, 65536))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: USAGE(1 << 40, 0, 1 << 39))
    code, text = run("doctor", str(tmp_path))
    assert code == 0, text
    for words in ("python", "torch", "ray", "transformers", "CPU cores", "GPUs", "open files"):
        assert words in text
    assert f"free in {tmp_path.resolve()}" in text
    assert text.strip().endswith("Nothing prevents a run on this machine.")


def test_doctor_names_what_is_missing_and_the_command(tmp_path, monkeypatch):
    versions = {"torch": "2.5.0", "verlite": "0.1.0", "vllm": "0.26.0"}
    requires = ["torch>=2.11,<2.14", "ray[default]>=2.52", "pytest>=8; extra == 'dev'"]
    monkeypatch.setattr(doctor, "_version", versions.get)
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: requires)
    monkeypatch.setattr(doctor, "old_vllm", lambda: "0.26.0")
    monkeypatch.setattr(doctor, "visible_gpus", lambda: 8)
    monkeypatch.setattr(doctor, "torch_build", lambda: "cpu")
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 8192))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: USAGE(1 << 30, 0, 64 << 20))
    code, text = run("doctor", str(tmp_path / "missing"))
    assert code == 1
    for words in (
        "torch 2.5.0, but verlite needs <2.14,>=2.11",
        'python -m pip install "torch<2.14,>=2.11"',
        "ray is not installed",
        'python -m pip install "ray>=2.52"',
        "vllm 0.26.0 is too old",
        "8, but the installed torch is built for CPUs only",
        "open files 1024, Ray needs 4096",
        "ulimit -n 8192",
        "docker run --shm-size=8g",
        f"mkdir -p {(tmp_path / 'missing').resolve()}",
        "A run would not start",
    ):
        assert words in " ".join(text.split()), words
    assert "problem pytest" not in " ".join(text.split())


def test_columns_are_as_wide_as_the_longest_name():
    findings = [
        doctor.Check("GPUs", "2 visible"),
        doctor.Check("CUDA_VISIBLE_DEVICES", "0", "problem", "unset it"),
    ]
    assert doctor.table(findings) == (
        "ok       GPUs                  2 visible\n"
        "problem  CUDA_VISIBLE_DEVICES  0\n"
        "                               unset it"
    )


def test_doctor_says_that_packages_are_compiled_in_every_process(tmp_path, monkeypatch):
    source = tmp_path / "large_package" / "__init__.py"
    source.parent.mkdir()
    source.write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(doctor, "COMPILED", ("large_package", "no_such_package"))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert list(doctor._bytecode()) == []  # the first process writes it
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    [found] = doctor._bytecode()
    assert found.level == "note" and "none of large_package, and" in found.text
    subprocess.run(found.remedy.split(), check=True, timeout=60)
    assert list(doctor._bytecode()) == []


@pytest.fixture
def run_dir(tmp_path):
    folder = tmp_path / "run"
    (folder / "logs").mkdir(parents=True)
    (folder / "rollouts").mkdir()
    (folder / "rollouts" / "step_1.jsonl").write_text('{"prompt": "private"}\n')
    (folder / "config.yaml").write_text("trainer:\n  project_name: sums\n  wandb_token: abcdef\n")
    lines = [json.dumps({"step": step, "perf/total_num_tokens": 12}) for step in range(80)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "error.json").write_text(json.dumps({"message": "https://me:geheim@host/x failed"}))
    (folder / "run.json").write_text("{}")
    log = "x" * doctor.LOG_BYTES + "\nHF_TOKEN=hf_abcdefghijklmnop1234\nvalue=s3cr3t-value!\n"
    (folder / "logs" / "actor_0.log").write_text(log)
    (folder / "logs" / "other.log").symlink_to("/etc/passwd")
    return folder


def test_bugreport_has_what_is_asked_for_and_no_secret(run_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "s3cr3t-value!")
    target = tmp_path / "report.zip"
    code, text = run("bugreport", str(run_dir), "-o", str(target))
    assert code == 0, text
    with zipfile.ZipFile(target) as archive:
        content = {name: archive.read(name).decode() for name in archive.namelist()}
    assert list(content) == [
        "doctor.txt",
        "files.txt",
        "config.yaml",
        "error.json",
        "run.json",
        "metrics.jsonl",
        "logs/actor_0.log",
    ]
    assert all(name in text for name in content)
    everything = "".join(content.values())
    for secret in ("abcdef", "geheim", "hf_abcdefghijklmnop1234", "s3cr3t-value!", "private"):
        assert secret not in everything
    assert "rollouts/step_1.jsonl" in content["files.txt"]
    assert "project_name: sums" in content["config.yaml"]
    assert content["config.yaml"].endswith("wandb_token: ***\n")
    steps = [json.loads(line) for line in content["metrics.jsonl"].splitlines()]
    assert [line["step"] for line in steps] == list(range(30, 80))
    assert steps[0]["perf/total_num_tokens"] == 12
    assert len(content["logs/actor_0.log"]) < doctor.LOG_BYTES


def test_bugreport_of_names_that_are_not_utf_8(run_dir, tmp_path):
    odd = os.fsencode(run_dir) + b"\xff\x1b"
    os.rename(run_dir, odd)
    (Path(os.fsdecode(odd)) / "logs" / os.fsdecode(b"a\xfe.log")).write_text("\x1b[2J\n")
    code, text = run("bugreport", os.fsdecode(odd), "-o", str(tmp_path / "b.zip"))
    assert code == 0, text
    assert "logs/a\\udcfe.log" in text
    with zipfile.ZipFile(tmp_path / "b.zip") as archive:
        assert archive.read("logs/a\\udcfe.log") == b"\\x1b[2J\n"
        assert b"logs/a\\udcfe.log" in archive.read("files.txt")


def test_bugreport_refuses_other_folders(tmp_path):
    for name, words in ((".", "is not a run directory"), ("none", "does not exist")):
        code, text = run("bugreport", str(tmp_path / name), "-o", str(tmp_path / "b.zip"))
        assert code == 2
        assert words in text
    assert not (tmp_path / "b.zip").exists()
    code, text = run("bugreport", str(tmp_path), "-o", str(tmp_path))
    assert (code, "is a folder" in text) == (2, True)


@pytest.mark.parametrize(
    "text, masked",
    [
        ("WANDB_API_KEY=0123abcd", "WANDB_API_KEY=***"),
        ('{"hf_token": "abc", "n": 3}', '{"hf_token": "***", "n": 3}'),
        ("password: 1234", "password: ***"),
        ("max_tokens=17 total_num_tokens: 5", "max_tokens=17 total_num_tokens: 5"),
        ("prompt_key=question", "prompt_key=question"),
        ("Authorization: Bearer abcdefgh.ijkl", "Authorization: *** ***"),
        ("http://h/x?api_key=1&n=2", "http://h/x?api_key=***&n=2"),
        ("at redis://me:p@ss@h:1/0", "at redis://me:***@h:1/0"),
        ("DB_PASS=x1y2 n=3", "DB_PASS=*** n=3"),
        ("OPENAI_API_KEY_2: abc", "OPENAI_API_KEY_2: ***"),
        ("Authorization: Basic bWU6cHc=", "Authorization: *** ***"),
        ("GET https://s3/x?X-Amz-Signature=ab12&n=2", "GET https://s3/x?X-Amz-Signature=***&n=2"),
        ("key sk-abcdefghijklmnopqrstuv end", "key *** end"),
        ("step 3: loss=0.5", "step 3: loss=0.5"),
    ],
)
def test_masked_text(text, masked):
    assert mask_text(text) == masked


def test_completion_can_be_shown(monkeypatch):
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    code, text = run("--show-completion", "bash")
    assert code == 0, text
    assert "complete -o default -F" in text
