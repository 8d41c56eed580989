"""The script for a GPU machine: parts with deadlines, missing packages, results."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

BENCHMARK = Path(__file__).resolve().parents[2] / "recipes" / "benchmark"
ABSENT = ("ray", "vllm", "hydra", "wandb", "typer", "math_verify", "tensorboard", "matplotlib")
"""What a bare GPU machine may lack."""


@pytest.fixture
def script(monkeypatch):
    """Return a function that imports one of the scripts from their folder."""
    import importlib

    monkeypatch.syspath_prepend(str(BENCHMARK))
    return importlib.import_module


def blocking(folder: Path, names: tuple[str, ...]) -> dict[str, str]:
    """Return an environment in which no Python process can import these modules."""
    (folder / "sitecustomize.py").write_text(
        f"""from importlib.machinery import PathFinder
right = PathFinder.find_spec
def find_spec(cls, name, path=None, target=None):
    return None if name.split(".")[0] in {names!r} else right(name, path, target)
PathFinder.find_spec = classmethod(find_spec)
"""
    )
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)}


def test_flops_equal_torch_counts(script):
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import Qwen2Config, Qwen2ForCausalLM

    module = script("gpu")
    shape = module.SHAPES["tiny"]
    model = Qwen2ForCausalLM(
        Qwen2Config(tie_word_embeddings=True, attn_implementation="eager", **shape)
    )
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.zeros(1, 96, dtype=torch.long), use_cache=False)
    counted = counter.get_flop_counts()["Global"]
    whole_square = sum(flops for operation, flops in counted.items() if "bmm" in str(operation))
    expected = sum(counted.values()) - whole_square / 2  # torch also counts masked pairs
    batch = module.DataProto.from_dict(
        {"attention_mask": torch.ones(1, 96), "response_mask": torch.ones(1, 96)}
    )
    found = module.forward_flops(shape, sum(p.numel() for p in model.parameters()), batch)
    # forward_flops counts norms and biases (0.7% of the weights) as matrices. torch omits them.
    assert whole_square > 0.05 * expected and found == pytest.approx(expected, rel=0.01)
    half = batch.with_batch(response_mask=torch.ones(1, 96) * (torch.arange(96) < 48))
    assert (
        found - module.forward_flops(shape, sum(p.numel() for p in model.parameters()), half)
        == 2 * 128 * 64 * 48
    )


@pytest.mark.process
def test_gpu_script_runs_on_a_bare_machine(script, tmp_path):
    carried = script("bare").carry(tmp_path / "site")
    assert {"omegaconf", "antlr4-python3-runtime", "tensordict", "pyvers"} <= set(carried)
    environment = blocking(tmp_path / "site", ABSENT)
    parts = ["attention", "machine", "1.5b", "cumem", "1.5b-hf", "vllm"]
    command = [sys.executable, BENCHMARK / "gpu.py", "--device", "cpu", "--out", tmp_path]
    done = subprocess.run(
        [*command, "--parts", *parts], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    found = script("parts").read(tmp_path / "gpu.jsonl")
    assert list(found) == parts
    assert {row["status"] for name, row in found["attention"].items() if name != "process"} == {
        "passed",
        "skipped",
    }
    assert list(found["1.5b"]) == [
        "load",
        "update",
        "kernels",
        "log-probs",
        "offload and onload",
        "update without recomputation",
        "update, products kept",
        "update, compiled",
        "process",
    ]
    bad = {
        (part, name): row
        for part in ("machine", "1.5b", "1.5b-hf")
        for name, row in found[part].items()
        if "error" in row or ("skipped" in row and name != "update, compiled")
    }
    assert not bad
    update = found["1.5b"]["update"]
    assert update["tokens_per_s"] == pytest.approx(update["tokens"] / update["seconds"])
    kernels = found["1.5b"]["kernels"]
    largest = [kernel["ms"] for kernel in kernels["kernels"]]
    assert len(largest) == 20 and largest == sorted(largest, reverse=True)
    assert kernels["total_ms"] > sum(largest)
    engine = found["1.5b-hf"]["engine hf"]
    assert engine["sync"]["bytes"] == 4 * found["1.5b"]["load"]["parameters"]
    assert found["cumem"]["sleep and wake"]["skipped"] == "needs a GPU"
    assert found["vllm"]["all"]["reason"] == "vllm is not installed"
    # A table at the end, and at the start what is left out.
    table = done.stdout[done.stdout.rindex("peak GiB") :]
    assert all(row in table for row in found["1.5b"] if row != "process")
    assert "vllm is not installed: the vllm engine is left out" in done.stdout


@pytest.mark.process
def test_missing_packages_are_named_before_anything_runs(script, tmp_path):
    environment = blocking(tmp_path, ("torch", "tensordict", "omegaconf", "rich"))
    environment |= {"PATH": "", "CC": ""}
    began = time.time()
    done = subprocess.run(
        [sys.executable, BENCHMARK / "gpu.py"], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 1 and time.time() - began < 60
    assert "tensordict >= 0.10 (3.63 MiB, pure Python)" in done.stderr
    assert "omegaconf >= 2.3 (0.33 MiB, pure Python)" in done.stderr
    assert "torch >= 2.11 (not pure Python" in done.stderr
    assert "python recipes/benchmark/bare.py" in done.stderr
    assert "rich is not installed: a formatted table is left out" in done.stdout
    assert "no C compiler (cc): Triton cannot build kernels" in done.stdout
    assert "Traceback" not in done.stderr


def test_stated_sizes_are_those_of_the_installed_packages(script, tmp_path):
    module = script("bare")
    module.carry(tmp_path, optional=True)
    stated = sum(package.mib for package in module.PACKAGES if package.mib is not None)
    assert module.mebibytes(tmp_path) == pytest.approx(stated, rel=0.2)
    assert not list(tmp_path.rglob("*.so"))


def test_too_old_package_counts_as_missing(script, monkeypatch):
    module = script("bare")
    versions = {"torch": "2.10.1+cu128", "transformers": "5.17.0"}
    monkeypatch.setattr(
        module.importlib.metadata, "version", lambda name: versions.get(name, "99.0")
    )
    assert [package.name for package in module.missing()] == ["torch"]


PARTS = """
import subprocess, sys, time

def hang(results):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    results.write("started", {"child": child.pid})
    time.sleep(600)

def fail(results):
    raise SystemExit(3)

def work(results, number):
    results.write("worked", {"number": number, "left": results.left()})
"""


@pytest.mark.process
def test_hanging_part_costs_only_itself(script, tmp_path, monkeypatch):
    module = script("parts")
    (tmp_path / "hanging_parts.py").write_text(PARTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    parts = script("hanging_parts")
    path = tmp_path / "found.jsonl"
    module.run_parts(
        [
            module.Part("hangs", 4, parts.hang),
            module.Part("fails", 30, parts.fail),
            module.Part("works", 30, parts.work, (7,)),
            module.Part("long", 300, parts.work, (8,), needs=200),
        ],
        path,
        time.time() + 100,
    )
    found = module.read(path)
    assert list(found) == ["hangs", "fails", "works", "long"]
    # The hanging part keeps what it wrote, is killed at its own deadline with what it started, and
    # the next one has all of its own time.
    assert found["hangs"]["process"]["error"] == "killed: not finished after 4 s"
    assert found["hangs"]["process"]["seconds"] < 8
    status = Path(f"/proc/{found['hangs']['started']['child']}/status")
    assert not status.exists() or "State:\tZ" in status.read_text()
    assert found["fails"]["process"]["error"] == "the process ended with exit code 3"
    assert found["works"]["worked"]["number"] == 7
    assert found["works"]["worked"]["left"] > 20
    assert found["long"]["process"]["skipped"].startswith("needs about 200 s, and ")


def test_results_before_a_cut_are_read(script, tmp_path):
    module, path = script("parts"), tmp_path / "gpu.jsonl"
    module.Results(path, "one", 0).write("a", {"seconds": 1})
    with open(path, "a") as file:
        file.write('{"part": "one", "row": "b", "sec')
    assert module.read(path) == {"one": {"a": {"seconds": 1}}}


def test_the_command_ends_within_nine_minutes(script):
    """Its limit is that of all parts together. What matters most comes first."""
    module = script("gpu")
    parts = list(module.parts_of("cuda"))
    assert parts[:5] == ["attention", "ipc", "training", "trees", "memory"]
    assert parts[5:9] == ["machine", "1.5b", "7b-width", "hf"]
    assert all(part.needs < part.seconds for part in module.parts_of("cuda").values())


def test_failed_row_does_not_stop_the_others(script, tmp_path):
    module, path = script("gpu"), tmp_path / "gpu.jsonl"
    results = script("parts").Results(path, "tiny", time.time() + 50)
    row = module.Rows(results, torch.device("cpu"))

    def out_of_memory():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nSee docs")

    row("first", 1, lambda: {"seconds": 2})
    row("long", 60, lambda: pytest.fail("no time is left for this row"))
    row("broken", 1, lambda: {}["missing"])
    row("too large", 1, out_of_memory)
    row("last", 1, lambda: {"seconds": 3})
    found = script("parts").read(path)["tiny"]
    assert found["first"]["seconds"] == 2 and found["last"]["seconds"] == 3
    assert found["long"]["skipped"].startswith("takes about 60 s")
    assert found["broken"]["error"] == "KeyError: 'missing'"
    assert found["too large"]["skipped"] == "CUDA out of memory. Tried to allocate 9 GiB."
    assert not module.has_failed({"tiny": {"too large": found["too large"]}})
    notes = {line[1]: line[-1] for line in module.summary({"tiny": found})}
    assert notes["broken"] == "ERROR KeyError: 'missing'"
    assert notes["long"].startswith("skipped: takes about 60 s")
    assert module.has_failed({"tiny": found})
    passed = {"status": "passed", "figure": 0.1, "limit": 0.2}
    assert not module.has_failed({"one": {"a": passed, "process": {"seconds": 3.0}}})
    assert module.has_failed({"one": {"a": passed | {"status": "failed"}}})


def test_results_of_another_machine_are_kept_and_shown(script, tmp_path):
    module, report = script("gpu"), script("report")
    row = {"seconds": 1.5, "tokens_per_s": 40_000.0, "mfu": 0.41, "peak_gib": 30.2}
    name = "update"
    measured = {"load": {"parameters": 5, "device": "NVIDIA H200"}, name: row}
    path = tmp_path / "results.json"
    module.keep_part("1.5b", measured, path)
    module.keep_part("7b-width", {"load": {"error": "broken"}}, path)  # nothing to keep
    found = report.read(path)
    assert set(found["parts"]) == {"gpu_1.5b"} and found["gpu_update_mfu"] == 0.41
    shown = script("tables").tables(found)["gpu"]
    assert f"| 1.5b | {name} | 1.500 s | 40,000 | 41.0% | 30.2 |" in shown


def test_plain_table_is_aligned(script):
    assert script("parts").plain(("a", "bb"), [("ccc", "d"), ("", "[x]")]) == (
        "a    bb\nccc  d\n     [x]"
    )
